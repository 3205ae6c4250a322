"""A random tiny policy, a reward of its own, and `slipstream run` as a child process."""

import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from slipstream.generators.config import GeneratorSettings, generator_settings
from slipstream.generators.sglang.process import SglangProcess
from slipstream.wire.files.run_folder import ACCOUNT
from tests.support.blank_model import write_blank_model
from tests.support.listening import Listener, listeners_of
from tests.support.processes import shared_memory_of
from tests.support.random_llama import write_random_weights
from tests.support.waiting import HANG_S, until

ROOT = Path(__file__).parents[2]
_POLL_S = 0.2  # until something that a test waits for
_OF_ENGINES = "sglang_loads_"  # an engine of another test that was killed leaves one for good
_LOOK_S = 2.0  # a look at a run's processes takes a twentieth of a second of a core
_WHOLE_RUN_S = 3 * HANG_S
REWARD = """
def score(data_source, solution_str, ground_truth, extra_info):
    digits = [int(c) for c in solution_str if c.isdigit()]
    return {"score": sum(digits) / (9 * max(1, len(digits))), "digits": len(digits)}
"""
_GATE = """
import os, time

def score(*arguments, **named):
    while not os.path.exists(%r):
        time.sleep(0.05)
    return of_digits(*arguments, **named)
"""


@contextmanager
def serving(settings: GeneratorSettings) -> Iterator[SglangProcess]:
    """Yield a real server, which answers."""
    process = SglangProcess.start(settings, "generator-0")
    try:
        asyncio.run(process.until_ready(90))
        yield process
    finally:
        process.stop()


@contextmanager
def sglang_server(
    model: Path | None = None,
    longest: int = 456,
    *,
    several_turns: bool = False,
    in_flight: str = "retract",
    **sglang: int,
) -> Iterator[SglangProcess]:
    """Yield a real server of a model, of the tiny policy if none is given."""
    with tempfile.TemporaryDirectory(prefix="sp-", dir="/tmp") as name:
        if model is None:
            model = Path(name) / "model"
            write_policy(model)
        settings = generator_settings(
            {
                "run": {"name": "p", "dir": name, "model": str(model)},
                "sampling": {"max_prompt_tokens": 16, "max_response_tokens": longest - 16},
                "generators": {"device": "cpu", "max_cached_tokens": 4096, "sglang": sglang},
                "environment": {"function": "none.py:None"} if several_turns else {},
                "weightbus": {"in_flight": in_flight},
            }
        )
        with serving(settings) as process:
            yield process


def write_policy(folder: Path) -> None:
    """Write a random Llama of two layers with the quickstart's tokenizer."""
    write_blank_model(folder, hidden=64, layers=2)
    write_random_weights(folder, scale=0.15, seed=3)


def gated_reward(gate: Path) -> str:
    """Return the reward as one that waits while there is no file ``gate``."""
    return REWARD.replace("def score", "def of_digits") + _GATE % str(gate)


def assert_rewards_are_true(run: "TinyRun") -> None:
    """Every reward that was trained on is the function's value of that answer."""
    rows = run.rollouts()
    assert rows
    for row in rows:
        digits = [int(one) for one in row["answer"] if one.isdigit()]
        assert row["parts"]["digits"] == len(digits)
        assert abs(row["reward"] - sum(digits) / (9 * max(1, len(digits)))) < 1e-6


def assert_complete(run: Path, trained: int | None = None) -> None:
    """The run in a folder has ended with nothing unaccounted for, and trained so many groups."""
    account = json.loads((run / ACCOUNT).read_text())
    assert (account["finished"], account["unaccounted"]) == (True, 0)
    assert trained in {None, account["trained"]}, account


def tiny_inputs(folder: Path) -> None:
    """Write a policy, a reward and prompts."""
    write_policy(folder / "model")
    (folder / "reward.py").write_text(REWARD)
    for name, count in (("train", 40), ("held_out", 64)):
        rows = [{"prompt": f"{i:02d}+{i + 7:02d}=", "ground_truth": "1"} for i in range(count)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)


def tiny_settings(folder: Path) -> dict[str, object]:
    """Return settings of a run on these inputs that takes a minute, with one engine."""
    return {
        "run.name": "tiny",
        "run.dir": folder / "runs",
        "run.model": folder / "model",
        "run.group_size": 2,
        "run.groups_per_step": 4,
        "run.steps": 4,
        "data.file": folder / "train.jsonl",
        "reward.function": f"{folder / 'reward.py'}:score",
        "broker.drop_zero_variance": False,
        "broker.lease_s": 20.0,
        "sampling.max_prompt_tokens": 16,
        "sampling.max_response_tokens": 64,
        "generators.count": 1,
        "generators.max_cached_tokens": 8192,
        "generators.max_sequences": 8,
        "learner.lr": 1e-3,
        "learner.rollouts_per_step": 100,
        "checkpoint.export_at_end": True,
    }


def overrides_of(settings: Mapping[str, object]) -> list[str]:
    """Return settings as a command line has them."""
    return [
        f"{key}={str(value).lower() if isinstance(value, bool) else value}"
        for key, value in settings.items()
    ]


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of JSON."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def python(*words: object) -> subprocess.CompletedProcess[str]:
    """Run a program of Python to its end."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S,
        env={**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1"},  # noqa: TID251 handed on
    )


def slipstream(*words: object) -> str:
    """Return what a command prints that succeeds."""
    done = python("-m", "slipstream.deploy.main", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def differences_in(run: Path, *, most_versions: int | None = None) -> list[tuple[int, float]]:
    """Return (lag, how far engine and learner are apart in nats) of each version of an answer.

    Args:
        run: folder of a run.
        most_versions: that may have chosen an answer's tokens; others are left out.
    """
    return [
        (row["step"] - version["step"], difference)
        for row in rows_of(run / "rollouts" / "trained.jsonl")
        if most_versions is None or len(row["version_runs"]) <= most_versions
        for version, difference in zip(
            row["version_runs"], row["logprob_abs_diff_by_run"], strict=True
        )
    ]


def limited_to(few_files: int) -> Callable[[], None]:
    """Have a process that is started, and all below it, open so many files at most."""
    return partial(resource.setrlimit, resource.RLIMIT_NOFILE, (few_files, few_files))


class TinyRun:
    """One run in a folder of its own."""

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, object],
        *,
        options: Sequence[str] = (),
        before: Callable[[Path], None] = lambda _folder: None,
        environment: Mapping[str, str] | None = None,
        few_files: int = 0,
    ) -> None:
        """Start a run; ``before`` may spoil the inputs in ``folder``.

        Of ``few_files`` a process may have that many open.
        """
        self.folder = folder / "runs" / "tiny"
        tiny_inputs(folder)
        config = folder / "run.toml"
        config.write_text("")
        overrides = overrides_of(tiny_settings(folder) | dict(settings))
        before(folder)
        self.output_file = folder / "output.txt"
        self.shared_memory_before = _shared_memory()
        with self.output_file.open("w") as output:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "slipstream.deploy.main", "run", "--config", config),
                    *options,
                    *overrides,
                ],
                cwd=ROOT,
                stdout=output,
                stderr=output,
                env={**os.environ, "COLUMNS": "200", **(environment or {})},  # noqa: TID251
                preexec_fn=limited_to(few_files) if few_files else None,
            )
        self.descendants: set[psutil.Process] = set()
        self.listeners: set[Listener] = set()  # of all its processes, at any time
        self.mapped: set[str] = set()  # shared memory, the same
        self._next_look_s = 0.0
        self._scratch: Path | None = None

    @property
    def output(self) -> str:
        return self.output_file.read_text()

    def remember_children(self) -> set[psutil.Process]:
        """Note all processes of the run and where they listen; they are checked at the end."""
        with suppress(psutil.NoSuchProcess):
            now = psutil.Process(self.process.pid).children(recursive=True)
            self.descendants.update(now)
            self.listeners |= listeners_of([self.process.pid, *(child.pid for child in now)])
            self.mapped |= _mapped(now)
        return self.descendants

    def _look_now_and_then(self) -> None:
        if time.monotonic() >= self._next_look_s:
            self.remember_children()
            self._next_look_s = time.monotonic() + _LOOK_S

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + HANG_S
        while not condition():
            self._look_now_and_then()
            assert self.process.poll() is None, f"the run ended before {what}:\n{self.output}"
            assert time.monotonic() < deadline, f"no {what} in {HANG_S} s:\n{self.output}"
            time.sleep(_POLL_S)

    def steps(self) -> int:
        """Return how many learner steps the summary shows."""
        path = self.folder / "summary.json"
        return int(json.loads(path.read_text())["steps"]) if path.exists() else -1

    def process_with(self, words: str) -> psutil.Process | None:
        """Return a process of the run whose command line holds these words."""
        for process in self.remember_children():
            try:
                if words in " ".join(process.cmdline()):
                    return process
            except psutil.NoSuchProcess:
                continue
        return None

    def kill_redis(self) -> None:
        """Kill the broker's private server, as soon as it has one."""
        servers: list[psutil.Process] = []

        def has_one() -> bool:
            broker = self.process_with("slipstream.broker.main")
            with suppress(psutil.NoSuchProcess):
                children = broker.children() if broker is not None else []
                names = ("redis", "valkey")
                servers.extend(c for c in children if any(name in c.name() for name in names))
            return bool(servers)

        self.wait_until(has_one, "the broker's Redis")
        servers[0].kill()

    def log(self, role: str) -> str:
        """Return what a role has logged."""
        path = self.folder / "logs" / f"{role}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def scratch(self) -> Path:
        """Return the folder of sockets and temporary files."""
        if self._scratch is None:
            resolved = (self.folder / "resolved.toml").read_text()
            self._scratch = Path(resolved.split('socket_dir = "')[1].split('"')[0]).parent
        return self._scratch

    def wait(self) -> int:
        """Return the exit code."""
        deadline = time.monotonic() + _WHOLE_RUN_S
        while self.process.poll() is None and time.monotonic() < deadline:
            self._look_now_and_then()
            time.sleep(_POLL_S)
        if self.process.poll() is None:
            self.kill()
            raise AssertionError(f"the run did not end in {_WHOLE_RUN_S} s:\n{self.output}")
        return int(self.process.returncode)

    def kill(self) -> None:
        """End every process at once, so that a test that failed leaves none to the next."""
        for process in [psutil.Process(self.process.pid), *self.remember_children()]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()

    def summary(self) -> dict[str, Any]:
        figures: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return figures

    def rollouts(self) -> list[dict[str, Any]]:
        return rows_of(self.folder / "rollouts" / "trained.jsonl")

    def differences(self, *, most_versions: int | None = None) -> list[tuple[int, float]]:
        """Return how far engine and learner are apart, as `differences_in`."""
        return differences_in(self.folder, most_versions=most_versions)

    def assert_listens_here_alone(self) -> None:
        """No process of the run has listened beyond this machine."""
        assert self.listeners, "a run without a listener was not checked"
        beyond = sorted(one for one in self.listeners if not one.on_loopback)
        assert not beyond, "listening beyond loopback:\n" + "\n".join(map(str, beyond))

    def assert_nothing_left(self) -> None:
        """No process, socket, shared memory or temporary folder of the run remains."""
        gone, alive = psutil.wait_procs(list(self.descendants), timeout=HANG_S)
        assert not alive, f"{len(gone)} ended, these did not: {alive}"
        before = self.shared_memory_before
        left = {
            name
            for name in _shared_memory() - before
            if name in self.mapped or not name.startswith(_OF_ENGINES)
        }
        until(
            lambda: not (left & _shared_memory()) - _mapped(psutil.process_iter()),
            lambda: f"shared memory of the run is left: {sorted(left & _shared_memory())}",
        )
        assert self.scratch().is_relative_to("/tmp")  # noqa: S108
        assert not self.scratch().exists()
        assert not list(self.folder.rglob("*.sock"))


def _mapped(processes: Iterable[psutil.Process]) -> set[str]:
    """Return what living processes have mapped: other runs may be active beside this one."""
    return {path.name for path in shared_memory_of(one.pid for one in processes)}


def _shared_memory() -> set[str]:
    """Return what is there, but folders of role hosts: of runs on a cluster, beside this one."""
    found = Path("/dev/shm").iterdir()  # noqa: S108
    return {path.name for path in found if not (path / "owner").is_file()}
