"""The policy's own path: alignment, temperatures, barred ends, and one step on several ranks."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.ranks.run import outputs, reports, start, start_ranks
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.integration


def write_other_model(folder: Path, family: str) -> None:
    """Write a model whose weights are all a little off those of ``write_tiny_model``."""
    weights = write_tiny_model(folder, family) / "model.safetensors"
    generator = torch.Generator().manual_seed(11)
    moved = {
        name: tensor + 0.1 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in sorted(load_file(weights).items())
    }
    save_file(moved, weights, metadata={"format": "pt"})


# Which tensors a family has is tested in test_megatron_model.py; here, how ranks divide them.
@pytest.mark.parametrize("family", [pytest.param("qwen2", marks=pytest.mark.slow), "qwen3"])
def test_a_step_on_two_ranks_is_the_step_of_one(tmp_path: Path, family: str):
    model = write_tiny_model(tmp_path / "model", family)
    write_other_model(tmp_path / "reference", family)
    works = {"one": (1, 1), "dp2": (2, 1), "tp2": (2, 2)}
    program = "support.ranks.policy"
    processes = [
        process
        for name, (world_size, ranks) in works.items()
        for process in start_ranks(
            program, model, tmp_path / name, world_size, tensor_parallel=ranks
        )
    ]
    outputs(processes)
    (alone,) = reports(tmp_path / "one", 1)
    assert alone["logprobs"] == pytest.approx(alone["plain"], abs=3e-5)
    assert min(alone["plain"]) < -1.0, "nothing was compared"
    with_reference = {name for name, f in alone["figures"].items() if "policy/kl_reference" in f}
    assert with_reference == alone["figures"].keys() - {"default", "whole"}
    for algorithm in with_reference:
        kl = alone["figures"][algorithm]["policy/kl_reference"]
        assert abs(kl) > 0.1, f"{algorithm} has a reference policy like its own"
    assert abs(alone["figures"]["whole"]["policy/kl_behavior"]) > 0.1
    assert alone["figures"]["taught"]["policy/kl_teacher"] != 0.0
    assert 0 < alone["figures"]["whole"]["staleness/masked"] < 1
    for name, (world_size, _) in works.items():
        for report in reports(tmp_path / name, world_size):
            assert report["renewed"] < 3e-5, "a renewed reference is the policy"
            assert report["restored"] == 0.0 < 1e-3 < report["made anew"]
    before = load_file(model / "model.safetensors")
    for algorithm, figures in alone["figures"].items():
        weights = load_file(tmp_path / "one" / algorithm / "model.safetensors")
        assert any((weights[name] - before[name]).abs().max() > 1e-3 for name in before), algorithm
        for name in ("dp2", "tp2"):
            for report in reports(tmp_path / name, 2):
                found = report["figures"][algorithm]
                assert found == pytest.approx(figures, rel=2e-4, abs=2e-6), (algorithm, name)
                assert report["logprobs"] == pytest.approx(alone["logprobs"], abs=3e-5)
            trained = load_file(tmp_path / name / algorithm / "model.safetensors")
            for tensor, value in weights.items():
                if "k_proj.bias" not in tensor:  # its true gradient is 0: softmax does not see it
                    difference = (trained[tensor] - value).abs().max()
                    assert difference < 2e-5, (algorithm, name, tensor)
    uneven = [report["num_microbatches"] for report in reports(tmp_path / "dp2", 2)]
    assert sum(map(sum, uneven)) > 4, "several microbatches were wanted"


def test_sequence_parallelism_takes_any_number_of_tokens(tmp_path: Path):
    model = write_tiny_model(tmp_path / "model", "qwen3")
    program = "support.ranks.sequence_parallel"
    works = {"one": 1, "two": 2}
    outputs(
        [
            p
            for name, n in works.items()
            for p in start_ranks(program, model, tmp_path / name, n, tensor_parallel=n)
        ]
    )
    (alone,) = reports(tmp_path / "one", 1)
    assert {one["tokens"] % 2 for one in alone} == {0, 1}
    for report in reports(tmp_path / "two", 2):
        for found, expected in zip(report, alone, strict=True):
            for what in ("logprobs", "reference", "trained", "values"):
                assert len(found[what]) == expected["tokens"]
                assert found[what] == pytest.approx(expected[what], abs=5e-5), what
            for mine, right in zip(found["figures"], expected["figures"], strict=True):
                assert mine == pytest.approx(right, rel=2e-4, abs=2e-6)
            assert right["policy/grad_norm"] > 1e-3


def test_an_update_waits_for_its_device_once(tmp_path: Path):
    model = write_tiny_model(tmp_path / "model", "qwen3")
    program = "support.ranks.host_reads"
    works = {"one": 1, "two": 2}
    outputs(
        [
            p
            for name, n in works.items()
            for p in start_ranks(program, model, tmp_path / name, n, tensor_parallel=n)
        ]
    )
    for name, world_size in works.items():
        for report in reports(tmp_path / name, world_size):
            for norm, of_megatron in report.pop("norms"):
                assert norm == pytest.approx(of_megatron, rel=1e-6)
            assert report.pop("fused") < 2e-6
            assert len(report) > 5
            for algorithm, seen in report.items():
                assert seen["num_figures"] > 5
                reads = {"slipstream.learner.training.trainable:update": 1}
                assert seen["reads"] == reads, (algorithm, name)
                assert seen["calls"] == {"prepare_grads": 1, "gradient_norm": 1}


def test_optimizer_settings_act(tmp_path: Path):
    model, work = write_tiny_model(tmp_path / "model", "llama"), tmp_path / "work"
    work.mkdir()
    outputs([start(work, "support.ranks.optimizer", model, work)])
    (report,) = reports(work, 1)
    norms = [name for name in report["decay_error"] if "norm" in name]
    assert report["not_decayed"] == sorted(norms)
    for name, error in report["decay_error"].items():
        assert name in norms or error < 1e-6, f"{name} did not shrink by lr x weight_decay"
    assert report["norms"][0] == pytest.approx(report["norms"][1])
    assert report["clipped_share"] == pytest.approx(0.25, rel=0.02)
    expected = {
        "constant": [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0],
        "linear": [1 / 3, 2 / 3, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2],
        "cosine": [*(0.5 + 0.5 * math.cos(math.pi * step / 6) for step in range(7)), 0.0],
        "inverse-square-root": [0.5, 1.0, *(step**-0.5 for step in (2, 3, 4, 5, 6)), 0.0],
        "WSD": [0.5, 1.0, 1.0, 1.0, 1.0, 0.5, 0.0, 0.0],
    }
    for schedule, rates in expected.items():
        assert report["rates"][schedule] == pytest.approx(rates), schedule
    # A step of the critic alone, then one of both.
    assert report["warming"]["policy"] == pytest.approx([0.25, 0.25, 0.5])
    assert report["warming"]["critic"] == pytest.approx([0.25, 0.5, 0.75])
