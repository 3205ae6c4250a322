"""What the benchmark of a learner step compares, and how its bar comes about."""

import numpy as np
import pytest
import torch

from benchmarks.bars import Bars
from benchmarks.bench_learner import (
    CASES,
    Step,
    difference,
    inputs_of,
    parts_of,
    remaining,
    report,
    sequences,
)
from slipstream.deploy.examples.addition import SHIPPED_POLICY


def test_every_way_trains_each_sequence_once():
    lengths = [5, 3, 9, 4, 4, 8, 7, 1, 2, 6]
    for way in ("padded", "sorted", "packed", "single"):
        parts = parts_of(way, lengths)
        assert sorted(i for part in parts for i in part) == list(range(10)), way
    assert [len(part) for part in parts_of("sorted", lengths)] == [8, 2]
    assert [lengths[i] for part in parts_of("sorted", lengths) for i in part] == sorted(lengths)
    assert [len(part) for part in parts_of("single", lengths)] == [1] * 10


def test_padded_rows_and_one_packed_row_hold_the_same_tokens():
    some = sequences(CASES["quickstart"], SHIPPED_POLICY)[:3]
    lengths = [len(one.token_ids) for one in some]
    advantages = torch.tensor([1.0, -2.0, 3.0])
    rows, given = inputs_of(some, advantages, packed=False)
    assert rows["attention_mask"].sum(1).tolist() == lengths
    assert rows["input_ids"].shape == given["mask"].shape == (3, max(lengths))
    row, packed = inputs_of(some, advantages, packed=True)
    real = rows["attention_mask"].bool()
    assert row["input_ids"][0].tolist() == rows["input_ids"][real].tolist()
    assert row["position_ids"][0].tolist() == [i for n in lengths for i in range(n)]
    for name, values in packed.items():
        assert values[0].tolist() == given[name][real].tolist(), name
    assert int(given["mask"].sum()) == int(np.sum([one.loss_mask.sum() for one in some]))


def steps(**seconds: float) -> dict[str, list[Step]]:
    return {way: [Step(s, 0.5, 2.0)] * 3 for way, s in seconds.items()}


def test_the_bar_is_against_the_cheapest_way(capsys: pytest.CaptureFixture[str]):
    bars = Bars()
    report(bars, "a", steps(learner=1.2, padded=2.0, sorted=1.0, packed=9.0, single=4.0))
    printed = capsys.readouterr().out
    assert "the cheapest way of transformers is sorted" in printed
    assert "bar learner_agrees_a: 0.000 relative difference (needs <= 0.001): ok" in printed
    assert "bar learner_cpu_seconds_a: 1.200 x (needs <= 1.1): short" in printed
    assert bars.exit_code == 1


def test_ways_that_cannot_be_the_cheapest_are_given_up_and_the_learner_is_not():
    taken = steps(learner=9.0, padded=2.0, sorted=1.0, packed=2.1, single=4.0)
    assert remaining(taken) == ["learner", "padded", "sorted"]


def test_steps_differ_by_the_larger_of_loss_and_norm():
    assert difference(Step(1.0, 0.5, 2.0), Step(9.0, 0.5, 1.9)) == pytest.approx(0.05)
    assert difference(Step(1.0, 0.0, 2.0), Step(9.0, 0.0, 2.0)) == 0.0
