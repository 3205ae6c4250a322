"""All step figures of the learner arrive: in the history of the page and in TensorBoard."""

from collections import defaultdict
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

from slipstream.algos.diagnostics import (
    Diagnosed,
    critic_figures,
    critic_sums,
    diagnostic_sums,
    figures_of,
)
from slipstream.broker.history.history import RunHistory
from slipstream.broker.report.trackers.base import step_figures
from slipstream.broker.report.trackers.tensorboard import TensorBoardTracker
from slipstream.learner.training.step_data import batch_figures
from slipstream.wire.messages.broker import DeliveredGroup, DeliveredTrajectory
from slipstream.wire.messages.status import StepPoint
from slipstream.wire.messages.versions import PolicyVersion
from tests.support.ledger_driver import header
from tests.support.wire_samples import STATUS

BOUND = 8
STEP = 20


def group(lag: int) -> DeliveredGroup:
    """Return two answers of one version."""
    version = PolicyVersion(1, STEP - lag)
    answers = (
        DeliveredTrajectory(header=header(lag, sibling, version), reward=float(sibling * lag))
        for sibling in (0, 1)
    )
    return DeliveredGroup(group_id=lag, trajectories=tuple(answers))


def figures_at(bound: int) -> dict[str, float]:
    """Return the figures of a step with tokens of every lag, a critic and a reference policy."""
    lags = torch.arange(bound + 1).repeat_interleave(2)
    mask, values = torch.ones_like(lags, dtype=torch.bool), lags / 10
    seen = Diagnosed(
        mask=mask,
        keep=lags < bound,
        proximal=-values,
        behavior=-2 * values,
        entropy=1 + values,
        ratio=1 + values,
        weights=1 - values / 2,
        clipped_up=lags > 2,
        clipped_down=lags > 4,
        clipped_dual=lags > 6,
    )
    sums = diagnostic_sums(seen, lags, num_lags=bound + 1)
    sums["policy/kl_reference"] = values.sum()
    critic = critic_sums(mask=mask, values=values, returns=2 * values, is_clipped=~mask)
    return {
        **figures_of({name: float(total) for name, total in sums.items()}),
        **critic_figures({name: float(total) for name, total in critic.items()}),
        **batch_figures([group(lag) for lag in range(bound + 1)], STEP, num_lags=bound + 1),
        **dict.fromkeys(("policy/loss", "policy/grad_norm", "critic/loss", "time/step"), 0.5),
    }


def by_lag(names: list[str]) -> dict[str, set[int]]:
    found: defaultdict[str, set[int]] = defaultdict(set)
    for name in names:
        base, at, lag = name.partition("@lag")
        if at:
            found[base].add(int(lag))
    return dict(found)


def test_every_figure_of_a_step_can_be_read_back_from_tensorboard(tmp_path: Path):
    figures = figures_at(BOUND)
    tracker = TensorBoardTracker(tmp_path)
    tracker.log(STEP, step_figures(StepPoint(step=STEP, at_s=1.0, metrics=figures), STATUS))
    tracker.close()

    events = EventAccumulator(str(tmp_path), size_guidance={"tensors": 0})
    events.Reload()
    points = {
        name: [(e.step, e.tensor_proto.float_val[0]) for e in events.Tensors(name)]
        for name in events.Tags()["tensors"]
    }

    assert set(figures) <= set(points)
    for name, value in figures.items():
        assert points[name] == [(STEP, pytest.approx(value, rel=1e-6))], name
    assert by_lag(list(points)) == {base: set(range(BOUND + 1)) for base in BY_LAG}
    assert points["policy/clip_up@lag3"][0][1] == 1.0
    assert points["policy/clip_up@lag2"][0][1] == 0.0
    assert points["reward/group_variance@lag4"][0][1] == 4.0  # of rewards 0 and 4


BY_LAG = {
    *("policy/tokens", "policy/entropy", "policy/ratio", "policy/ratio_max"),
    *("policy/clip_fraction", "policy/clip_up", "policy/clip_down", "policy/clip_dual"),
    *("staleness/masked", "staleness/weight", "staleness/correction", "staleness/correction_max"),
    *("staleness/ess", "staleness/mismatch_kl", "staleness/logprob_abs_diff"),
    "reward/group_variance",
}


def kept(figures: dict[str, float]) -> dict[str, float | None]:
    """Return what the page's history keeps of a step; a later one has further figures."""
    history = RunHistory(began_s=0.0)
    history.step(StepPoint(step=STEP, at_s=0.0, metrics=figures), 1.0)
    later = {**figures, **{f"custom/{i}": 1.0 for i in range(50)}}
    history.step(StepPoint(step=STEP + 1, at_s=0.0, metrics=later), 2.0)
    return {name: column[-1] for name, column in history.columns().steps.series.items()}


def test_the_page_keeps_every_figure_at_a_staleness_bound_of_eight():
    figures = figures_at(BOUND)
    custom = {f"custom/{i}": 1.0 for i in range(50)}
    assert kept(figures) == pytest.approx({**figures, **custom})


def test_beyond_what_fits_the_page_leaves_out_figures_by_lag_only_and_the_oldest_lags_first():
    figures = figures_at(40)
    found = kept(figures)
    whole = {name for name in figures if "@" not in name}
    assert whole | {f"custom/{i}" for i in range(50)} <= set(found)
    lags = by_lag(list(found))["staleness/mismatch_kl"]
    assert set(range(BOUND + 1)) < lags == set(range(len(lags))) < set(range(41))
