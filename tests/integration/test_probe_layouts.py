"""The probe of a learner: the same whatever the layout, and nothing changes by it."""

import json
import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.ranks.run import outputs, reports, start_ranks
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.integration
LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "tensor": (2, {"tensor_parallel": 2}),
    "pipeline": (2, {"pipeline_parallel": 2}),
    "context": (2, {"context_parallel": 2}),
    "data": (2, {}),
}


def order(every: int) -> str:
    bus = {"probe_tokens": 31, "probe_sequences": 3, "probe_every": every}
    return json.dumps({"steps": 2, "lora": None, "weightbus": bus})


@pytest.mark.slow
def test_every_layout_computes_the_same_probe_on_every_rank(tmp_path: Path):
    model = write_tiny_model(tmp_path / "model", "qwen3")
    program = "support.ranks.probes"
    outputs(start_ranks(program, model, tmp_path / "one", 1, [order(1)], lr=1e-3))
    (alone,) = reports(tmp_path / "one", 1)
    assert alone["same"]
    shapes = {(len(one["logprobs"]), len(one["logprobs"][0])) for one in alone["probes"]}
    assert shapes == {(3, 16)}
    first, last = (alone["probes"][i]["logprobs"] for i in (0, -1))
    assert first[0] != pytest.approx(last[0], abs=1e-3), "training moved nothing"
    for name, (ranks, sizes) in LAYOUTS.items():
        work = tmp_path / name
        outputs(start_ranks(program, model, work, ranks, [order(1)], lr=1e-3, **sizes))
        for report in reports(work, ranks):
            assert report["same"]
            for found, expected in zip(report["probes"], alone["probes"], strict=True):
                assert found["sequences"] == expected["sequences"]
                for row, right in zip(found["logprobs"], expected["logprobs"], strict=True):
                    assert row == pytest.approx(right, abs=1e-4), name
        shutil.rmtree(work)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_training_is_the_same_to_the_bit_with_and_without(tmp_path: Path, family: str):
    model = write_tiny_model(tmp_path / "model", family)
    weights = {}
    for every in (0, 1):
        work = tmp_path / str(every)
        program = "support.ranks.probes"
        outputs(start_ranks(program, model, work, 1, [order(every)], lr=1e-3))
        (report,) = reports(work, 1)
        assert all((one is None) == (every == 0) for one in report["probes"])
        weights[every] = report["weights"]
        of_versions = [one["sequences"] for one in report["probes"] if one is not None]
        for before, after in pairwise(of_versions):
            for old, new in zip(before, after, strict=True):
                assert old[:15] == new[:15], "the context, which a cache may hold from before"
                assert old[15:] != new[15:], "what is scored is known to nobody before"
    assert weights[0] == weights[1]
