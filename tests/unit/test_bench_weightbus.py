"""What the weight bus's benchmark computes without running anything."""

import pytest

from benchmarks.weightbus.figures import (
    best,
    growth,
    loss_beyond_pause,
    mean_of,
    pause_s,
    share,
    table,
)
from benchmarks.weightbus.late_join import JoinFigures
from benchmarks.weightbus.learner_side import StepFigures
from benchmarks.weightbus.many_members import ManyFigures
from benchmarks.weightbus.model import BUCKET_BYTES, MIB, ONE_BILLION, SMOLLM2
from benchmarks.weightbus.plain_bulk import BulkFigures, PlainFigures
from benchmarks.weightbus.served import ControlFigures, LossFigures
from benchmarks.weightbus.wire_phase import Turn, WireFigures
from slipstream.weightbus.config import WeightBusSection


def _turn(seconds: float, *, digest_cpu_s: float = 0.01) -> Turn:
    return Turn(seconds=seconds, digest_s=0.01, cpu_s=0.2, digest_cpu_s=digest_cpu_s)


def test_the_published_versions_have_the_sizes_that_they_are_named_for():
    assert sum(spec.num_bytes for spec in SMOLLM2.specs()) == 269_030_016
    assert 2.0e9 < sum(spec.num_bytes for spec in ONE_BILLION.specs()) < 2.2e9
    layout = SMOLLM2.layout()
    assert layout.num_bytes == 269_030_016
    small = [bucket for bucket in layout.buckets if len(bucket.tensors) > 1]
    assert all(bucket.num_bytes <= BUCKET_BYTES for bucket in small)


def test_a_share_is_of_the_baselines_speed_and_growth_of_its_cost():
    assert share(0.17, 0.2) == pytest.approx(0.85)
    assert growth(2.2, 2.0) == pytest.approx(0.1)


def test_the_best_setting_is_the_one_with_the_smallest_median():
    assert best({4: [1.0, 9.0, 2.0], 8: [3.0, 3.0, 0.1], 16: [1.9, 1.8, 50.0]}) == (16, 1.9)


def test_the_wire_share_compares_each_round_with_the_best_raw_buckets_of_the_same_round():
    figures = WireFigures(num_bytes=1, receivers=1)
    figures.raw = {4 * MIB: [0.3, 0.3, 0.3], 64 * MIB: [0.1, 0.2, 0.1]}
    figures.ours = {BUCKET_BYTES: [_turn(0.2), _turn(0.25), _turn(0.2)]}
    assert figures.raw_best == (64 * MIB, 0.1)
    assert figures.share == pytest.approx(0.5)
    assert figures.digest_share == pytest.approx(0.05)


def test_a_group_each_and_one_that_is_shared_are_compared_with_raw_ones_of_their_own_kind():
    figures = WireFigures(num_bytes=1, receivers=2)
    figures.raw, figures.raw_shared = {4 * MIB: [0.18]}, {4 * MIB: [0.9], 8 * MIB: [0.6]}
    figures.ours = {BUCKET_BYTES: [_turn(0.2, digest_cpu_s=0.02)]}
    figures.ours_shared = [_turn(0.8)]
    assert figures.share == pytest.approx(0.9)
    assert figures.digest_share == pytest.approx(0.1)
    assert figures.share_shared == pytest.approx(0.75)


def test_the_buckets_of_the_bar_are_the_relays_default_however_fast_others_are():
    figures = WireFigures(num_bytes=1, receivers=1)
    figures.raw = {4 * MIB: [0.2]}
    figures.ours = {16 * MIB: [_turn(0.1)], BUCKET_BYTES: [_turn(0.4)]}
    assert figures.share == pytest.approx(0.5)


def test_relays_go_to_one_group_per_engine_by_default():
    assert WeightBusSection().engines_per_group == 1


def test_an_engine_is_paused_from_the_pause_to_the_commit():
    phases = {"digest": 5.0, "offer": 5.0, "receive": 5.0, "group": 5.0}
    paused = {"pause": 0.1, "transfer": 0.2, "load": 0.3, "verify": 0.4, "commit": 0.5}
    assert pause_s(phases | paused) == pytest.approx(1.5)


def test_the_pause_share_is_no_loss_beyond_the_pause():
    loss = loss_beyond_pause(rate=900.0, rate_alone=1000.0, pause_share=0.08)
    assert loss == pytest.approx(0.02)
    figures = LossFigures([1000.0, 1200.0], [900.0, 1200.0], [0.08, 0.0])
    assert figures.losses == pytest.approx([0.02, 0.0])
    assert figures.noise == pytest.approx(200 / 1100)


def test_late_joins_are_compared_with_the_transfer_of_the_same_round():
    figures = JoinFigures(1, transfer=[0.2, 0.4, 0.3], publish=[0.5, 0.5, 0.5])
    figures.join = [0.3, 0.4, 0.6]
    assert figures.ratio == pytest.approx(1.5)
    assert figures.ratio_to_publish == pytest.approx(0.8)


def test_steps_are_compared_by_their_medians_and_the_relay_counts():
    figures = StepFigures(without=[2.0, 2.0, 9.0], with_publish=[2.1, 1.0, 2.2], relay=0.3)
    assert figures.growth_of_learner == pytest.approx(0.05)
    assert figures.growth == pytest.approx(0.2)


def test_control_costs_counted_calls_times_one_that_does_nothing():
    figures = ControlFigures(
        commands=5, calls=7, command_s=0.001, call_s=0.1, scheduler_call_s=0.002
    )
    assert figures.seconds == pytest.approx(0.019)


def test_a_table_is_markdown():
    assert table(("a", "b"), [("1", "2")]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


def test_a_mean_comes_with_what_it_could_have_seen_and_a_verdict():
    mean = mean_of([0.01, 0.03] * 50)
    assert mean.mean == pytest.approx(0.02)
    assert mean.error == pytest.approx(0.001, rel=0.01)
    assert (mean.low, mean.high) == pytest.approx((0.01804, 0.02196), abs=1e-4)
    assert mean.detectable == pytest.approx(0.0028, rel=0.02)
    assert mean.verdict(0.03) == "at most 0.03"
    assert mean.verdict(0.01) == "more than 0.01"
    assert mean.verdict(0.02) == "no verdict on 0.02"


def test_heartbeats_are_no_cost_of_a_publish():
    figures = ManyFigures(1_000, cpu_s=[0.5, 0.7, 0.6], seconds=[2.0, 3.0, 2.0], idle_cpu_s=0.1)
    assert figures.median_cpu_s == pytest.approx(0.4)


def test_plain_bytes_are_compared_with_encrypted_ones_by_the_best_turn_of_each():
    figures = PlainFigures(
        encrypted=BulkFigures(1, wire=[2.0, 3.0], received=[2.5, 9.0]),
        plain=BulkFigures(1, wire=[4.0, 0.5], received=[2.0, 2.0]),
    )
    assert figures.wire_share == pytest.approx(0.25)
    assert figures.received_share == pytest.approx(0.8)
