"""Adapters, with every role real."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file

from slipstream.weightbus.version.adapter_checksums import expected_adapter_checksums
from slipstream.weightbus.version.engine_checksums import digest_of
from tests.support.blank_model import write_blank_model
from tests.support.families import as_family
from tests.support.hub_form import as_family_of_the_hub
from tests.support.random_llama import write_random_weights
from tests.support.tiny_run import TinyRun, slipstream

pytestmark = [pytest.mark.e2e]
SAME = 1e-4  # nats
BOUND = 2
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]


def wider(folder: Path) -> None:
    """Have an MLP that SGLang does not pad on a CPU."""
    write_blank_model(folder / "model", hidden=128, layers=2)
    write_random_weights(folder / "model", scale=0.1, seed=3)


def few(inputs: Path) -> dict[str, object]:
    """Have the run end with two problems that need its last version."""
    problems = [{"prompt": f"1{number}+24=", "ground_truth": "1"} for number in range(2)]
    (inputs / "few.jsonl").write_text("".join(json.dumps(one) + "\n" for one in problems))
    return {"eval__file": inputs / "few.jsonl", "eval__before_train": "false"}


# tests/integration/test_lora_versions.py has it; a whole run with adapters: tests/e2e/test_slurm.py
@pytest.mark.slow
def test_every_answer_is_of_one_version_and_no_engine_pauses(
    start_run: Callable[..., TinyRun], inputs: Path
):
    run = start_run(
        **few(inputs),
        before=wider,
        run__steps=6,
        run__groups_per_step=2,
        run__max_staleness_steps=BOUND,
        sampling__min_response_tokens=300,
        sampling__max_response_tokens=340,
        generators__count=2,
        generators__max_sequences=2,  # one group at a time: engines are always in mid-answer
        generators__max_cached_tokens=8192,
        lora__rank=4,
        learner__lr=1e-2,
        algo__kl__coefficient=0.1,
    )
    assert run.wait() == 0, run.output
    summary, rollouts = run.summary(), run.rollouts()
    assert (summary["outcome"], summary["trained"]) == ("finished", 12)
    assert summary["equation"]["unaccounted"] == 0
    assert len(rollouts) == 24
    for row in rollouts:
        assert len(row["version_runs"]) == 1, "an answer of two versions"
        assert len(row["token_ids"]) - row["num_prompt_tokens"] >= 300
        assert 0 <= row["step"] - row["version_runs"][0]["step"] <= BOUND
    assert len({row["version_runs"][0]["step"] for row in rollouts}) > 2, (
        "no version was taken over"
    )
    assert summary["publishes_while_generating"] > 0
    lags = run.differences()
    assert max(difference for lag, difference in lags if lag == 0) < SAME
    assert max(difference for lag, difference in lags if lag > 0) > SAME, "nothing was trained"

    phases = {
        role["name"]: role["phase_seconds"]
        for role in summary["roles"]
        if role["role"] == "generator"
    }
    assert set(phases) == {"generator-0", "generator-1"}
    assert not any(seconds.get("adopt") for seconds in phases.values()), "an engine was paused"
    slipstream("export", run.folder)
    final = load_file(run.folder / "adapter" / "adapter_model.safetensors")
    expected = digest_of(expected_adapter_checksums(final))
    publish = summary["last_publish"]
    assert publish["version"] == [1, 6]
    assert set(publish["transports"].values()) == {"tcp"}
    assert set(publish["engine_digests"].values()) == {expected}
    run.assert_listens_here_alone()
    run.assert_nothing_left()


# tests/integration/test_lora_layouts.py has their learners, the test above engines with adapters.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "targets", "how"),
    [
        ("qwen3_5", [*ATTENTION, "out_proj", "down_proj"], "named, next to"),
        ("qwen3_next", ATTENTION, "named, next to"),
        ("gpt_oss", ATTENTION, "named, next to"),
        ("qwen3_moe", ["q_proj", "v_proj", *MLP], "named, next to"),
        ("deepseek_v3", [*LATENT, *MLP], "named, next to"),
        (
            "gpt_oss",
            ["gate_up_proj", "down_proj"],
            "merged, because gpt_oss has the weights of all",
        ),
        ("qwen3_5", ["in_proj_z", "o_proj"], "merged, because SGLang has no adapters of linear"),
        (
            "deepseek_v2_lite",
            ["q_proj", "down_proj"],
            "merged, because SGLang has no adapters of q_",
        ),
    ],
)
def test_engines_of_every_kind_of_layer_answer_as_the_learner_computes(
    start_run: Callable[..., TinyRun], inputs: Path, name: str, targets: list[str], how: str
):
    # Adapters of weights in MXFP4 are merged, tests/unit/generators/sglang/test_sglang_flags.py.
    of_hub = name.startswith(("qwen3_5", "qwen3_next"))
    written = as_family_of_the_hub if of_hub else as_family
    run = start_run(
        **few(inputs),
        before=partial(written, name=name),
        run__steps=3,
        lora__rank=4,
        lora__targets=targets,
        learner__lr=1e-2,
    )
    assert run.wait() == 0, run.output
    assert f"lora.publish: {how}" in run.output
    lags = run.differences()
    assert max(difference for lag, difference in lags if lag == 0) < SAME
    slipstream("export", run.folder)
    final = load_file(run.folder / "adapter" / "adapter_model.safetensors")
    if name == "gpt_oss" and how.startswith("merged"):
        assert {key.partition(".experts.")[2] for key in final} == {
            *("base_layer.lora_A.weight", "base_layer.lora_B.weight"),
            *("lora_A.weight", "lora_B.weight"),
        }
    else:
        assert {layer for layer in targets for key in final if f".{layer}." in key} == set(targets)
