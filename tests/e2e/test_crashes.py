"""Real processes of real parts are killed; the run continues, and every prompt is accounted for."""

import json
import random
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from slipstream.wire.files.trajectory_file import read_groups
from tests.support.tiny_run import TinyRun, slipstream
from tests.support.waiting import HANG_S

pytestmark = [pytest.mark.e2e, pytest.mark.redis]


def account_of(run: TinyRun) -> dict[str, Any]:
    view: dict[str, Any] = json.loads(slipstream("ledger", run.folder, "--json"))
    return view


def assert_every_prompt_is_accounted_for(run: TinyRun, prompts: int) -> None:
    view = account_of(run)
    dropped = sum(view["dropped"].values())
    assert view["unaccounted"] == 0
    assert view["prompts_taken"] == view["issued"] == prompts == view["trained"] + dropped
    assert view["sealed"] == view["trained"], "the last checkpoint holds every step"
    file = run.folder / "rollouts/batches.trajectories"
    groups = [recorded.group.group_id for recorded in read_groups(file)]
    assert len(set(groups)) == len(groups) == view["trained"]


def kill_everything(run: TinyRun) -> None:
    """The supervisor and all that it started, at once."""
    run.remember_children()
    for process in [psutil.Process(run.process.pid), *run.descendants]:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    run.process.wait(HANG_S)
    psutil.wait_procs(list(run.descendants), timeout=HANG_S)


SETTINGS: dict[str, object] = {
    "run.steps": 100,
    "run.epochs": 1.0,
    "run.max_staleness_steps": 1,
    "sampling.max_response_tokens": 24,
    "checkpoint.every_steps": 3,
    "checkpoint.keep_last": 1,
    "broker.record_batches": "true",
    "broker.drop_zero_variance": "true",
    "learner.deterministic": "true",
    "deploy.restart_backoff_s": 0.2,
    "deploy.max_restarts": 10,
}


@pytest.mark.slow  # two runs; tests/chaos/test_faults.py has it with a scripted engine and learner
def test_a_run_whose_learner_and_then_everything_is_killed_trains_every_prompt_once(tmp_path: Path):
    first = TinyRun(tmp_path, SETTINGS | {"generators.count": 1})
    first.wait_until(lambda: first.steps() >= 4, "fourth learner step")
    learner = first.process_with("slipstream.learner.main")
    assert learner is not None
    learner.kill()
    first.wait_until(lambda: "v2." in first.log("learner"), "second learner")
    before = first.steps()
    first.wait_until(lambda: first.steps() >= before + 1, "step of the second learner")
    kill_everything(first)
    step_at_kill = first.steps()
    assert step_at_kill < 9, "the run was over before the kill: make it longer"
    stale = account_of(first)
    assert stale["version"][1] == step_at_kill, "without a broker, as of the last step"

    second = TinyRun(tmp_path, SETTINGS | {"generators.count": 1}, options=["--resume", "auto"])
    assert second.wait() == 0, second.output
    assert second.folder == first.folder
    assert_every_prompt_is_accounted_for(second, 40)
    assert account_of(second)["redelivered_steps"] > 0
    assert not first.scratch().exists(), "what the killed run left behind was removed"
    second.assert_nothing_left()

    trace = slipstream("ledger", "trace", "3", second.folder)
    assert "issued for training" in trace
    assert "outcome: trained by the step" in trace or "outcome: dropped" in trace

    slipstream("replay", second.folder, "--config", second.folder / "resolved.toml")
    paths = (tmp_path, second.folder, tmp_path / "runs/tiny-replay")
    start, last, copy = (load_file(path / "model/model.safetensors") for path in paths)
    assert all(copy[name].equal(last[name]) for name in last), "not to the bit"
    assert any(not start[name].equal(last[name]) for name in last), "nothing was trained"


def kill_one(run: TinyRun, role: str) -> None:
    process = run.process_with(role)
    assert process is not None, f"no {role} to kill"
    process.kill()


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.chaos) for seed in (2, 3, 4))]
)
def test_a_broker_its_redis_a_generator_and_a_learner_are_killed_in_one_run(
    start_run: Callable[..., TinyRun], seed: int
):
    rng = random.Random(seed)
    wanted = SETTINGS | {
        "run.max_staleness_steps": 2,
        "sampling.min_response_tokens": 12,
        "broker.lease_s": 4.0,
    }
    run = start_run(**{key.replace(".", "__"): value for key, value in wanted.items()})
    roles = ["slipstream.broker.main", "redis", "--name generator-0", "slipstream.learner.main"]
    rng.shuffle(roles)
    for number, role in enumerate(roles):
        run.wait_until(lambda: run.steps() >= number + 1, "the step to kill at")  # noqa: B023
        if role == "redis":
            run.kill_redis()
        else:
            kill_one(run, role)
    assert run.wait() == 0, run.output
    assert_every_prompt_is_accounted_for(run, 40)
    summary = run.summary()
    assert set(summary["staleness_histogram"]) <= {"0", "1", "2"}
    for role in ("broker", "generator-0", "learner"):
        assert f"{role} was killed by SIGKILL" in run.output
    run.assert_nothing_left()


def ranks_of_engines(run: TinyRun) -> dict[int, list[psutil.Process]]:
    """Return the schedulers of each engine by the process id of its server, rank 0 first."""
    ranks: dict[int, list[psutil.Process]] = {}
    for process in run.remember_children():
        with suppress(psutil.NoSuchProcess):
            title = " ".join(process.cmdline())
            if "scheduler_TP" in title:
                ranks.setdefault(process.ppid(), []).append(process)
    return {
        server: sorted(found, key=lambda one: " ".join(one.cmdline()))
        for server, found in ranks.items()
    }


def starts(run: TinyRun) -> list[int]:
    """Return how often each of two generators has started an engine that answers."""
    return [run.log(f"generator-{i}").count("engine answers") for i in (0, 1)]


@pytest.mark.slow  # two engines of two ranks, and one of them again
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_takes_its_engine_along_and_no_other(
    start_run: Callable[..., TinyRun], rank: int
):
    run = start_run(
        generators__sglang__tp_size=2,
        generators__count=2,
        run__steps=60,
        deploy__restart_backoff_s=0.2,
    )
    run.wait_until(lambda: run.steps() >= 2, "second learner step")
    run.wait_until(lambda: starts(run) == [1, 1], "second engine")  # one suffices for steps
    engines = ranks_of_engines(run)
    assert [len(found) for found in engines.values()] == [2, 2]
    dying, _ = engines.values()
    dying[rank].kill()
    run.wait_until(lambda: not any(one.is_running() for one in dying), "end of its engine")
    run.wait_until(lambda: sum(starts(run)) == 3, "engine in its place")
    assert run.wait() == 0, run.output
    assert sorted(starts(run)) == [1, 2], "the other engine continued"
    summary = run.summary()
    assert (summary["trained"], summary["equation"]["unaccounted"]) == (240, 0)
    run.assert_nothing_left()


@pytest.mark.slow  # the decision is tested in tests/unit/deploy/launch/test_supervise.py
def test_a_role_that_fails_again_and_again_ends_the_run(start_run: Callable[..., TinyRun]):
    run = start_run(run__steps=1000, deploy__max_restarts=0)
    run.wait_until(lambda: run.steps() >= 1, "first learner step")
    broker = run.process_with("slipstream.broker.main")
    assert broker is not None
    broker.send_signal(signal.SIGKILL)
    assert run.wait() == 1
    assert "broker was killed by SIGKILL" in run.output
    run.assert_nothing_left()
