"""Parts of SGLang as we have them: groups with the manners of NCCL, ranks, products on a CPU."""

import json
from pathlib import Path

import pytest

from tests.integration.engine_on_cpu import ADAPTERS, CASES, EXPERTS, LOGITS
from tests.support.ranks.run import outputs, start

pytestmark = pytest.mark.integration


def test_no_end_waits_for_a_peer_longer_than_its_deadline(tmp_path: Path):
    ends = [
        start(tmp_path, "support.ranks.weight_group", end, tmp_path, anew=end == "engine")
        for end in ("relay", "engine")
    ]
    relay, engine = (json.loads(printed.splitlines()[-1]) for printed in outputs(ends))
    late = "a broadcast of weights did not end in 15 s (weightbus.timeout_s)"
    assert relay == {"absent": f"not all engines joined group absent: {late}", "whole": "joined"}
    assert engine["absent"] == late
    assert engine["groups"] == "whole"
    assert engine["received"] == "[[0.0, 1.0], [[2.0, 3.0, 4.0], [5.0, 6.0, 7.0]]]"
    assert engine["after the relay left"].startswith("a broadcast of weights failed: ")
    assert engine["left"] == "group whole is left"


def test_an_engine_answers_for_all_of_its_ranks(tmp_path: Path):
    (printed,) = outputs([start(tmp_path, "support.ranks.engine_ranks", tmp_path, 2, anew=True)])
    first, second = json.loads(printed.splitlines()[-1])
    assert first[0] == second[0] == [True, "joined"]
    assert first[1] == [False, "rank 1 of this engine failed: its log has the reason"]
    assert second[1] == [False, "no route"]
    assert first[2] == [False, "no route"]


def test_a_cpu_computes_what_sglang_computes(tmp_path: Path):
    (printed,) = outputs([start(tmp_path, "integration.engine_on_cpu")])
    found = json.loads(printed)
    assert {name.rsplit(" ", 1)[0] for name in found} == {*ADAPTERS, *CASES, *EXPERTS, *LOGITS}
    assert all(value < 1e-5 for value in found.values()), found  # NaN fails too
    assert found["widened logits 0"] == 0
