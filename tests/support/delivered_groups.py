"""Two groups of two trajectories, as a learner gets them."""

from slipstream.wire.messages.broker import DeliveredGroup, DeliveredTrajectory
from slipstream.wire.messages.trajectory import TrajectoryHeader, VersionRun
from slipstream.wire.messages.versions import PolicyVersion


def trajectory(group_id: int, sibling: int, reward: float, *runs: tuple[int, int]):
    """Make a delivered trajectory of 4 prompt and 6 response tokens."""
    header = TrajectoryHeader(
        group_id=group_id,
        sibling=sibling,
        lease_id=0,
        num_prompt_tokens=4,
        num_tokens=10,
        version_runs=tuple(VersionRun(first, PolicyVersion(1, step)) for first, step in runs),
        temperature=1.0,
        finish_reason="stop" if sibling else "length",
    )
    return DeliveredTrajectory(header=header, reward=reward)


def groups() -> list[DeliveredGroup]:
    first = (trajectory(0, 0, 1.0, (4, 3)), trajectory(0, 1, 0.0, (4, 3), (7, 5)))
    second = (trajectory(1, 0, 0.5, (4, 5)), trajectory(1, 1, 0.5, (4, 4)))
    return [
        DeliveredGroup(group_id=0, trajectories=first),
        DeliveredGroup(group_id=1, trajectories=second),
    ]
