"""The estimate of a learner's memory beside what its ranks hold, on the CPU.

Through `slipstream plan --measure`: each rank builds its part of the model and does one update.
"""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from slipstream.deploy.predict.memory.learner_rank import TENSORS
from tests.e2e.hosts import toml_of
from tests.support.commands import called as command
from tests.support.tiny_models import write_tiny_model
from tests.support.waiting import HANG_S

pytestmark = pytest.mark.integration
LAYOUTS: dict[str, tuple[str, dict[str, object]]] = {
    "one": ("qwen2", {}),
    "one-bfloat16": ("qwen2", {"dtype": "bfloat16"}),
    "tp2": ("qwen2", {"ranks": 2, "tensor_parallel": 2}),
    "pp2-tied": ("qwen2", {"ranks": 2, "pipeline_parallel": 2}),
    "ep2": ("qwen3_moe", {"ranks": 2, "expert_parallel": 2}),
    "dp2": ("qwen3", {"ranks": 2, "dtype": "bfloat16"}),
    "dp4": ("qwen3", {"ranks": 4, "dtype": "bfloat16"}),
    "dp8": ("qwen3", {"ranks": 8, "dtype": "bfloat16"}),
    "dp2-float32": ("qwen3", {"ranks": 2}),
    "tp2-ep2-dp2": ("qwen3_moe", {"ranks": 4, "tensor_parallel": 2, "expert_parallel": 2}),
}
# In `make test` stages, and replicas with every kind of tensor; the rest is of their kind.
SLOW = LAYOUTS.keys() - {"pp2-tied", "dp2", "dp4", "dp8"}


def called(
    folder: Path, family: str, learner: dict[str, object], **changed: object
) -> subprocess.CompletedProcess[str]:
    """Call the command for a tiny model with a changed config.json."""
    model = write_tiny_model(folder / "model", family)
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    (folder / "train.jsonl").write_text(json.dumps({"prompt": "1", "answer": "1"}) + "\n")
    settings = {
        "run.model": str(model),
        "data.file": str(folder / "train.jsonl"),
        "sampling.max_prompt_tokens": 16,
        "sampling.max_response_tokens": 48,
        "learner.max_tokens_per_microbatch": 200,
        "learner.timeout_s": HANG_S,
        "generators.device": "cpu",
        **{f"learner.{name}": value for name, value in learner.items()},
    }
    (folder / "run.toml").write_text(toml_of(settings))
    return command("plan", folder / "run.toml", "--measure", "--json")


def ranks_of(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["ranks"]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in LAYOUTS],
)
def test_tensors_are_as_estimated_within_2_percent(name: str, tmp_path: Path):
    family, learner = LAYOUTS[name]
    ranks = ranks_of(called(tmp_path, family, learner))
    assert [one["rank"] for one in ranks] == list(range(int(str(learner.get("ranks", 1)))))
    if name == "pp2-tied":
        assert [one["stage"] for one in ranks] == [0, 1]
    for one in ranks:
        for kind in TENSORS:
            estimated = one["estimated"][kind]
            assert one["measured"][kind] == pytest.approx(estimated, rel=0.02), kind
            if kind == "main weights":
                assert (estimated > 0) == (learner.get("dtype") == "bfloat16")
        if not name.startswith("dp"):
            assert one["measured"]["weights"] == one["estimated"]["weights"]


HOST = {"dtype": "bfloat16", "optimizer_offload_fraction": 1.0}


@pytest.mark.parametrize(
    ("learner", "on_host"),
    [pytest.param({}, 0, id="device"), pytest.param(HOST, 16, id="host", marks=pytest.mark.slow)],
)
def test_a_process_grows_as_estimated_within_10_percent(
    tmp_path: Path, learner: dict[str, object], on_host: int
):
    changed = {"vocab_size": 300_000, "tie_word_embeddings": False}  # 38M parameters, 614 MB
    (one,) = ranks_of(called(tmp_path, "llama", learner, **changed))
    estimated, measured = one["estimated"], one["measured"]
    model = sum(estimated[kind] for kind in TENSORS)
    if on_host:
        assert estimated["moments"] == measured["moments"] == measured["main weights"] == 0
        model += on_host * estimated["weights"] / 2
    assert model > 600e6
    before = estimated["process (RSS)"] - model
    assert measured["process (RSS)"] - before == pytest.approx(model, rel=0.1)


def test_a_share_of_a_float32_optimizer_on_the_host_is_refused_by_its_setting(tmp_path: Path):
    done = called(tmp_path, "qwen2", {**HOST, "dtype": "auto"})
    assert re.search(r"optimizer_offload_fraction = 1 needs weights in bfloat16", done.stderr)


def test_a_model_that_the_host_cannot_hold_is_refused_with_both_numbers(tmp_path: Path):
    large = {"hidden_size": 8192, "num_hidden_layers": 1024, "intermediate_size": 30000}
    done = called(tmp_path, "llama", {}, **large)
    assert done.returncode == 2
    assert re.search(
        r"needs about \d{5}\.\d GiB of this host .* and [\d.]+ GiB are free", done.stderr
    )
