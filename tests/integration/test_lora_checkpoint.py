"""Checkpoints of adapters: resumed, read in other layouts, exported for PEFT, started from."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from slipstream.wire.files.checkpoints import newest_checkpoint, read_checkpoint_info
from tests.integration.recorded import LAYOUTS, Replays, finish, rows, weights
from tests.integration.test_lora_layouts import added_by_hand
from tests.integration.test_replay_export_stop import behavior_logprobs, rollouts, slipstream
from tests.support.families import as_family
from tests.support.ranks.run import outputs, start

pytestmark = pytest.mark.integration
LORA = ("lora.rank=4", "lora.alpha=8.0", "run.seed=5")
SETTINGS = (
    *LORA,
    "learner.lr=2e-2",
    "learner.lr_schedule=cosine",
    "learner.lr_decay_steps=6",
    "learner.minibatches=2",
    "learner.adam_epsilon=1e-3",
    "learner.rollouts_per_step=100",
    "algo.kl.coefficient=0.1",
    "checkpoint.export_at_end=true",
    "checkpoint.every_steps=3",
)


def figures(run: Path) -> list[dict[str, float]]:
    others = ("time/", "throughput/", "checkpoint/")
    return [{k: v for k, v in row.items() if not k.startswith(others)} for row in rows(run)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Replays, Path]:
    """Six steps of two tensor-parallel ranks, with a checkpoint after three."""
    replays = Replays(tmp_path_factory.mktemp("lora"))
    return replays, replays.train("straight", *LAYOUTS["tp2"], *SETTINGS)


SLOW = ("one", "tp2-pp2")
DIVIDED = ("learner.ranks=2",)


@pytest.mark.slow  # the same, of weights in float32, below
@pytest.mark.parametrize("layout", ["bf16", "pp2-bf16"])
def test_adapters_in_bfloat16_are_resumed_bit_for_bit(tmp_path: Path, layout: str):
    replays = Replays(tmp_path)
    run = replays.train("straight", *LAYOUTS[layout], *SETTINGS)
    resume = f"run.resume_from={run / 'checkpoints' / 'step-000003'}"
    resumed = replays.train("resumed", *LAYOUTS[layout], *SETTINGS, resume)
    assert all(value.equal(weights(run)[name]) for name, value in weights(resumed).items())
    assert figures(resumed) == figures(run)[3:]


@pytest.mark.parametrize(
    "layout", ["tp2", "divided", *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)]
)
def test_a_resumed_run_ends_as_one_that_went_on(trained: tuple[Replays, Path], layout: str):
    replays, run = trained
    checkpoint = run / "checkpoints" / "step-000003"
    info = read_checkpoint_info(checkpoint)
    assert info.adapters is not None
    assert (info.adapters.rank, info.adapters.alpha) == (4, 8.0)
    sizes = DIVIDED if layout == "divided" else LAYOUTS[layout]
    resume = (*sizes, *SETTINGS, f"run.resume_from={checkpoint}")
    resumed = replays.train(f"resumed-{layout}", *resume)
    after, right = weights(resumed), weights(run)
    if layout == "tp2":
        assert all(value.equal(right[name]) for name, value in after.items())
        assert figures(resumed) == figures(run)[3:]
    difference = max(float((value - right[name]).abs().max()) for name, value in after.items())
    assert difference < 2e-5
    before = load_file(replays.model / "model.safetensors")
    assert max(float((value - before[name]).abs().max()) for name, value in after.items()) > 1e-3
    newest = newest_checkpoint(run)
    assert newest is not None
    size = sum(path.stat().st_size for path in newest.rglob("*.distcp"))
    assert size < (replays.model / "model.safetensors").stat().st_size, "it holds the weights, too"


def test_an_export_is_read_by_peft_and_is_the_policy(trained: tuple[Replays, Path], tmp_path: Path):
    replays, run = trained
    before = run / "checkpoints" / "step-000003"
    printed = slipstream("export", before, "--out", tmp_path / "adapter")
    assert printed == f"wrote {tmp_path / 'adapter'}: {before}, step 3\n"
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 8.0, "LORA")
    fourth = [row for row in rollouts(run) if row["step"] == 3]  # trained by what it exported
    assert fourth
    tokens = [row["token_ids"] for row in fourth]
    sequences, by_adapter = tmp_path / "sequences.json", tmp_path / "by_adapter.json"
    sequences.write_text(json.dumps(tokens))
    by_adapter.write_text(json.dumps({str(tmp_path / "adapter"): tokens}))
    (printed,) = outputs([start(tmp_path, "support.peft_logprobs", replays.model, by_adapter)])
    (of_adapter,) = json.loads(printed).values()
    (base,) = outputs(
        [start(tmp_path, "integration.transformers_logprobs", replays.model, sequences)]
    )
    farthest = 0.0
    for row, logprobs, of_base in zip(fourth, of_adapter, json.loads(base), strict=True):
        first = row["num_prompt_tokens"]
        behavior = behavior_logprobs(replays.file, row["group_id"], row["sibling"])[first:]
        expected = [a + b for a, b in zip(behavior, row["logprob_diffs"], strict=True)]
        assert logprobs[first - 1 :] == pytest.approx(expected, abs=5e-5)
        farthest = max(farthest, *(abs(a - b) for a, b in zip(logprobs, of_base, strict=True)))
    assert farthest > 1e-2, "the adapter adds nothing"

    slipstream("export", run, "--out", tmp_path / "merged", "--merged")
    merged, live = load_file(tmp_path / "merged" / "model.safetensors"), weights(run)
    assert all(merged[name].equal(live[name]) for name in live)


def test_a_run_starts_from_an_adapter_of_peft(trained: tuple[Replays, Path], tmp_path: Path):
    replays, run = trained
    slipstream("export", run, "--out", tmp_path / "adapter")
    start_from = ("learner.lr=0.0", "run.steps=1", f"lora.adapter={tmp_path / 'adapter'}")
    more = replays.train("more", *LAYOUTS["tp2"], *SETTINGS, *start_from)
    assert all(value.equal(weights(run)[name]) for name, value in weights(more).items())

    def refused(*settings: str) -> str:
        return finish(replays.start("refused", *SETTINGS, *start_from, *settings), code=2)

    for settings, reason in {
        ("lora.rank=8",): "lora.rank is 4 there and 8 here",
        ("lora.alpha=16.0",): "lora.alpha is 8.0 there and 16.0 here",
        ('lora.targets=["q_proj","v_proj"]',): "lora.targets is ['down_proj', 'gate_proj'",
    }.items():
        printed = refused(*settings)
        assert reason in printed
        assert f"{tmp_path / 'adapter'} (lora.adapter)" in printed
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    name = next(iter(tensors))
    save_file(
        {key: value for key, value in tensors.items() if key != name},
        tmp_path / "adapter" / "adapter_model.safetensors",
    )
    assert f"holds no tensor {name} (lora.adapter)" in refused()


def test_a_checkpoint_of_other_adapters_or_none_is_refused(
    trained: tuple[Replays, Path], tmp_path: Path
):
    replays, run = trained
    checkpoint = run / "checkpoints" / "step-000003"

    def refused(*settings: str) -> str:
        return finish(replays.start("refused", *settings), code=2)

    resume = f"run.resume_from={checkpoint}"
    assert "lora.rank is 4 there and 2 here" in refused(*SETTINGS, "lora.rank=2", resume)
    printed = refused(resume)
    assert "it holds adapters of rank 4 and no weights, and lora.rank is not set here" in printed
    whole = replays.train("whole", "run.steps=1")
    printed = refused(*LORA, f"run.resume_from={whole / 'checkpoints' / 'step-000001'}")
    assert "it holds weights and no adapters, and lora.rank is 4 here" in printed
    assert "holds no adapters: leave --merged out" in slipstream(
        "export", whole, "--merged", code=2
    )

    moved = shutil.copytree(replays.model, tmp_path / "other")
    tensors = load_file(moved / "model.safetensors")
    tensors["model.norm.weight"] += 1.0
    save_file(tensors, moved / "model.safetensors", metadata={"format": "pt"})
    printed = refused(*SETTINGS, resume, f"run.model={moved}")
    assert "its adapters belong to other weights than those in run.model now" in printed


LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
MIXTURES = {
    "deepseek_v3": [*LATENT, "gate_proj", "up_proj", "down_proj"],
    "gpt_oss": ["gate_up_proj", "down_proj"],  # experts alone are trained
    "qwen3_5_moe": ["in_proj_qkv", "in_proj_z", "out_proj", "gate_proj", "up_proj", "down_proj"],
}
PARTS = {
    "etp2": (
        *("learner.ranks=2", "learner.tensor_parallel=2", "learner.expert_parallel=1"),
        "learner.expert_tensor_parallel=2",
    ),
    "ep2": ("learner.ranks=2", "learner.expert_parallel=2"),
    "one": (),
}


@pytest.mark.parametrize(
    ("family", "layout", "other"),
    [
        ("deepseek_v3", "etp2", "ep2"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [("gpt_oss", "ep2", "one"), ("qwen3_5_moe", "etp2", "one")]
        ),
    ],
)
def test_adapters_of_experts_are_resumed_bit_for_bit_and_in_another_layout(
    tmp_path: Path, family: str, layout: str, other: str
):
    replays = Replays(tmp_path, steps=2)
    as_family(tmp_path, family, num_hidden_layers=2)
    targets = f"lora.targets={json.dumps(MIXTURES[family])}"
    settings = (*LORA, targets, "learner.lr=1e-2", "learner.adam_epsilon=1e-3")
    settings = (*settings, "checkpoint.every_steps=1", "checkpoint.export_at_end=true")
    run = replays.train("straight", *PARTS[layout], *settings)
    first = run / "checkpoints" / "step-000001"
    resume = (*settings, f"run.resume_from={first}")
    resumed = replays.train("resumed", *PARTS[layout], *resume)
    right = weights(run)
    assert all(value.equal(right[name]) for name, value in weights(resumed).items())
    moved = weights(replays.train("moved", *PARTS[other], *resume))
    assert max(float((value - right[name]).abs().max()) for name, value in moved.items()) < 2e-5

    slipstream("export", run, "--out", tmp_path / "adapter")
    if family != "gpt_oss":  # its stacks are PEFT's own form: test_lora_layouts.py
        merged = added_by_hand(replays.model, tmp_path / "adapter", tmp_path / "merged")
        by_hand = load_file(merged / "model.safetensors")
        assert all((by_hand[name] - right[name]).abs().max() < 1e-6 for name in right)
    before = load_file(replays.model / "model.safetensors")
    changed = {name for name in right if not right[name].equal(before[name])}
    assert any(".experts." in name for name in changed)
