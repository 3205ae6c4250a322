"""The Megatron model against transformers, and against itself when it is split over ranks.

Packed sequences of different lengths, float32, two layers. Each rank is a process of its own,
since Megatron keeps its groups in process-wide state. Pipeline and context parallelism are not
covered.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.integration.tiny_models import FAMILIES, write_tiny_model

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 50

pytestmark = [pytest.mark.integration, pytest.mark.timeout(60)]


def start(work: Path, module: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", f"tests.integration.{module}", *map(str, arguments)],
        cwd=ROOT,
        env={
            "PYTHONPATH": str(ROOT),
            "HOME": str(work),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def start_ranks(model: Path, work: Path, world_size: int, tensor_parallel: int):
    work.mkdir()
    return [
        start(work, "megatron_rank", model, work, rank, world_size, tensor_parallel)
        for rank in range(world_size)
    ]


def outputs(processes: list[subprocess.Popen[str]]) -> list[str]:
    """Wait for processes and return what they printed; none of them outlives the test."""
    try:
        results = [process.communicate(timeout=TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, (_, errors) in zip(processes, results, strict=True):
        assert process.returncode == 0, errors
    return [printed for printed, _ in results]


def reports(work: Path, world_size: int):
    return [json.loads((work / f"{rank}.json").read_text()) for rank in range(world_size)]


def by_token(report: dict, key: str) -> list[float]:
    return [value for i in sorted(report[key], key=int) for value in report[key][i]]


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_transformers_and_the_export_is_bit_equal(
    tmp_path: Path, family: str
):
    model, work = write_tiny_model(tmp_path / "model", family), tmp_path / "work"
    ranks = start_ranks(model, work, world_size=1, tensor_parallel=1)
    printed = outputs([start(tmp_path, "transformers_logprobs", model), *ranks])[0]
    expected = [value for sequence in json.loads(printed) for value in sequence]
    (report,) = reports(work, 1)
    assert by_token(report, "logprobs") == pytest.approx(expected, abs=2e-5)
    assert report["exported"] == report["original"]
    assert report["num_exported"] == len(report["original"])
    assert (work / "exported" / "tokenizer.json").read_text() == "{}"
    assert not list(work.glob(".exported*"))


@pytest.mark.parametrize("tensor_parallel", [pytest.param(2, id="tp2"), pytest.param(1, id="dp2")])
def test_two_ranks_compute_what_one_computes(tmp_path: Path, tensor_parallel: int):
    model = write_tiny_model(tmp_path / "model", "qwen2")
    one, two = tmp_path / "one", tmp_path / "two"
    outputs([*start_ranks(model, one, 1, 1), *start_ranks(model, two, 2, tensor_parallel)])
    (alone,), split = reports(one, 1), reports(two, 2)
    for key in ("logprobs", "entropies"):
        merged = {key: split[0][key] | split[1][key]}
        assert by_token(merged, key) == pytest.approx(by_token(alone, key), abs=5e-6)
    for report in split:
        assert report["data_parallel"] == 2 // tensor_parallel
        assert report["gradient_norm"] == pytest.approx(alone["gradient_norm"], rel=1e-5)
        assert report["exported"] == report["original"]
    written = load_file(two / "exported" / "model.safetensors")
    original = load_file(model / "model.safetensors")
    assert written.keys() == original.keys()
    assert all(written[name].equal(original[name]) for name in original)
