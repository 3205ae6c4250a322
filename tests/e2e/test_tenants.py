"""Several tenants in one learner and one pool of engines, with every role real."""

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file

from slipstream.weightbus.version.adapter_checksums import expected_adapter_checksums
from slipstream.weightbus.version.engine_checksums import digest_of
from tests.support.blank_model import write_blank_model
from tests.support.random_llama import write_random_weights
from tests.support.tiny_run import TinyRun, differences_in, python, rows_of, slipstream

pytestmark = [pytest.mark.e2e]
SAME = 1e-4  # nats
POISON = """
def score(data_source, solution_str, ground_truth, extra_info):
    return float("nan") if solution_str < "5" else -1e308
"""
TENANTS = {
    "digits": """
        [broker]
        record_batches = true
        [run]
        seed = 5
        [eval]
        file = "%(folder)s/few.jsonl"
    """,
    "few": """
        [broker]
        record_batches = true
        [run]
        seed = 6
        max_staleness_steps = 0
        [lora]
        rank = 2
        alpha = 8.0
        targets = ["q_proj", "v_proj"]
        [algo]
        preset = "cispo"
        [eval]
        file = "%(folder)s/few.jsonl"
    """,
    "refused": '[data]\nfile = "%(folder)s/missing.jsonl"\n',
    "unasked": """
        [data]
        as_chat = true
        [sampling]
        chat_template = "%(folder)s/refuses.jinja"
    """,
    "broken": "[run]\nsteps = 1000\noutage_s = 5.0\n",
    "poison": '[reward]\nfunction = "%(folder)s/poison.py:score"\n[run]\nepochs = 0.2\n',
}


def as_pool(folder: Path, names: Iterable[str] = TENANTS) -> None:
    """Write the settings of some tenants, and a model whose MLP SGLang does not pad."""
    write_blank_model(folder / "model", hidden=128, layers=2)
    write_random_weights(folder / "model", scale=0.1, seed=3)
    (folder / "poison.py").write_text(POISON)
    (folder / "refuses.jinja").write_text("{{ raise_exception('not this one') }}")
    problems = [{"prompt": f"1{number}+24=", "ground_truth": "1"} for number in range(2)]
    (folder / "few.jsonl").write_text("".join(json.dumps(one) + "\n" for one in problems))
    tables = ""
    for name in names:
        (folder / f"{name}.toml").write_text(TENANTS[name] % {"folder": folder})
        tables += f'[tenants.{name}]\nsettings = "{folder / name}.toml"\n'
    (folder / "run.toml").write_text(tables)


def adapters(run: Path) -> dict[str, bytes]:
    """Return the bits of the adapters of a run's newest checkpoint."""
    slipstream("export", run)
    tensors = load_file(run / "adapter" / "adapter_model.safetensors")
    return {name: value.numpy().tobytes() for name, value in tensors.items()}


def test_tenants_train_as_alone_and_one_that_fails_ends_alone(
    start_run: Callable[..., TinyRun], tmp_path: Path
):
    run = start_run(
        before=as_pool,
        lora__rank=4,
        learner__lr=1e-2,
        learner__deterministic=True,
        deploy__max_restarts=0,
        checkpoint__export_at_end=False,
    )
    folders = {name: run.folder / "tenants" / name for name in TENANTS}
    metrics = folders["broken"] / "metrics.jsonl"
    run.wait_until(lambda: metrics.exists() and bool(rows_of(metrics)), "step of every tenant")
    broker = run.process_with(f"broker.main --config {folders['broken'] / 'resolved.toml'}")
    assert broker is not None
    broker.kill()
    assert run.wait() == 2, run.output  # the highest code of a tenant, that of the refused one
    outcomes = {
        name: json.loads((folder / "summary.json").read_text())["outcome"]
        for name, folder in folders.items()
    }
    assert "[tenants.refused]" not in (run.folder / "resolved.toml").read_text(), "still begun"
    assert outcomes.pop("refused").startswith("refused: broker: cannot read data.file")
    assert outcomes.pop("unasked").startswith("failed: generator-0 gave it up: row ")
    assert outcomes.pop("broken").startswith("failed: broker was killed by SIGKILL")
    assert outcomes == {"digits": "finished", "few": "finished", "poison": "finished"}
    poisoned = json.loads((folders["poison"] / "summary.json").read_text())
    assert (poisoned["trained"], poisoned["equation"]["unaccounted"]) == (0, 0)
    assert poisoned["dropped"]["reward_unavailable"] > 0
    engine = (run.folder / "logs" / "generator-0.log").read_text()
    for name in ("digits", "few"):
        folder = folders[name]
        summary = json.loads((folder / "summary.json").read_text())
        assert (summary["trained"], summary["equation"]["unaccounted"]) == (16, 0)
        rows = rows_of(folder / "rollouts" / "trained.jsonl")
        assert len(rows) == 32
        assert all(len(row["version_runs"]) == 1 for row in rows), "an answer of two versions"
        lags = differences_in(folder)
        assert max(apart for lag, apart in lags if lag == 0) < SAME, "another adapter answered"
        assert f"generator-0/{name} adopted v1.4" in engine
        final = load_file(_exported(folder))
        digest = digest_of(expected_adapter_checksums(final))
        assert set(summary["last_publish"]["engine_digests"].values()) == {digest}
        assert _replayed(folder, tmp_path / name) == adapters(folder), "neighbors changed it"
    assert {row["version_runs"][0]["step"] - row["step"] for row in rows} == {0}, "its own bound"
    assert adapters(folders["digits"]).keys() > adapters(folders["few"]).keys()
    run.assert_listens_here_alone()
    run.assert_nothing_left()


def _exported(run: Path) -> Path:
    slipstream("export", run)
    return run / "adapter" / "adapter_model.safetensors"


def _replayed(run: Path, folder: Path) -> dict[str, bytes]:
    """Train a tenant's recorded batches alone; return the bits of its adapters."""
    batches = run / "rollouts" / "batches.trajectories"
    words = ("--config", run / "resolved.toml", "--replay", batches, f"run.dir={folder}")
    done = python("-m", "slipstream.learner.main", *words)
    assert done.returncode == 0, done.stderr
    return adapters(folder / run.name)


# A pool's loop is above; kills of a run's roles: tests/e2e/test_crashes.py; resumption: unit tests.
@pytest.mark.slow
def test_a_pool_outlives_its_learner_and_generator_and_resumes_after_a_stop(inputs: Path):
    settings = {
        "run.steps": 12,
        "lora.rank": 4,
        "learner.lr": 1e-2,
        "checkpoint.every_steps": 2,
        "checkpoint.export_at_end": False,
    }
    tenants = ("digits", "few")
    run = TinyRun(inputs, settings, before=partial(as_pool, names=tenants))
    rows = [run.folder / "tenants" / name / "metrics.jsonl" for name in tenants]

    def have_stepped(steps: int) -> bool:
        return all(file.exists() and len(rows_of(file)) >= steps for file in rows)

    for words, steps in (("slipstream.learner.main", 2), ("slipstream.generators.main", 3)):
        run.wait_until(lambda: have_stepped(steps), f"step {steps} of every tenant")  # noqa: B023
        process = run.process_with(words)
        assert process is not None
        process.kill()
    run.wait_until(lambda: have_stepped(5), "step 5 of every tenant")
    run.process.terminate()
    assert run.wait() == 143, run.output
    again = TinyRun(
        inputs, settings, options=("--resume", "auto"), before=partial(as_pool, names=tenants)
    )
    assert again.wait() == 0, again.output
    for name in tenants:
        folder = again.folder / "tenants" / name
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["steps"] == 12  # one may have been there when it was stopped
        assert summary["equation"]["unaccounted"] == 0
        assert max(apart for lag, apart in differences_in(folder) if lag == 0) < SAME
    again.assert_nothing_left()
