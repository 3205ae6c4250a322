"""What the weight bus's benchmark computes without running anything."""

import pytest

from benchmarks.weightbus.figures import growth, loss_beyond_pause, mean_of, pause_s, share
from benchmarks.weightbus.late_join import JoinFigures
from benchmarks.weightbus.learner_side import StepFigures
from benchmarks.weightbus.many_members import ManyFigures
from benchmarks.weightbus.model import BUCKET_BYTES, MIB, ONE_BILLION, SMOLLM2
from benchmarks.weightbus.plain_bulk import BulkFigures, PlainFigures
from benchmarks.weightbus.served import ControlFigures, LossFigures
from benchmarks.weightbus.wire_phase import Turn, WireFigures


def _turn(seconds: float, *, digest_cpu_s: float = 0.01) -> Turn:
    return Turn(seconds=seconds, digest_s=0.01, cpu_s=0.2, digest_cpu_s=digest_cpu_s)


def test_the_published_versions_have_the_sizes_that_they_are_named_for():
    assert sum(spec.num_bytes for spec in SMOLLM2.specs()) == 269_030_016
    assert 2.0e9 < sum(spec.num_bytes for spec in ONE_BILLION.specs()) < 2.2e9
    layout = SMOLLM2.layout()
    assert layout.num_bytes == 269_030_016
    small = [bucket for bucket in layout.buckets if len(bucket.tensors) > 1]
    assert all(bucket.num_bytes <= BUCKET_BYTES for bucket in small)


def wire(receivers: int, **rounds: object) -> WireFigures:
    figures = WireFigures(num_bytes=1, receivers=receivers)
    for name, taken in rounds.items():
        setattr(figures, name, taken)
    return figures


BEST_OF_EACH_ROUND = wire(
    1,
    raw={4 * MIB: [0.3, 0.3, 0.3], 64 * MIB: [0.1, 0.2, 0.1]},
    ours={BUCKET_BYTES: [_turn(0.2), _turn(0.25), _turn(0.2)]},
)
RAW_OF_ITS_KIND = wire(
    2,
    raw={4 * MIB: [0.18]},
    raw_shared={4 * MIB: [0.9], 8 * MIB: [0.6]},
    ours={BUCKET_BYTES: [_turn(0.2, digest_cpu_s=0.02)]},
    ours_shared=[_turn(0.8)],
)
DEFAULT_BUCKETS = wire(
    1, raw={4 * MIB: [0.2]}, ours={16 * MIB: [_turn(0.1)], BUCKET_BYTES: [_turn(0.4)]}
)
LATE = JoinFigures(1, transfer=[0.2, 0.4, 0.3], publish=[0.5, 0.5, 0.5], join=[0.3, 0.4, 0.6])
MEDIANS = StepFigures(without=[2.0, 2.0, 9.0], with_publish=[2.1, 1.0, 2.2], relay=0.3)
CALLS = ControlFigures(commands=5, calls=7, command_s=0.001, call_s=0.1, scheduler_call_s=0.002)
MANY = ManyFigures(1_000, cpu_s=[0.5, 0.7, 0.6], seconds=[2.0, 3.0, 2.0], idle_cpu_s=0.1)
LOSS = LossFigures([1000.0, 1200.0], [900.0, 1200.0], [0.08, 0.0])
PLAIN = PlainFigures(
    encrypted=BulkFigures(1, wire=[2.0, 3.0], received=[2.5, 9.0]),
    plain=BulkFigures(1, wire=[4.0, 0.5], received=[2.0, 2.0]),
)
WAITS = {"digest": 5.0, "offer": 5.0, "receive": 5.0, "group": 5.0}
PAUSED = {"pause": 0.1, "transfer": 0.2, "load": 0.3, "verify": 0.4, "commit": 0.5}


def test_a_figure_is_of_what_it_is_named_for():
    for found, expected in [
        (share(0.17, 0.2), 0.85),
        (growth(2.2, 2.0), 0.1),
        (BEST_OF_EACH_ROUND.raw_best, (64 * MIB, 0.1)),
        (BEST_OF_EACH_ROUND.share, 0.5),
        (BEST_OF_EACH_ROUND.digest_share, 0.05),
        (RAW_OF_ITS_KIND.share, 0.9),
        (RAW_OF_ITS_KIND.digest_share, 0.1),
        (RAW_OF_ITS_KIND.share_shared, 0.75),
        (DEFAULT_BUCKETS.share, 0.5),
        (pause_s(WAITS | PAUSED), 1.5),
        (loss_beyond_pause(rate=900.0, rate_alone=1000.0, pause_share=0.08), 0.02),
        (LOSS.losses, [0.02, 0.0]),
        (LOSS.noise, 200 / 1100),
        (LATE.ratio, 1.5),
        (LATE.ratio_to_publish, 0.8),
        (MEDIANS.growth_of_learner, 0.05),
        (MEDIANS.growth, 0.2),
        (CALLS.seconds, 0.019),
        (MANY.median_cpu_s, 0.4),
        (PLAIN.wire_share, 0.25),
        (PLAIN.received_share, 0.8),
    ]:
        assert found == pytest.approx(expected)


def test_a_mean_comes_with_what_it_could_have_seen_and_a_verdict():
    mean = mean_of([0.01, 0.03] * 50)
    assert mean.mean == pytest.approx(0.02)
    assert mean.error == pytest.approx(0.001, rel=0.01)
    assert (mean.low, mean.high) == pytest.approx((0.01804, 0.02196), abs=1e-4)
    assert mean.detectable == pytest.approx(0.0028, rel=0.02)
    assert mean.verdict(0.03) == "at most 0.03"
    assert mean.verdict(0.01) == "more than 0.01"
    assert mean.verdict(0.02) == "no verdict on 0.02"
