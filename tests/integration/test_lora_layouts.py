"""The update of adapters does not depend on the layout, and changes nothing but adapters."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slipstream.wire.models.hf_config import name_alone
from tests.support.families import write_family
from tests.support.ranks.lora import KL
from tests.support.ranks.run import outputs, reports, start_ranks
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.integration
LORA = {"rank": 4, "alpha": 8.0}
PARTS = LORA | {"targets": ["q_proj", "v_proj", "down_proj"]}
HYBRID = LORA | {"targets": ["q_proj", "o_proj", "out_proj", "gate_proj", "down_proj"]}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
SINKS = LORA | {"targets": ATTENTION}  # beside biases, sinks and experts in one tensor
Layout = tuple[str, str, int, dict[str, Any], dict[str, Any]]
QUICK: list[Layout] = [
    ("tp2-pp2", "qwen3", 4, {"tensor_parallel": 2, "pipeline_parallel": 2}, LORA),
    ("dp2", "qwen3", 2, {}, LORA),
]
SLOW: list[Layout] = [
    ("tp2", "qwen2", 2, {"tensor_parallel": 2}, PARTS),
    ("tp2-whole-tokens", "qwen3", 2, {"tensor_parallel": 2, "sequence_parallel": False}, LORA),
    ("pp2", "qwen2", 2, {"pipeline_parallel": 2}, PARTS),
    ("cp2", "qwen3", 2, {"context_parallel": 2}, LORA),
    ("pp2-chunks2", "qwen3", 2, {"pipeline_parallel": 2, "interleaved_chunks": 2}, LORA),
    ("pp2-hosts2", "qwen3", 2, {"pipeline_parallel": 2, "ranks_per_node": 1}, LORA),
    ("recompute", "qwen3", 1, {"recompute": "full"}, LORA),
    (
        "recompute-parts",
        "qwen2",
        1,
        {"recompute": "selective", "recompute_modules": ["mlp"]},
        LORA | {"targets": ["down_proj"]},
    ),
    ("offload", "qwen3", 1, {"offload": ["weights", "gradients", "optimizer"]}, LORA),
    ("tp2-cp2", "qwen3_5", 4, {"tensor_parallel": 2, "context_parallel": 2}, HYBRID),
    ("pp2", "qwen3_5", 2, {"pipeline_parallel": 2}, HYBRID),
    (
        "experts-tp2-ep2",
        "qwen3_moe",
        2,
        {"tensor_parallel": 2, "expert_parallel": 2},
        LORA | {"targets": ATTENTION},
    ),
    ("tp2-recompute", "qwen3_vl", 2, {"tensor_parallel": 2, "recompute": "full"}, LORA),
    ("sinks-tp2-ep2", "gpt_oss", 2, {"tensor_parallel": 2, "expert_parallel": 2}, SINKS),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lora")


def trained(
    folder: Path, name: str, family: str, ranks: int, learner: dict[str, Any], lora: dict[str, Any]
) -> Path:
    model = folder / f"model-{family}"
    if not model.is_dir():
        is_made_here = family in {"qwen2", "qwen3", "qwen3_moe"}
        write = write_tiny_model if is_made_here else write_family
        write(model, family, num_hidden_layers=4 if family == "qwen3" else 2)
    work = folder / name
    settings = {"dtype": "float32", **learner}
    outputs(start_ranks("support.ranks.lora", model, work, ranks, [json.dumps(lora)], **settings))
    return work


def alone(model: Path) -> dict[str, torch.Tensor]:
    """Return the weights in a folder, by the names that a language model has alone."""
    tensors = load_file(model / "model.safetensors").items()
    return {name_alone(name): tensor for name, tensor in tensors}


@cache
def _alone(folder: Path, family: str, lora: str) -> Path:
    return trained(folder, f"one-{family}-{len(lora)}", family, 1, {}, json.loads(lora))


@pytest.mark.parametrize(
    ("name", "family", "ranks", "learner", "lora"),
    [pytest.param(*one, id=one[0]) for one in QUICK]
    + [pytest.param(*one, id=f"{one[0]}-{one[1]}", marks=pytest.mark.slow) for one in SLOW],
)
def test_update_is_that_of_a_single_process(
    folder: Path, name: str, family: str, ranks: int, learner: dict[str, Any], lora: dict[str, Any]
):
    one = _alone(folder, family, json.dumps(lora))
    (right,) = reports(one, 1)
    work = trained(folder, name, family, ranks, learner, lora)
    before = alone(folder / f"model-{family}")
    for kl in KL:
        for report in reports(work, ranks):
            assert report[f"{kl} adds at first"] == 0.0
            assert report[f"{kl} reference moved"] == 0.0
            assert report[f"{kl} base moved"] == []
            assert report[f"{kl} published"] == []
            for found, expected in zip(
                report[f"{kl} figures"], right[f"{kl} figures"], strict=True
            ):
                assert found == pytest.approx(expected, rel=2e-4, abs=2e-6)
        expected, merged = alone(one / f"merged-{kl}"), alone(work / f"merged-{kl}")
        assert merged.keys() == before.keys()
        for tensor, value in merged.items():
            assert (value - expected[tensor]).abs().max() < 5e-5, tensor
            is_target = tensor.split(".")[-2] in lora.get("targets", [tensor.split(".")[-2]])
            has_moved = bool((value - before[tensor]).abs().max() > 1e-4)
            assert has_moved == (is_target and "_proj.weight" in tensor), tensor
        adapters = load_file(work / f"adapters-{kl}.safetensors")
        assert adapters.keys() == load_file(one / f"adapters-{kl}.safetensors").keys()
        prefix, scale = "base_model.model.", lora["alpha"] / lora["rank"]
        for name in [one for one in adapters if one.endswith(".lora_A.weight")]:
            module = name.removeprefix(prefix).removesuffix(".lora_A.weight")
            product = scale * adapters[name.replace("lora_A", "lora_B")] @ adapters[name]
            added = merged[f"{module}.weight"] - before[f"{module}.weight"]
            assert (product - added).abs().max() < 1e-6, name


def test_adapters_alone_have_gradients_and_an_optimizer(folder: Path):
    (report,) = reports(_alone(folder, "qwen3", json.dumps(LORA)), 1)
    assert report["k3 logprobs"] == pytest.approx(report["k3 plain"], abs=5e-5)
    hidden, inner, queries, keys, rank, layers = 64, 176, 128, 64, 4, 4
    sizes = [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)]
    sizes += [(hidden, inner), (hidden, inner), (inner, hidden)]
    count = layers * sum(rank * (into + out) for into, out in sizes)
    held = report["k3 held"]
    assert held["gradients"] == pytest.approx(4 * count, rel=0.01)  # padded by Megatron
    assert held["moments"] == pytest.approx(8 * count, rel=0.01)  # and a count for each tensor
    assert held["weights"] > 4 * 4 * count


@pytest.mark.parametrize(
    ("ranks", "learner"),
    [
        pytest.param(2, {}, id="dp2"),
        pytest.param(
            4, {"tensor_parallel": 2, "pipeline_parallel": 2}, id="tp2-pp2", marks=pytest.mark.slow
        ),
        pytest.param(1, {"recompute": "full"}, id="recompute", marks=pytest.mark.slow),
    ],
)
def test_a_policy_is_trained_the_same_with_neighbors_on_its_model(
    folder: Path, tmp_path: Path, ranks: int, learner: dict[str, Any]
):
    model = folder / "model-qwen3"
    if not model.is_dir():
        write_tiny_model(model, "qwen3", num_hidden_layers=4)
    settings = {"dtype": "float32", "deterministic": True, **learner}
    outputs(
        start_ranks("support.ranks.neighbors", model, tmp_path / "ranks", ranks, [], **settings)
    )
    for report in reports(tmp_path / "ranks", ranks):
        assert not report["base moved"]
        assert report["in turns"] == report["alone"]  # to the bit
        digests = [digest for _, digest in report["alone"].values()]
        assert len(set(digests)) == len(digests) == 3
        norms = [f["policy/grad_norm"] for figures, _ in report["alone"].values() for f in figures]
        assert all(norm > 0 for norm in norms)
