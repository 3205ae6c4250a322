"""The update of adapters does not depend on the layout, and changes nothing but adapters."""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.deploy.predict.memory.learner_rank import adapter_parameters
from slipstream.learner.config import LearnerSection
from slipstream.wire.models.adapters import is_target, refuse_other_adapter
from slipstream.wire.models.hf_config import load_hf_config, name_alone
from slipstream.wire.settings.lora import LINEAR_LAYERS, LoraSection
from tests.support.families import write_family
from tests.support.ranks.lora import KL
from tests.support.ranks.policy import train_sequences
from tests.support.ranks.run import outputs, reports, start, start_ranks
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.integration
LORA = {"rank": 4, "alpha": 8.0}
PARTS = LORA | {"targets": ["q_proj", "v_proj", "down_proj"]}
HYBRID = LORA | {"targets": ["q_proj", "o_proj", "out_proj", "gate_proj", "down_proj"]}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
SINKS = LORA | {"targets": ATTENTION}  # beside biases, sinks and experts in one tensor
MLP = ["gate_proj", "up_proj", "down_proj"]
EXPERTS = LORA | {"targets": [*ATTENTION, *MLP]}
COMPRESSED = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
LATENT = LORA | {"targets": [*COMPRESSED, *MLP]}
LINEAR = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]
FUSED = ["in_proj_qkvz", "in_proj_ba", "out_proj"]
STACKED = {"gpt_oss"}  # the weights of all experts are one tensor
Layout = tuple[str, str, int, dict[str, Any], dict[str, Any]]
QUICK: list[Layout] = [
    ("tp2-pp2", "qwen3", 4, {"tensor_parallel": 2, "pipeline_parallel": 2}, LORA),
    ("dp2", "qwen3", 2, {}, LORA),
    (
        "latent-tp2-etp2",
        "deepseek_v3",
        2,
        {"tensor_parallel": 2, "expert_tensor_parallel": 2},
        LATENT,
    ),
    ("experts-ep2", "qwen3_moe", 2, {"expert_parallel": 2}, EXPERTS),
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
    ("experts-tp2-ep2", "qwen3_moe", 2, {"tensor_parallel": 2, "expert_parallel": 2}, EXPERTS),
    ("experts-dp2-pp2", "qwen3_moe", 4, {"pipeline_parallel": 2}, EXPERTS),
    ("experts-cp2-ep2", "qwen3_moe", 2, {"context_parallel": 2, "expert_parallel": 2}, EXPERTS),
    (
        "experts-etp2-ep2",
        "qwen3_moe",
        4,
        {"expert_tensor_parallel": 2, "expert_parallel": 2},
        EXPERTS,
    ),
    (
        "experts-recompute",
        "qwen3_moe",
        1,
        {"recompute": "selective", "recompute_modules": ["moe"]},
        LORA | {"targets": MLP},
    ),
    (
        "experts-offload",
        "qwen3_moe",
        1,
        {"offload": ["weights", "gradients", "optimizer"]},
        EXPERTS,
    ),
    (
        "shared-tp2",
        "qwen3_5_moe",
        2,
        {"tensor_parallel": 2},
        LORA | {"targets": [*LINEAR, "q_proj", "shared_expert.down_proj", "gate_proj"]},
    ),
    (
        "fused-tp2-recompute",
        "qwen3_next",
        2,
        {"tensor_parallel": 2, "recompute": "full"},
        LORA | {"targets": [*FUSED, *MLP]},
    ),
    ("experts-dp2", "mixtral", 2, {}, LORA | {"targets": ["w1", "w2", "w3", "q_proj"]}),
    (
        "latent-whole-queries",
        "deepseek_v2_lite",
        2,
        {"tensor_parallel": 2},
        LORA | {"targets": ["q_proj", *COMPRESSED[2:], *MLP]},
    ),
    (
        "latent-pp2-recompute",
        "deepseek_v2",
        2,
        {"pipeline_parallel": 2, "recompute": "full"},
        LATENT,
    ),
    ("latent-cp2", "deepseek_v3", 2, {"context_parallel": 2, "expert_parallel": 2}, LATENT),
    (
        "fused-mlp-tp2",
        "glm4",
        2,
        {"tensor_parallel": 2},
        LORA | {"targets": ["q_proj", "gate_up_proj", "down_proj"]},
    ),
    ("gates-tp2-ep2", "glm4_moe", 2, {"tensor_parallel": 2, "expert_parallel": 2}, EXPERTS),
    ("tp2-recompute", "qwen3_vl", 2, {"tensor_parallel": 2, "recompute": "full"}, LORA),
    ("sinks-tp2-ep2", "gpt_oss", 2, {"tensor_parallel": 2, "expert_parallel": 2}, SINKS),
    (
        "stacked-tp2-ep2",
        "gpt_oss",
        2,
        {"tensor_parallel": 2, "expert_parallel": 2},
        LORA | {"targets": ["q_proj", "gate_up_proj", "down_proj"]},
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lora")


def tiny(folder: Path, family: str) -> Path:
    """Return a model of a family in a folder, written by the first that asks for it."""
    model = folder / f"model-{family}"
    if not model.is_dir():
        is_made_here = family in {"qwen2", "qwen3", "qwen3_moe"}
        write = write_tiny_model if is_made_here else write_family
        write(model, family, num_hidden_layers=4 if family == "qwen3" else 2)
    return model


def trained(
    folder: Path, name: str, family: str, ranks: int, learner: dict[str, Any], lora: dict[str, Any]
) -> Path:
    model = tiny(folder, family)
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
    work = trained(folder, f"{name}-{family}", family, ranks, learner, lora)
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
        moved = set[str]()
        for tensor, value in merged.items():
            assert (value - expected[tensor]).abs().max() < 5e-5, tensor
            if (value - before[tensor]).abs().max() > 1e-4:
                moved.add(tensor)
        wanted = {name for name in merged if is_target(name, lora.get("targets", LINEAR_LAYERS))}
        without_tokens = wanted - moved
        assert moved <= wanted
        assert all(".experts." in tensor for tensor in without_tokens), without_tokens
        assert len(without_tokens) < len(wanted) / 3
        if family in STACKED and "gate_up_proj" in lora["targets"]:
            continue  # never published as adapters
        adapters = load_file(work / f"adapters-{kl}.safetensors")
        assert adapters.keys() == load_file(one / f"adapters-{kl}.safetensors").keys()
        prefix, scale = "base_model.model.", lora["alpha"] / lora["rank"]
        for name in [one for one in adapters if one.endswith(".lora_A.weight")]:
            module = name.removeprefix(prefix).removesuffix(".lora_A.weight")
            product = scale * adapters[name.replace("lora_A", "lora_B")] @ adapters[name]
            added = merged[f"{module}.weight"] - before[f"{module}.weight"]
            assert (product - added).abs().max() < 1e-6, name


@pytest.mark.parametrize(
    ("family", "lora"),
    [
        ("qwen3_moe", EXPERTS),
        ("deepseek_v3", LATENT),
        *(
            pytest.param(family, lora, marks=pytest.mark.slow)
            for (family, _), lora in {(case[1], str(case[4])): case[4] for case in SLOW}.items()
            if (family, lora) not in [("qwen3_moe", EXPERTS), ("deepseek_v3", LATENT)]
            and family != "qwen3_vl"  # its language model has other names alone
        ),
    ],
)
def test_peft_reads_what_the_learner_trained(
    folder: Path, tmp_path: Path, family: str, lora: dict[str, Any]
):
    one = _alone(folder, family, json.dumps(lora))
    (report,) = reports(one, 1)
    assert report["k3 read back"] is True
    model, adapter, asked = folder / f"model-{family}", one / "adapter-k3", tmp_path / "asked.json"
    tokens = [sequence.token_ids.tolist() for sequence in train_sequences()]
    if load_hf_config(model).sizes["shared_inner"]:
        # PEFT 0.21 leaves out adapters of shared experts and of dense layers beside experts.
        asked.write_text(json.dumps(tokens))
        merged = added_by_hand(model, adapter, tmp_path / "merged")
        (printed,) = outputs([start(tmp_path, "integration.transformers_logprobs", merged, asked)])
        theirs = json.loads(printed)
    else:
        asked.write_text(json.dumps({str(adapter): tokens}))
        (printed,) = outputs([start(tmp_path, "support.peft_logprobs", model, asked)])
        (theirs,) = json.loads(printed).values()
    for mine, of_others in zip(report["k3 raw"], theirs, strict=True):
        assert mine == pytest.approx(of_others, abs=1e-4)


def added_by_hand(model: Path, adapter: Path, merged: Path) -> Path:
    """Write a model with s B A added to the weights that an adapter's tensors name."""
    shutil.copytree(model, merged)
    config = json.loads((adapter / "adapter_config.json").read_text())
    weights = load_file(model / "model.safetensors")
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name in (name for name in tensors if name.endswith(".lora_A.weight")):
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        product = tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
        weights[f"{module}.weight"] += config["lora_alpha"] / config["r"] * product
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
    return merged


OF_STACKS = {
    "target_modules": ["q_proj"],
    "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
}


@pytest.mark.parametrize(
    ("family", "config", "targets"),
    [
        ("qwen3_moe", OF_STACKS, ["q_proj", *MLP]),
        pytest.param(
            "gpt_oss", OF_STACKS, ["q_proj", "gate_up_proj", "down_proj"], marks=pytest.mark.slow
        ),
        pytest.param(
            "deepseek_v3", {"target_modules": COMPRESSED}, COMPRESSED, marks=pytest.mark.slow
        ),
        pytest.param("qwen3_5", {"target_modules": LINEAR}, LINEAR, marks=pytest.mark.slow),
        pytest.param(
            "glm4",
            {"target_modules": ["gate_up_proj", "q_proj"]},
            ["gate_up_proj", "q_proj"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_learner_computes_what_peft_does(
    folder: Path, tmp_path: Path, family: str, config: dict[str, Any], targets: list[str]
):
    model, adapter, asked = tiny(folder, family), tmp_path / "adapter", tmp_path / "asked.json"
    tokens = [sequence.token_ids.tolist() for sequence in train_sequences()]
    asked.write_text(json.dumps(tokens))
    plain = {"r": 4, "lora_alpha": 8, **config}
    (printed,) = outputs(
        [start(tmp_path, "support.peft_adapter", model, adapter, json.dumps(plain), asked)]
    )
    settings = LORA | {"targets": targets, "adapter": str(adapter)}
    facts = msgspec.convert(settings, LoraSection).facts()
    refuse_other_adapter(adapter, facts)
    (report,) = reports(trained(folder, f"from-peft-{family}", family, 1, {}, settings), 1)
    for mine, of_peft in zip(report["k3 raw at first"], json.loads(printed), strict=True):
        assert mine == pytest.approx(of_peft, abs=1e-4)


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
    ("family", "ranks", "learner"),
    [
        pytest.param("qwen3_moe", 2, {"expert_parallel": 2}, id="experts-dp2-ep2"),
        pytest.param("qwen3", 2, {}, id="dp2", marks=pytest.mark.slow),
        pytest.param(
            *("qwen3", 4, {"tensor_parallel": 2, "pipeline_parallel": 2}),
            id="tp2-pp2",
            marks=pytest.mark.slow,
        ),
        pytest.param("qwen3", 1, {"recompute": "full"}, id="recompute", marks=pytest.mark.slow),
    ],
)
def test_a_policy_is_trained_the_same_with_neighbors_on_its_model(
    folder: Path, tmp_path: Path, family: str, ranks: int, learner: dict[str, Any]
):
    model = folder / f"model-{family}"
    if not model.is_dir():
        write_tiny_model(model, family, num_hidden_layers=4 if family == "qwen3" else 2)
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


@pytest.mark.parametrize(("family", "lora"), [("qwen3_moe", EXPERTS), ("deepseek_v3", LATENT)])
def test_the_plan_knows_adapters_of_experts_and_of_latent_attention(
    folder: Path, family: str, lora: dict[str, Any]
):
    (report,) = reports(_alone(folder, family, json.dumps(lora)), 1)
    hf = load_hf_config(folder / f"model-{family}")
    facts = msgspec.convert(lora, LoraSection).facts()
    planned = adapter_parameters(hf, LearnerSection(), facts, 0)
    assert planned.expert > planned.dense > 0
    held = report["k3 held"]
    assert held["gradients"] == pytest.approx(4 * planned.count, rel=0.01)  # padded by Megatron
    assert held["moments"] == pytest.approx(8 * planned.count, rel=0.01)
