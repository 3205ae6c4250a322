from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from algos.config import AlgoSection
from learner.collate import PackedBatch
from learner.orders import NonFiniteError
from learner.step import Minibatch, advantages_of, batch_figures, train_step
from wire.control import DeliveredGroup, DeliveredTrajectory
from wire.phases import PhaseClock
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


class CountingPolicy:
    """Returns the number of tokens of each update; the updates named are not finite."""

    def __init__(self, *bad: int) -> None:
        self.updates = 0
        self._bad = bad

    def proximal_logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        return [torch.zeros(1) for _ in batches]

    def update(self, batches: object, loss: object) -> tuple[dict[str, Tensor], float]:  # noqa: ARG002
        number, self.updates = self.updates, self.updates + 1
        if number in self._bad:
            raise NonFiniteError(f"update {number} is not finite")
        names = ("loss", "policy/entropy", "staleness/correction", "staleness/correction_squared")
        return {name: torch.tensor(10.0) for name in names}, 4.0


def step_of(*bad: int) -> tuple[dict[str, float], list[int]]:
    minibatches = [Minibatch([], global_num_tokens=10) for _ in range(3)]
    policy = CountingPolicy(*bad)
    figures, trained = train_step(policy, minibatches, AlgoSection(), PhaseClock())  # type: ignore[arg-type]  # a fake
    assert policy.updates == 3, "a minibatch was not tried"
    return figures, [one.number for one in trained]


@pytest.mark.parametrize("bad", [(), (0,), (1,), (0, 2)])
def test_minibatches_that_are_not_finite_are_counted_and_are_in_no_other_figure(
    bad: tuple[int, ...],
):
    figures, trained = step_of(*bad)
    assert trained == [number for number in range(3) if number not in bad]
    assert figures["policy/skipped_minibatches"] == len(bad)
    assert figures["policy/entropy"] == pytest.approx(1.0)
    assert figures["policy/loss"] == pytest.approx(10.0)
    assert figures["policy/grad_norm"] == pytest.approx(4.0)


def test_a_step_of_which_no_minibatch_is_finite_is_none():
    with pytest.raises(NonFiniteError, match="update 0 is not finite"):
        step_of(0, 1, 2)
