"""The update does not depend on how the work was laid out.

One learner step of two minibatches on 1, 2, 4 and 8 ranks, from the same trajectories: figures,
log-probabilities, weights, and the checkpoint that each layout writes and reads.
"""

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.learner.config import LearnerSection
from tests.support.families import write_family
from tests.support.ranks.run import outputs, reports, start_ranks
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.integration
PROGRAM = "support.ranks.policy"


class Family(NamedTuple):
    """A model to lay out: its family, its number of layers, and other changes to its config."""

    name: str
    layers: int = 2
    heads: int = 4
    vision: str = "frozen"


DENSE, TIED, EXPERTS = Family("qwen3", 4), Family("qwen2"), Family("qwen3_moe")
LATENT = Family("deepseek_v3", 3)
# Heads that context parallelism does not divide over its ranks: rings share them.
FEW_HEADS, ONE_HEAD = Family("qwen3", 2, heads=2), Family("qwen3", 2, heads=1)
FEW_LATENT, FEW_EXPERTS = Family("deepseek_v3", 3, heads=2), Family("qwen3_moe", heads=2)
LATENTS = LATENT, FEW_LATENT
# Linear attention in every second layer; few heads of attention alone.
HYBRID, HYBRID_EXPERTS = Family("qwen3_5", 4), Family("qwen3_5_moe")
NEXT, FEW_HYBRID = Family("qwen3_next"), Family("qwen3_5", 4, heads=2)
# Windows in every second layer, and sinks.
SINKS, DEEP_SINKS = Family("gpt_oss"), Family("gpt_oss", 4)
# A vision tower; features of it in the first two layers (qwen3_vl).
SEEING, SEEING_TRAINED = Family("qwen3_vl", 4), Family("qwen3_vl", 4, vision="trained")
WINDOWED, WINDOWED_TRAINED = Family("qwen2_5_vl"), Family("qwen2_5_vl", vision="trained")
DEEP_SEEING = Family("qwen3_vl", 8, vision="trained")
SIGHTED = SEEING, SEEING_TRAINED, WINDOWED, WINDOWED_TRAINED
MADE_HERE = {DENSE, TIED, EXPERTS, FEW_HEADS, ONE_HEAD, FEW_EXPERTS, Family("qwen3_moe", 4)}


class Layout(NamedTuple):
    """Ranks and the settings that divide a model over them."""

    name: str
    ranks: int
    family: Family
    learner: dict[str, Any]


def layout(name: str, ranks: int, family: Family, **learner: object) -> Layout:
    return Layout(name, ranks, family, {f"{size}_parallel": n for size, n in learner.items()})


# In `make test` each dimension once and a product; the rest of the kind is slow.
QUICK = [
    layout("dp2", 2, DENSE),
    Layout("pp2-chunks2", 2, DENSE, {"pipeline_parallel": 2, "interleaved_chunks": 2}),
    layout("tp2-cp2", 4, HYBRID, tensor=2, context=2),  # it has attention, too
    layout("cp2-ep2", 2, SINKS, context=2, expert=2),
    layout("tp2-cp2", 4, SEEING_TRAINED, tensor=2, context=2),  # ranks have tokens of one image
    # On two hosts, whose second has the last stage. Experts are computed again when another
    # microbatch has been through their layers.
    Layout(
        "pp2-ep2-hosts2-recompute",
        4,
        LATENT,
        {
            "pipeline_parallel": 2,
            "expert_parallel": 2,
            "ranks_per_node": 2,
            "recompute": "selective",
            "recompute_modules": ["moe"],
        },
    ),
]
OFFLOAD = ["weights", "gradients", "optimizer"]
SLOW = [
    Layout("offload", 1, DENSE, {"offload": OFFLOAD}),
    Layout(
        "tp2-pp2-offload",
        4,
        TIED,
        {"tensor_parallel": 2, "pipeline_parallel": 2, "offload": OFFLOAD},
    ),
    Layout("ep2-offload", 2, EXPERTS, {"expert_parallel": 2, "offload": OFFLOAD}),
    layout("tp2", 2, DENSE, tensor=2),
    layout("cp2", 2, DENSE, context=2),
    layout("tp2", 2, TIED, tensor=2),
    Layout("tp2-whole-tokens", 2, DENSE, {"tensor_parallel": 2, "sequence_parallel": False}),
    layout("dp2", 2, TIED),
    layout("pp2", 2, TIED, pipeline=2),
    layout("pp4", 4, DENSE, pipeline=4),
    Layout("pp2-uneven", 2, DENSE, {"pipeline_parallel": 2, "layers_per_stage": [3, 1]}),
    Layout(
        "pp2-last-stage",
        2,
        DENSE,
        {"pipeline_parallel": 2, "megatron": {"num_layers_in_last_pipeline_stage": 1}},
    ),
    layout("cp4", 4, DENSE, context=4),
    layout("cp4-few-heads", 4, FEW_HEADS, context=4),
    layout("cp3-one-head", 3, ONE_HEAD, context=3),
    layout("cp4-few-heads", 4, FEW_LATENT, context=4),
    layout("cp4-ep2-few-heads", 4, FEW_EXPERTS, context=4, expert=2),
    layout("dp2", 2, HYBRID),
    layout("tp2", 2, HYBRID, tensor=2),
    Layout("tp2-whole-tokens", 2, HYBRID, {"tensor_parallel": 2, "sequence_parallel": False}),
    layout("cp2", 2, HYBRID, context=2),
    layout("cp4-few-heads", 4, FEW_HYBRID, context=4),
    layout("pp2-cp2", 4, HYBRID, pipeline=2, context=2),
    Layout("offload", 1, HYBRID, {"offload": OFFLOAD}),
    Layout("pp2-chunks2", 2, HYBRID, {"pipeline_parallel": 2, "interleaved_chunks": 2}),
    Layout("recompute", 1, HYBRID, {"recompute": "full"}),
    layout("tp2-ep2", 2, HYBRID_EXPERTS, tensor=2, expert=2),
    layout("pp2-ep2", 4, HYBRID_EXPERTS, pipeline=2, expert=2),
    layout("tp2-pp2-ep2", 4, NEXT, tensor=2, pipeline=2, expert=2),
    layout("dp2", 2, DEEP_SINKS),
    layout("tp2", 2, DEEP_SINKS, tensor=2),
    layout("tp2-pp2-ep2", 4, DEEP_SINKS, tensor=2, pipeline=2, expert=2),
    Layout(
        "pp2-cp2-recompute",
        4,
        DEEP_SINKS,
        {
            "pipeline_parallel": 2,
            "context_parallel": 2,
            "recompute": "selective",
            "recompute_modules": ["core_attn", "moe"],
        },
    ),
    Layout("offload", 1, DEEP_SINKS, {"offload": OFFLOAD}),
    layout("tp2-cp2", 4, TIED, tensor=2, context=2),
    layout("pp2-cp2", 4, DENSE, pipeline=2, context=2),
    layout("pp2-dp2", 4, DENSE, pipeline=2),
    layout("tp2-pp2", 4, DENSE, tensor=2, pipeline=2),
    layout("tp2-pp2-cp2", 8, DENSE, tensor=2, pipeline=2, context=2),
    layout("dp4-ep2", 4, EXPERTS, expert=2),
    Layout("pp2-chunks2-dp2", 4, DENSE, {"pipeline_parallel": 2, "interleaved_chunks": 2}),
    Layout("pp4-hosts4", 4, DENSE, {"pipeline_parallel": 4, "ranks_per_node": 1}),
    Layout("recompute", 1, DENSE, {"recompute": "full"}),
    Layout("recompute-two", 1, DENSE, {"recompute": "full", "recompute_layers": 2}),
    Layout(
        "recompute-parts",
        1,
        DENSE,
        {"recompute": "selective", "recompute_modules": ["mlp", "core_attn"]},
    ),
    Layout(
        "tp2-ep2-recompute",
        4,
        EXPERTS,
        {
            "tensor_parallel": 2,
            "expert_parallel": 2,
            "recompute": "selective",
            "recompute_modules": ["moe"],
        },
    ),
    *(
        entry
        for family in SIGHTED
        for entry in (
            layout("dp2", 2, family),
            layout("tp2", 2, family, tensor=2),
            layout("cp2", 2, family, context=2),
            layout("pp2", 2, family, pipeline=2),
        )
    ),
    layout("tp2-pp2", 4, SEEING, tensor=2, pipeline=2),
    layout("tp2-pp2", 4, SEEING_TRAINED, tensor=2, pipeline=2),
    layout("tp2-cp2", 4, WINDOWED_TRAINED, tensor=2, context=2),
    Layout(
        "tp2-whole-tokens", 2, SEEING_TRAINED, {"tensor_parallel": 2, "sequence_parallel": False}
    ),
    Layout("recompute", 1, SEEING_TRAINED, {"recompute": "full"}),
    Layout("recompute", 1, WINDOWED_TRAINED, {"recompute": "full"}),
    Layout("offload", 1, SEEING_TRAINED, {"offload": OFFLOAD}),
    Layout(
        "pp2-chunks2-recompute",
        2,
        DEEP_SEEING,
        {"pipeline_parallel": 2, "interleaved_chunks": 2, "recompute": "full"},
    ),
    layout("pp2-ep2", 4, EXPERTS, pipeline=2, expert=2),
    layout("tp2-ep2", 2, LATENT, tensor=2, expert=2),
    layout("cp2", 2, LATENT, context=2),
    layout("tp2-pp2", 4, LATENT, tensor=2, pipeline=2),
    layout("dp2-ep2", 2, EXPERTS, expert=2),
    layout("ep4", 4, EXPERTS, expert=4),
    layout("tp2-experts", 2, EXPERTS, tensor=2),
    layout("tp2-ep2", 2, EXPERTS, tensor=2, expert=2),
    layout("tp2-etp2", 2, EXPERTS, tensor=2, expert_tensor=2),
    layout("tp2-ep2-etp2", 4, EXPERTS, tensor=2, expert=2, expert_tensor=2),
    layout("cp2-ep2", 2, EXPERTS, context=2, expert=2),
    layout("pp2-experts", 2, EXPERTS, pipeline=2),
    Layout(
        "pp2-chunks2-recompute",
        2,
        Family("qwen3_moe", 4),
        {"pipeline_parallel": 2, "interleaved_chunks": 2, "recompute": "full"},
    ),
]


class Alone(NamedTuple):
    """What one rank makes of a model."""

    model: Path
    work: Path
    report: dict[str, Any]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Family], Alone]:
    """Each family is computed once."""

    @cache
    def computed(family: Family) -> Alone:
        folder = tmp_path_factory.mktemp(family.name)
        changed = {"num_hidden_layers": family.layers, "num_attention_heads": family.heads}
        if family.heads < 4:
            changed["num_key_value_heads"] = family.heads if family in LATENTS else 1
        write = write_tiny_model if family in MADE_HERE else write_family
        model = write(folder / "model", family.name, **changed)
        other = Path(shutil.copytree(model, folder / "reference"))
        generator = torch.Generator().manual_seed(11)
        moved = {
            name: tensor + 0.1 * torch.randn(tensor.shape, generator=generator)
            for name, tensor in sorted(load_file(other / "model.safetensors").items())
        }
        save_file(moved, other / "model.safetensors", metadata={"format": "pt"})
        outputs(start_ranks(PROGRAM, model, folder / "one", 1, vision=family.vision))
        (report,) = reports(folder / "one", 1)
        return Alone(model, folder / "one", report)

    return computed


@pytest.mark.parametrize(
    "family",
    [
        DENSE,
        *(pytest.param(f, marks=pytest.mark.slow) for f in (TIED, EXPERTS, LATENT, HYBRID, SINKS)),
    ],
)
def test_one_rank_computes_what_the_formulas_say(alone: Callable[[Family], Alone], family: Family):
    _, work, report = alone(family)
    assert report["logprobs"] == pytest.approx(report["plain"], abs=3e-5)
    assert min(report["plain"]) < -1.0, "nothing was compared"
    figures = report["figures"]
    with_reference = {name for name, f in figures.items() if "policy/kl_reference" in f}
    assert with_reference == figures.keys() - {"default", "whole", "sequences"}
    for algorithm in with_reference:
        kl = figures[algorithm]["policy/kl_reference"]
        assert abs(kl) > 0.1, f"{algorithm} has a reference policy like its own"
    assert abs(figures["whole"]["policy/kl_behavior"]) > 0.1
    assert figures["taught"]["policy/kl_teacher"] != 0.0
    assert 0 < figures["whole"]["staleness/masked"] < 1
    before = load_file(work.parent / "model" / "model.safetensors")
    for algorithm in figures:
        weights = load_file(work / algorithm / "model.safetensors")
        assert any((weights[name] - before[name]).abs().max() > 1e-3 for name in before), algorithm


@pytest.mark.parametrize(
    "laid_out",
    [
        *(pytest.param(one, id=f"{one.family.name}-{one.name}") for one in QUICK),
        *(
            pytest.param(one, id=f"{one.family.name}-{one.name}", marks=pytest.mark.slow)
            for one in SLOW
        ),
    ],
)
def test_a_step_is_the_same_however_it_is_laid_out(
    alone: Callable[[Family], Alone], tmp_path: Path, laid_out: Layout
):
    one = alone(laid_out.family)
    work = tmp_path / "work"
    # The reference policy is beside the folder of the ranks.
    (tmp_path / "reference").symlink_to(one.work.parent / "reference")
    learner = laid_out.learner | {"vision": laid_out.family.vision}
    outputs(start_ranks(PROGRAM, one.model, work, laid_out.ranks, **learner))
    section = LearnerSection(ranks=laid_out.ranks, **laid_out.learner)
    has_experts = laid_out.family in {
        EXPERTS,
        FEW_EXPERTS,
        HYBRID_EXPERTS,
        NEXT,
        SINKS,
        DEEP_SINKS,
        *LATENTS,
    }
    overlaps = section.sizes.has_copies(section.ranks, has_experts=has_experts)
    for rank, report in enumerate(reports(work, laid_out.ranks)):
        assert report["overlaps"] == [overlaps, overlaps]
        if overlaps and section.sizes.place(rank, section.ranks).stage == 0:
            assert report["buckets"] > 1, "nothing waits for a bucket but the first"
        assert report["logprobs"] == pytest.approx(one.report["logprobs"], abs=3e-5)
        assert report["renewed"] < 3e-5, "a renewed reference is the policy"
        assert report["published"] == [], "the memory does not hold what was exported"
        assert report["restored"] == 0.0 < 1e-3 < report["made anew"]
        assert report["figures"].keys() == one.report["figures"].keys()
        for algorithm, figures in one.report["figures"].items():
            found = report["figures"][algorithm]
            assert found == pytest.approx(figures, rel=2e-4, abs=2e-6), algorithm
    before = load_file(one.model / "model.safetensors")
    for algorithm in one.report["figures"]:
        expected = load_file(one.work / algorithm / "model.safetensors")
        trained = load_file(work / algorithm / "model.safetensors")
        assert trained.keys() == expected.keys()
        seeing = [name for name in trained if "visual." in name]
        assert bool(seeing) is (laid_out.family in {*SIGHTED, DEEP_SEEING})
        stayed = [name for name in seeing if trained[name].equal(before[name])]
        assert stayed == (seeing if laid_out.family.vision == "frozen" else [])
        for tensor, value in expected.items():
            if "k_proj.bias" not in tensor:  # its true gradient is 0: softmax does not see it
                difference = (trained[tensor] - value).abs().max()
                assert difference < 2e-5, (algorithm, tensor)


def test_decays_stay_in_float32_where_all_else_is_narrow(tmp_path: Path):
    """Two ranks of tensor parallelism publish and export what a folder has of them, exactly."""
    model = write_family(tmp_path / "model", "qwen3_5", num_hidden_layers=2)
    shutil.copytree(model, tmp_path / "reference")
    work = tmp_path / "work"
    outputs(start_ranks(PROGRAM, model, work, 2, tensor_parallel=2, dtype="bfloat16"))
    for report in reports(work, 2):
        assert report["published"] == []
        assert report["restored"] == 0.0 < 1e-3 < report["made anew"]
    before, after = (
        load_file(folder / "model.safetensors") for folder in (model, work / "default")
    )
    decays = "model.layers.0.linear_attn.A_log"
    assert after[decays].equal(before[decays])
    assert {str(tensor.dtype) for tensor in after.values()} == {"torch.bfloat16", "torch.float32"}
    assert [name for name in after if after[name].dtype is torch.float32] == [decays]


@pytest.mark.slow  # the layouts have it in float32
def test_a_trained_tower_is_published_and_restored_in_bfloat16(tmp_path: Path):
    """Two ranks of tensor parallelism, each with images of its own tokens."""
    model = write_family(tmp_path / "model", "qwen3_vl")
    shutil.copytree(model, tmp_path / "reference")
    work = tmp_path / "work"
    how = {"tensor_parallel": 2, "dtype": "bfloat16", "vision": "trained"}
    outputs(start_ranks(PROGRAM, model, work, 2, **how))
    for report in reports(work, 2):
        assert report["published"] == []
        assert report["restored"] == 0.0 < 1e-3 < report["made anew"]
    before, after = (
        load_file(folder / "model.safetensors") for folder in (model, work / "default")
    )
    tower = [name for name in before if "visual." in name]
    assert len(tower) > 50
    moved = [
        name for name in tower if not after[name].float().equal(before[name].bfloat16().float())
    ]
    assert len(moved) > 0.9 * len(tower)
