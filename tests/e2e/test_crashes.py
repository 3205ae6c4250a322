"""Real processes of real parts are killed; the run continues, and every prompt is accounted for."""

import json
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from slipstream.deploy.launch.observer import status_now
from slipstream.deploy.terminal.observe import run_of_folder
from slipstream.wire.files.trajectory_file import read_groups
from slipstream.wire.messages.status import RunStatus
from tests.support.tiny_run import ROOT, TinyRun, assert_rewards_are_true, gated_reward, slipstream
from tests.support.waiting import HANG_S, until

pytestmark = [pytest.mark.e2e, pytest.mark.redis]
CHROMIUM = shutil.which("chromium") and shutil.which("chromedriver")
BROKER, GENERATOR = "slipstream.broker.main", "--name generator-0"
_ROWS = """
    const request = new XMLHttpRequest();
    request.open("GET", "/state.json", false);
    request.send();
    const { history } = JSON.parse(request.responseText);
    return { first_s: history.time.at_s[0], steps: history.steps.step };
"""


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
    first = TinyRun(tmp_path, SETTINGS)
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

    second = TinyRun(tmp_path, SETTINGS, options=["--resume", "auto"])
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


@dataclass
class Page:
    """The page of a run in a browser; it replaces its elements all the time."""

    browser: Any

    def text(self, place: str) -> str:
        script = "return document.getElementById(arguments[0])?.innerText ?? ''"
        return str(self.browser.execute_script(script, place))

    def groups(self) -> list[int]:
        """Return issued, trained, dropped, in flight and unaccounted for, as they are shown."""
        shown = re.findall(r"\d[\d,]*", self.text("equation-groups"))
        return [int(one.replace(",", "")) for one in shown]

    def open(self, run: TinyRun) -> RunStatus:
        """Compare the page with the ledger; return the figures of before it was read."""
        address = run.folder / "dashboard.url"
        run.wait_until(address.exists, "address of the page")
        self.browser.get(address.read_text().strip())
        run.wait_until(lambda: run.steps() >= 1, "the first step")
        self.until_live()
        before = status_now(run_of_folder(run.folder))
        recorded = (before.issued, before.trained, sum(before.dropped.values()))

        def is_as_new() -> bool:
            shown = self.groups()
            return len(shown) == 5 and all(a >= b for a, b in zip(shown, recorded, strict=False))

        until(is_as_new, "it does not move")
        issued, trained, dropped, in_flight, unaccounted = self.groups()
        after = status_now(run_of_folder(run.folder))
        assert (issued, unaccounted) == (trained + dropped + in_flight, 0)
        assert before.issued <= issued <= after.issued
        assert before.trained <= trained <= after.trained
        assert sum(before.dropped.values()) <= dropped <= sum(after.dropped.values())
        return before

    def until_live(self, is_live: bool = True) -> None:
        until(lambda: ("live" in self.text("state")) is is_live, f"live: not {is_live}")

    def until_it_names(self, role: str, is_named: bool = True) -> None:
        """Wait until the headline says that a role does not report, or does not say so."""
        # Advice stands in the headline, too, and may name a role.
        until(
            lambda: (role in self.text("verdict-silent")) is is_named,
            lambda: f"{role}: not {is_named} in {self.text('headline')!r}",
        )

    def assert_it_has_all_of(self, run: TinyRun, before: RunStatus) -> None:
        """Look at a run that has ended: what the browser still has, and `slipstream dashboard`."""
        until(lambda: "finished" in self.text("state"), "the page does not show that the run ended")
        self.until_it_names("generator-0", is_named=False)
        complaints = self.browser.get_log("browser")  # of the network while the broker was gone
        others = [one for one in complaints if "net::ERR" not in one["message"]]
        assert [one["message"] for one in others if one["source"] != "network"] == []
        summary = run.summary()
        server = subprocess.Popen(
            [sys.executable, "-m", "slipstream.deploy.main", "dashboard", str(run.folder)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "COLUMNS": "200", "PYTHONUNBUFFERED": "1"},
        )
        try:
            assert server.stdout is not None
            self.browser.get(server.stdout.readline().strip())
            until(lambda: summary["issued"] in self.groups(), "no figures")
            dropped = sum(summary["dropped"].values())
            assert self.groups() == [summary["issued"], summary["trained"], dropped, 0, 0]
            assert "live" not in self.text("state")
            rows = self.browser.execute_script(_ROWS)
            assert rows["first_s"] < before.elapsed_s, "what was before the second broker is gone"
            assert rows["steps"] == list(range(1, run.steps() + 1))
            self.browser.find_element("css selector", "#items button, #items a").click()
            until(lambda: bool(self.text("answer")), "no answer is shown")
            server.send_signal(signal.SIGINT)
            assert server.wait(HANG_S) == 0
        finally:
            server.kill()
            server.communicate()


@pytest.fixture
def page() -> Iterator[Page | None]:
    if not CHROMIUM:
        yield None
        return
    from tests.browser.chromium import start_chromium

    browser = start_chromium()
    yield Page(browser)
    browser.quit()


def kill_one(run: TinyRun, role: str) -> None:
    """Kill a process; an engine ends with its generator."""
    process = run.process_with(role)
    assert process is not None, f"no {role} to kill"
    servers = process.children(recursive=True) if role == GENERATOR else []
    process.kill()
    assert servers or role != GENERATOR, "the agent has no SGLang"
    assert not psutil.wait_procs(servers, timeout=HANG_S)[1], "kill -9 left its SGLang behind"


def kill_and_look(run: TinyRun, role: str, page: Page | None, gate: Path) -> None:
    """Kill a process; the page shows it of a generator and of the broker."""
    gate.unlink()  # no step is trained until the page has shown it
    if page is not None and role == GENERATOR:
        page.until_it_names("generator-0", is_named=False)
    if page is not None and role == BROKER:
        page.until_live()
    if role == "redis":
        run.kill_redis()
    else:
        kill_one(run, role)
    if page is not None and role == GENERATOR:
        page.until_it_names("generator-0")
    if page is not None and role == BROKER:
        page.until_live(is_live=False)
        page.until_live()
    gate.touch()


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.chaos) for seed in (2, 3, 4))]
)
def test_one_process_of_every_role_and_redis_are_killed_in_one_run_and_the_page_shows_it(
    start_run: Callable[..., TinyRun], inputs: Path, page: Page | None, seed: int
):
    gate = inputs / "gate"
    gate.touch()
    wanted = SETTINGS | {
        "run.max_staleness_steps": 2,
        "sampling.min_response_tokens": 12,
        "broker.lease_s": 4.0,
        "reward.timeout_s": HANG_S,
    }
    run = start_run(
        before=lambda folder: (folder / "reward.py").write_text(gated_reward(gate)),
        **{key.replace(".", "__"): value for key, value in wanted.items()},
    )
    roles = [BROKER, "redis", GENERATOR, "slipstream.learner.main", "--name reward-worker-0"]
    random.Random(seed).shuffle(roles)
    before = page.open(run) if page is not None else None
    for number, role in enumerate(roles):
        run.wait_until(lambda: run.steps() >= number + 1, "the step to kill at")  # noqa: B023
        kill_and_look(run, role, page, gate)
    assert run.wait() == 0, run.output
    assert_every_prompt_is_accounted_for(run, 40)
    assert_rewards_are_true(run)
    summary = run.summary()
    assert set(summary["staleness_histogram"]) <= {"0", "1", "2"}
    assert "reward_unavailable" not in summary["dropped"]
    assert "run.epochs" in summary["stop_reason"]
    for role in ("broker", "generator-0", "learner", "reward-worker-0"):
        assert f"{role} was killed by SIGKILL" in run.output
    if page is not None and before is not None:
        page.assert_it_has_all_of(run, before)
    run.assert_nothing_left()
    if page is None:
        pytest.skip("all but the page was tested: no chromium and chromedriver here")


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


@pytest.mark.slow  # tests/e2e/test_user_loop.py stops a run later, by Ctrl-C: the same end
def test_a_signal_before_the_first_step_ends_the_run_and_leaves_nothing(
    start_run: Callable[..., TinyRun],
):
    run = start_run(run__steps=1000, deploy__stop_timeout_s=15)
    run.wait_until(lambda: run.process_with("--name generator-0") is not None, "the generator")
    time.sleep(1.0)
    run.remember_children()
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 128 + signal.SIGTERM
    assert "stopped: SIGTERM" in run.output
    run.assert_nothing_left()
