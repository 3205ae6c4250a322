"""Figures of a batch before it is trained."""

import msgspec
import pytest

from slipstream.learner.training.step_data import batch_figures, step_data
from slipstream.wire.messages.broker import DeliveredTrajectory
from slipstream.wire.messages.trajectory import Turn
from tests.support.delivered_groups import groups


def test_outcomes_come_in_the_order_of_groups_and_siblings():
    data = step_data(groups(), step=5, seed=3)
    assert data.outcomes.rewards.tolist() == [1.0, 0.0, 0.5, 0.5]
    assert data.outcomes.groups.tolist() == [0, 0, 1, 1]
    assert data.outcomes.lengths.tolist() == [6, 6, 6, 6]
    assert data.is_truncated.tolist() == [True, False, True, False]


def test_batch_figures_weigh_staleness_by_tokens():
    figures = batch_figures(groups(), step=5)
    assert figures["reward/mean"] == pytest.approx(0.5)
    assert figures["response/tokens"] == 6
    assert figures["response/truncated"] == 0.5
    assert figures["staleness/oldest"] == 2
    # 6 tokens at lag 2, then 3 at 2 and 3 at 0, 6 at 0, 6 at 1
    assert figures["staleness/mean"] == pytest.approx((12 + 6 + 0 + 0 + 6) / 24)


def test_batch_figures_have_the_mean_of_each_number_that_rewards_come_with():
    group, other = groups()
    first, second = group.trajectories
    parts = [{"score": 1.0, "off_by": 2.0, "a.b": 0.0}, {"score": 0.0, "off_by": 5.0}]
    both = [
        msgspec.structs.replace(one, parts=own)
        for one, own in zip((first, second), parts, strict=True)
    ]
    figures = batch_figures([msgspec.structs.replace(group, trajectories=both), other], step=5)
    of_parts = {name: value for name, value in figures.items() if "/part/" in name}
    assert of_parts == {"reward/part/a.b": 0.0, "reward/part/off_by": 3.5}


def test_batch_figures_count_turns_and_branches():
    def of_turns(one: DeliveredTrajectory, *branches: int) -> DeliveredTrajectory:
        first, end = one.header.num_prompt_tokens, one.header.num_tokens
        turns = (Turn(first, 1), Turn(first + 2, 1), Turn(first + 4, end - first - 4))
        header = msgspec.structs.replace(
            one.header, turns=turns, branches=branches, version_runs=one.header.version_runs[:1]
        )
        return msgspec.structs.replace(one, header=header)

    one, other = groups()
    figures = batch_figures([one, other], step=5)
    assert [figures[f"turns/{name}"] for name in ("mean", "max", "branched")] == [1.0, 1.0, 0.0]
    first, second = other.trajectories
    branch = first.header.num_prompt_tokens + 1
    mixed = msgspec.structs.replace(other, trajectories=(of_turns(first, branch), of_turns(second)))
    figures = batch_figures([one, mixed], step=5)
    assert [figures[f"turns/{name}"] for name in ("mean", "max", "branched")] == [2.0, 3.0, 0.25]


def test_the_variance_of_a_group_counts_to_the_lag_of_its_oldest_token():
    figures = batch_figures(groups(), step=5, num_lags=3)
    assert figures["reward/group_variance"] == pytest.approx(0.125)
    assert figures["reward/group_variance@lag2"] == pytest.approx(0.25)
    assert figures["reward/group_variance@lag1"] == pytest.approx(0.0)
    assert "reward/group_variance@lag0" not in figures
