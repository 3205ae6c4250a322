"""Roles of a tiny run as processes of their own, each with a port for probes."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from slipstream.wire.process.health import probe
from slipstream.wire.process.ports import free_port
from tests.support import nursery
from tests.support.tiny_run import overrides_of, tiny_inputs, tiny_settings
from tests.support.waiting import HANG_S, until

BROKER = "slipstream.broker.main"
GENERATOR = "slipstream.generators.main"
LEARNER = "slipstream.learner.main"
WORKER = "slipstream.broker.reward_worker.main"


class Role:
    """A process with a port for probes."""

    def __init__(self, process: subprocess.Popen[Any], port: int, log: Callable[[], str]) -> None:
        """Take what was started.

        Args:
            process: of the role.
            port: of its probes.
            log: returns what it has written.
        """
        self.process = process
        self.port = port
        self._log = log

    @property
    def log(self) -> str:
        return self._log()

    def says(self, kind: str) -> dict[str, Any]:
        """Return the answer to a probe."""
        answer: dict[str, Any] = json.loads(probe(self.port, kind, timeout_s=HANG_S)[1])
        return answer

    def until_it_says(self, kind: str, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait for an answer of a role that runs."""
        answer: dict[str, Any] = {}

        def comes() -> bool:
            assert self.process.poll() is None, self.log
            answer.update(self.says(kind))
            return is_so(answer)

        until(comes, lambda: f"{kind}: {answer}\n{self.log}")
        return answer

    def until_ready(self) -> None:
        self.until_it_says("ready", lambda answer: answer["ready"])

    def ends(self) -> int:
        """Ask the role to end; return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(HANG_S)

    def kill(self) -> None:
        """End it at once; its children are bound to it."""
        self.process.kill()
        self.process.wait(HANG_S)


class Probed(Role):
    """A role that was started with `--health`."""

    def __init__(self, module: str, folder: Path, *arguments: str, port: int = 0) -> None:
        port = port or free_port()
        log_file = folder / f"{module}.log"
        command = [sys.executable, "-m", module, *arguments, "--health", str(port)]
        with log_file.open("a") as log:
            env = dict(os.environ)  # noqa: TID251 handed on
            process = nursery.start(command, env=env, stdout=log, stderr=log)
        super().__init__(process, port, lambda: log_file.read_text(errors="replace"))


class ProbedRun:
    """A tiny run in a folder, whose roles are started one by one; none outlives the block."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.folder = folder
        self._roles: list[Probed] = []
        tiny_inputs(folder)
        (folder / "run.toml").write_text("")
        settings = overrides_of(tiny_settings(folder))
        self._config = ("--config", str(folder / "run.toml"), *settings, *overrides)

    def start(self, module: str, *arguments: str, port: int = 0) -> Probed:
        role = Probed(module, self.folder, *self._config, *arguments, port=port)
        self._roles.append(role)
        return role

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for role in self._roles:
            role.kill()
