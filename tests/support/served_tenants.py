"""A command server, its learner and an engine as processes of a test, which it may kill."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Literal

import tomli_w

from slipstream.broker.commands.keys import make_tenant_key
from tests.support import nursery
from tests.support.blank_model import write_blank_model
from tests.support.random_llama import write_random_weights
from tests.support.waiting import NEVER_S, until

Role = Literal["server", "learner", "engine"]
TENANTS = ("alice", "bob", "carol", "dave")
_NUMBERS = count()
_MODULES: dict[Role, str] = {
    "server": "slipstream.broker.main",
    "learner": "slipstream.learner.main",
    "engine": "slipstream.generators.main",
}


class Served:
    """The roles of one run folder."""

    def __init__(self, folder: Path, model: str = "", **settings: Mapping[str, Any]) -> None:
        """Write settings, with other ones by section, and a model unless one is named."""
        self.folder = folder
        self.model = Path(model) if model else folder / "model"  # from where roles start
        if not model and not self.model.exists():
            write_blank_model(self.model, hidden=128, layers=2)
            write_random_weights(self.model, scale=0.1, seed=3)
        self.settings = folder / "serve.toml"
        table: dict[str, dict[str, Any]] = {
            "run": {"name": "s", "dir": str(folder), "model": str(self.model), "outage_s": NEVER_S},
            "serve": {"port": 0},
            "lora": {"rank": 8},
            "sampling": {"max_prompt_tokens": 64, "max_response_tokens": 64},
            "learner": {"deterministic": True},
            "generators": {"device": "cpu", "max_cached_tokens": 4096, "max_sequences": 8},
        }
        for name, values in settings.items():
            table.setdefault(name, {}).update(values)
        self.settings.write_text(tomli_w.dumps(table))
        self.processes: dict[Role, subprocess.Popen[Any]] = {}
        self._one_acts = threading.Lock()
        for tenant in TENANTS:
            if not self._key(tenant).exists():
                make_tenant_key(self._key(tenant).parent, tenant)

    @property
    def address(self) -> Path:
        return self.folder / "s" / "serve" / "address.txt"

    @property
    def url(self) -> str:
        return self.address.read_text().strip()

    def start(self, *roles: Role) -> None:
        """Start roles; return once the server listens."""
        for role in roles:
            module = _MODULES[role]
            words = [sys.executable, "-m", module, "--config", str(self.settings)]
            if role == "engine":
                words += ["--name", "generator-0"]
            if role == "server":
                self.address.unlink(missing_ok=True)
            log = (self.folder / f"{role}.log").open("ab")
            how: dict[str, Any] = {"stdout": log, "stderr": log, "env": _environment()}
            how["cwd"] = self.folder
            with log:
                if role == "learner":
                    self.processes[role] = nursery.start(words, anew=False, **how)
                else:
                    self.processes[role] = subprocess.Popen(words, **how)
        if "server" in roles:
            self._fix_port()

    def _fix_port(self) -> None:
        """Have a server that is started again listen where its clients know it."""
        until(lambda: self.address.exists() or self._ended("server"), self.logs)
        assert not self._ended("server"), self.logs()
        port = self.url.rpartition(":")[2]
        text = self.settings.read_text()
        self.settings.write_text(text.replace("port = 0\n", f"port = {port}\n"))

    def _ended(self, role: Role) -> bool:
        return self.processes[role].poll() is not None

    def kill(self, role: Role) -> None:
        """Kill a role at once; what it started dies with it."""
        self.processes[role].send_signal(signal.SIGKILL)
        self.processes[role].wait()

    def restart(self, role: Role) -> None:
        """Kill a role and start it again."""
        with self._one_acts:
            self.kill(role)
            self.start(role)

    def logs(self) -> str:
        """Return the end of every role's log."""
        paths = [self.folder / f"{role}.log" for role in _MODULES]
        return "\n".join(path.read_text()[-3000:] for path in paths if path.exists())

    def key(self, tenant: str) -> str:
        """Return the key of one of ``TENANTS``."""
        return self._key(tenant).read_text().strip()

    def _key(self, tenant: str) -> Path:
        return self.folder / "keys" / "tenants" / f"{tenant}.key"

    def version_of(self, sampler: str) -> str:
        """Return the version of adapters that a sampler of the server's log has."""
        return str(self._asked("SELECT version FROM samplers WHERE id = ?", sampler))

    def num_done(self) -> int:
        """Return how many commands have an outcome."""
        return int(self._asked("SELECT count(*) FROM commands WHERE done IS NOT NULL"))

    def _asked(self, query: str, *values: object) -> Any:  # noqa: ANN401 what it returns
        with closing(sqlite3.connect(self.folder / "s" / "serve" / "commands.db")) as log:
            return log.execute(query, values).fetchone()[0]

    def play(self, scenario: str, **arguments: object) -> Any:  # noqa: ANN401 what it returns
        """Play a scenario of the SDK to its end, and do what it asks for; return its result."""
        given = json.dumps({"url": self.url, "model": str(self.model), **arguments})
        file = self.folder / f"{scenario}-{next(_NUMBERS)}.json"
        file.write_text(given)
        words = [sys.executable, "-m", "tests.support.sdk_scenarios", scenario, str(file)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with (self.folder / "sdk.log").open("ab") as log:
            process = subprocess.Popen(words, text=True, stderr=log, env=_environment(), **pipes)
        watch = threading.Thread(target=self._end_with_roles, args=(process,))
        watch.start()
        try:
            for line in process.stdout:
                said = json.loads(line)
                if "end" in said:
                    return said["end"]
                self.restart(said["do"])
                process.stdin.write("done\n")
                process.stdin.flush()
            raise AssertionError((self.folder / "sdk.log").read_text()[-3000:] + self.logs())
        finally:
            process.kill()
            process.communicate()
            watch.join()

    def _end_with_roles(self, process: "subprocess.Popen[str]") -> None:
        """End a client when a role has ended that no test has killed: it would wait for ever."""
        while process.poll() is None:
            with self._one_acts:
                if any(self._ended(role) for role in self.processes):
                    process.kill()
            time.sleep(0.5)


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}  # noqa: TID251 handed on to children


@contextmanager
def serving(
    folder: Path, *roles: Role, model: str = "", **settings: Mapping[str, Any]
) -> Iterator[Served]:
    """Serve while the block runs; a ``model`` is named by its place in the folder."""
    served = Served(folder, model, **settings)
    try:
        served.start(*roles)
        yield served
    except BaseException as error:
        error.add_note(served.logs())
        raise
    finally:
        for process in served.processes.values():
            process.kill()
            process.wait()
