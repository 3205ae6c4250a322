"""The policy's own path: alignment, temperatures, barred ends, and one step on several ranks."""

import itertools
import math
from pathlib import Path
from subprocess import Popen

import pytest
from safetensors.torch import load_file

from tests.support.ranks.run import outputs, reports, start, start_ranks
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.integration


LAYOUTS = {"one": 1, "two": 2}  # ranks that split each tensor


def run_in_layouts(program: str, folder: Path) -> None:
    model = write_tiny_model(folder / "model", "qwen3")
    ranks = [
        start_ranks(program, model, folder / name, count, tensor_parallel=count)
        for name, count in LAYOUTS.items()
    ]
    outputs([*itertools.chain(*ranks)])


def test_sequence_parallelism_takes_any_number_of_tokens(tmp_path: Path):
    run_in_layouts("support.ranks.sequence_parallel", tmp_path)
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
    run_in_layouts("support.ranks.host_reads", tmp_path)
    for name, world_size in LAYOUTS.items():
        for report in reports(tmp_path / name, world_size):
            for norm, of_megatron in report.pop("norms"):
                assert norm == pytest.approx(of_megatron, rel=1e-6)
            assert len(report) > 5
            for algorithm, seen in report.items():
                assert seen["num_figures"] > 5
                reads = {"slipstream.learner.training.trainable:update": 1}
                assert seen["reads"] == reads, (algorithm, name)
                assert seen["calls"] == {"prepare_grads": 1, "gradient_norm": 1}
                assert seen["before the weights change"] == 0


def test_a_refused_update_changes_no_bit(tmp_path: Path):
    experts = write_tiny_model(tmp_path / "experts", "qwen3_moe")
    tied = write_tiny_model(tmp_path / "tied", "qwen2")
    ranks = start_ranks("support.ranks.refused", tied, tmp_path / "one", 1)
    split = {"expert_parallel": 2}
    ranks += start_ranks("support.ranks.refused", experts, tmp_path / "two", 2, **split)
    outputs(ranks)
    for name, world_size in LAYOUTS.items():
        for report in reports(tmp_path / name, world_size):
            assert len(report) == 5
            for setting, seen in report.items():
                (first, second, third), what = seen["refused"], (setting, name)
                for _, unlike, same_rate in seen["refused"]:
                    assert unlike == [], what
                    assert same_rate, what
                assert "loss is inf" in first[0], what
                assert "gradient nan" in second[0], what
                assert "loss is inf" in third[0], what
                assert seen["steps"] == [2.0], what
                assert seen["optimizers"] == world_size, "experts have their own"
                assert seen["differ"] == [], "from what was never refused"


# A router has few rows; a CPU's product of narrow types takes rows of the output layer in float32;
# torch multiplies groups into the type of the weights, and all experts at once.
STILL_MADE = (
    "mlp.router.weight",
    "_grouped_mm mlp.experts.linear_fc1",
    "_grouped_mm mlp.experts.linear_fc2",
    "add_ mlp.experts.linear_fc1",
    "add_ mlp.experts.linear_fc2",
    "_to_copy output_layer.weight",
    "_to_copy embedding.word_embeddings.weight",
)
FUSED = {
    "tied": ("qwen2", 1, {}),
    "stages": ("qwen2", 2, {"pipeline_parallel": 2}),
    "experts": ("qwen3_moe", 2, {"expert_parallel": 2}),
    "split": ("qwen3", 2, {"tensor_parallel": 2, "sequence_parallel": True}),
    "again": ("llama", 2, {"recompute": "full"}),
}


def test_gradients_of_weights_are_added_to_their_totals_and_made_nowhere(tmp_path: Path):
    ranks: list[Popen[str]] = []
    for name, (family, world_size, learner) in FUSED.items():
        model = write_tiny_model(tmp_path / f"{name} model", family, vocab_size=150)
        program = "support.ranks.fused_gradients"
        ranks += start_ranks(program, model, tmp_path / name, world_size, **learner)
    outputs(ranks)
    for name, (_, world_size, _) in FUSED.items():
        for report in reports(tmp_path / name, world_size):
            for what in ("gradients", "weights"):
                assert report["float32"][what] < 1e-6, (name, what)
            assert 1e-4 < report["bfloat16"]["gradients"] < 4e-3, "it rounds each to 8 bits"
            for dtype in ("float32", "bfloat16"):
                made = report[f"{dtype}, fused"]
                assert all(one.endswith(STILL_MADE) for one in made), (name, dtype, made)
                assert len(report[f"{dtype}, unfused"]) > 5 + len(made), (name, dtype)


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
    *momentum, without_momentum = report["momentum_errors"]
    assert max(momentum) < 1e-2 < 0.1 < without_momentum
    expected = {
        "constant": [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0],
        "linear": [1 / 3, 2 / 3, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2],
        "cosine": [*(0.5 + 0.5 * math.cos(math.pi * step / 6) for step in range(7)), 0.0],
        "inverse-square-root": [0.5, 1.0, *(step**-0.5 for step in (2, 3, 4, 5, 6)), 0.0],
        "WSD": [0.5, 1.0, 1.0, 1.0, 1.0, 0.5, 0.0, 0.0],
        "WSD to a square root": [0.5, 1.0, 1.0, 1.0, 1.0, 1 - 0.5**0.5, 0.0, 0.0],
    }
    for schedule, rates in expected.items():
        assert report["rates"][schedule] == pytest.approx(rates), schedule
    # A step of the critic alone, then one of both.
    assert report["warming"]["policy"] == pytest.approx([0.25, 0.25, 0.5])
    assert report["warming"]["critic"] == pytest.approx([0.25, 0.5, 0.75])


def test_the_device_holds_what_is_used_and_nothing_else_of_what_is_offloaded(tmp_path: Path):
    model, work = write_tiny_model(tmp_path / "model", "qwen2"), tmp_path / "work"
    work.mkdir()
    outputs([start(work, "support.ranks.offload", model, work)])
    (report,) = reports(work, 1)

    def second_step(name: str) -> list[tuple[str, set[str]]]:
        held = [(moment, set(kinds)) for moment, kinds in report[name]["held"]]
        return [*held[len(held) // 2 : -1], held[-1]]

    own = {"weights", "gradients", "optimizer"}
    everything = {f"{one} {kind}" for one in ("policy", "critic") for kind in own}
    everything.add("reference weights")
    assert all(kinds == everything for _, kinds in second_step("plain"))
    training = {"policy weights", "policy gradients"}
    critic = {"critic weights", "critic gradients"}
    for name in ("all", "all-bfloat16"):
        assert second_step(name) == [
            ("forward", {"policy weights"}),
            ("forward", {"reference weights"}),
            ("forward", {"critic weights"}),
            ("train", training),
            ("update", {*training, "policy optimizer"}),
            ("train", critic),
            ("update", {*critic, "critic optimizer"}),
            ("publish", {"policy weights"}),
        ], name
    for kind in own:
        away = {what for what in everything if what.endswith(kind)}
        moments = second_step(kind)
        assert all(everything - away <= kinds for _, kinds in moments), kind
        assert all(kinds & away < away for _, kinds in moments), kind
    alike = {
        "plain": ["all", *own],
        "bfloat16": ["all-bfloat16"],
        "narrow": ["all-narrow"],
        "half-bfloat16": ["whole-bfloat16"],
    }
    for name, like in ((name, like) for like, names in alike.items() for name in names):
        assert report[name]["figures"] == report[like]["figures"], name
        weights, right = (load_file(work / one / "model.safetensors") for one in (name, like))
        assert all(weights[tensor].equal(right[tensor]) for tensor in right), name
    held_bytes = {name: report[name]["held bytes"] for name in report}
    before = load_file(model / "model.safetensors")
    for like in alike:
        after = load_file(work / like / "model.safetensors")
        assert any((after[name] - before[name]).abs().max() > 1e-3 for name in before), like
    # Moments in bfloat16 are 4 bytes less of 8, or of 12 with the weights in float32.
    for one, narrow, share in (("plain", "narrow", 1 / 2), ("bfloat16", "narrow-bfloat16", 2 / 3)):
        assert held_bytes[narrow] / held_bytes[one] == pytest.approx(share, rel=0.01)
        wide, after = (load_file(work / name / "model.safetensors") for name in (one, narrow))
        errors = [(after[name].float() - wide[name].float()).abs().max() for name in wide]
        # Two updates of at most 1e-2 each, by moments that are rounded to 8 bits; then weights are.
        assert 0 < max(errors) < (1e-3 if one == "plain" else 5e-3), narrow
    # A share of the optimizer is on the host for good.
    whole, half, none = (
        report[name]["held bytes"] for name in ("bfloat16", "half-bfloat16", "whole-bfloat16")
    )
    assert none == 0 < 0.3 * whole < half <= 0.5 * whole
    # Megatron makes one of whole weights for each, first.
    assert report["half-bfloat16"]["hybrid optimizers"] == len(("policy", "critic"))
