import pytest

from algos.config import AlgoSection
from learner.step import advantages_of, batch_figures
from wire.control import DeliveredGroup, DeliveredTrajectory
from wire.trajectory import TrajectoryHeader, VersionRun
from wire.versions import PolicyVersion


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


def test_advantages_come_in_the_order_of_groups_and_siblings():
    values = advantages_of(groups(), AlgoSection(advantage="grpo-without-std"))
    assert values == pytest.approx([0.5, -0.5, 0.0, 0.0])


def test_advantages_divide_by_the_deviation_of_their_own_group():
    values = advantages_of(groups(), AlgoSection(advantage="grpo"))
    assert values == pytest.approx([0.7071, -0.7071, 0.0, 0.0], abs=1e-4)


def test_batch_figures_weigh_staleness_by_tokens():
    trajectories = [t for group in groups() for t in group.trajectories]
    figures = batch_figures(trajectories, step=5)
    assert figures["reward/mean"] == pytest.approx(0.5)
    assert figures["response/tokens"] == 6
    assert figures["response/truncated"] == 0.5
    assert figures["staleness/oldest"] == 2
    # 6 tokens at lag 2, then 3 at 2 and 3 at 0, 6 at 0, 6 at 1
    assert figures["staleness/mean"] == pytest.approx((12 + 6 + 0 + 0 + 6) / 24)
