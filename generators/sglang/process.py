"""Starts, watches and ends one SGLang server, and removes its leftovers."""

import asyncio
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import psutil

from slipstream.generators.config import GeneratorSettings
from slipstream.generators.sglang.device_defaults import device_defaults, installed_packages
from slipstream.generators.sglang.log_noise import LEFT_OUT_FILE, counted, told
from slipstream.generators.sglang.start_order import (
    HOST,
    EngineNode,
    environment_of,
    model_flags,
    random_api_key,
    server_flags,
)
from slipstream.wire.errors import ChildDiedError, ConfigError
from slipstream.wire.process.patience import Patience, signs_of
from slipstream.wire.process.ports import free_port
from slipstream.wire.process.processes import bound_to_me, last_lines

_log = logging.getLogger(__name__)
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 SGLang puts it there
_NOTES = "shared-memory.txt"
_POLL_S = 0.25
_ANSWER_S = 4.0  # limit for one probe
_FREEZE_S = 30.0
_STOP_S = 3.0
_LINES_OF_A_FAILURE = 200
_ERROR = re.compile(r"(\w+\.)*\w*(Error|Exception)\b")  # last line of a traceback


def refused_flags(settings: GeneratorSettings) -> str:
    """Return why SGLang refuses the settings of an engine; empty if it accepts them.

    A process of its own imports SGLang for this check; no server starts.
    """
    flags = server_flags(settings, port=0, api_key="", seed_of="check")
    order = {"parent_pid": os.getpid(), "device": settings.device, "flags": flags}
    with tempfile.TemporaryDirectory() as scratch:
        found = subprocess.run(
            [sys.executable, "-m", "slipstream.generators.sglang.server"],
            input=json.dumps(order | {"only_check": True}),
            capture_output=True,
            text=True,
            check=False,
            env=environment_of(settings, Path(scratch)),
            preexec_fn=bound_to_me(),
        )
    if found.returncode == 0:
        return ""
    lines = found.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit code {found.returncode}"


@dataclass(slots=True)
class SglangProcess:
    """A server in its own session; its API key is neither in argv nor in a file."""

    process: "subprocess.Popen[bytes]"
    url: str
    api_key: str = field(repr=False)
    log_file: Path
    scratch: Path  # private folder for its temporary files
    ready_url: str = ""  # answers once it has started
    freezes_collectors: bool = False  # garbage collectors of its processes, once it has started
    told: Counter[str] = field(default_factory=Counter)  # warnings in the log's last count

    @classmethod
    def start(
        cls,
        settings: GeneratorSettings,
        name: str,
        node: EngineNode | None = None,
        store: socket.socket | None = None,
    ) -> "SglangProcess":
        """Start a server; it answers some seconds later (see ``until_ready``).

        Args:
            settings: Settings of the generator.
            name: Name of the generator.
            node: Part of an engine on several hosts; None for a whole engine.
            store: Listening socket of node 0 for the store where the ranks are to meet.

        Raises:
            ConfigError: ``node`` is missing, and the settings are of an engine on several hosts.
        """
        if node is None and settings.generators.nodes > 1:
            raise ConfigError(
                f"generators.nodes = {settings.generators.nodes} is for the generators of a run, "
                "and this is an engine on one host: set generators.nodes = 1, and "
                "generators.sglang.tp_size to GPUs of this host"
            )
        port = free_port()
        api_key = random_api_key()
        scratch = Path(tempfile.mkdtemp(prefix=f"{name}-"))
        defaults = device_defaults(settings, installed_packages())
        flags = server_flags(
            settings, port=port, api_key=api_key, seed_of=name, node=node, defaults=defaults
        )
        flags |= model_flags(settings.model, scratch, is_fp8=settings.weightbus.is_fp8)
        order = {"parent_pid": os.getpid(), "device": settings.device, "flags": flags}
        passed = () if store is None else (store.fileno(),)
        if store is not None and node is not None:
            order["store"] = {"host": node.store.host, "descriptor": store.fileno()}
        part = "" if node is None or node.node == 0 else f"-node-{node.node}"
        log_file = settings.run.logs / f"{name}{part}-sglang.log"
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with log_file.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "slipstream.generators.sglang.server"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment_of(settings, scratch, node),
                preexec_fn=bound_to_me(),
                pass_fds=passed,
            )
        if process.stdin is not None:
            process.stdin.write(json.dumps(order).encode())
            process.stdin.close()
        url = f"http://{HOST}:{port}"
        # Servers of other nodes only report that they have started.
        path = "model_info" if node is None or node.node == 0 else "health"
        return cls(
            process,
            url,
            api_key,
            log_file,
            scratch,
            ready_url=f"{url}/{path}",
            freezes_collectors=defaults.freezes_collectors,
        )

    async def until_ready(self, timeout_s: float) -> None:
        """Return once the server answers.

        Args:
            timeout_s: Longest time without a sign of life.

        Raises:
            ConfigError: the server ended.
            ChildDiedError: it shows no sign of life, or has been busy for far too long; the text
                has its last lines.
        """
        headers = {"Authorization": f"Bearer {self.api_key}"}
        patience = Patience(
            "SGLang to load the model and answer",
            timeout_s,
            signs_of(lambda: [self.process.pid], self.log_file),
        )
        async with aiohttp.ClientSession(headers=headers) as http:
            while not await _answers(http, self.ready_url):
                code = self.process.poll()
                if code is not None:  # ended before it served
                    raise ConfigError(
                        f"SGLang ended with code {code} at its start: {self.reason()} "
                        f"(run.model, [generators], {self.log_file})"
                    )
                self.note_shared_memory()
                if patience.is_over():
                    raise ChildDiedError(
                        f"SGLang does not answer: it {patience.why} "
                        f"(generators.start_timeout_s)\n{last_lines(self.log_file)}"
                    )
                await asyncio.sleep(_POLL_S)
            if self.freezes_collectors:
                await freeze_collectors(http, self.url)
        self.tell_what_is_left_out()

    def tell_what_is_left_out(self) -> None:
        """Add a line to the log with the counts of warnings left out of it, if any are new.

        The server's processes count, but are killed at their end, so this process writes the line.
        """
        found = counted(self.scratch / LEFT_OUT_FILE)
        line, self.told = told(found - self.told), found
        if line:
            with suppress(OSError), self.log_file.open("a") as log:
                log.write(line)

    def note_shared_memory(self) -> None:
        """Record the server's shared memory: no other record exists once the server is killed."""
        held: set[str] = set()
        for pid in session_members(self.process.pid):
            with suppress(OSError):
                lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
                held.update(line.split()[-1] for line in lines if str(_SHARED_MEMORY) in line)
        if held:
            (self.scratch / _NOTES).write_text("\n".join(sorted(held)))

    def check_alive(self) -> None:
        """Raise ChildDiedError, with the last lines of the log, if the server ended."""
        code = self.process.poll()
        if code is not None:
            raise ChildDiedError(
                f"SGLang ended with code {code}; {self.log_file}:\n{last_lines(self.log_file)}"
            )

    def reason(self) -> str:
        """Return why the server ended, according to its log."""
        return reason_in(last_lines(self.log_file, _LINES_OF_A_FAILURE))

    def stop(self) -> None:
        """End the server. On SIGTERM it would drain without limit, so it gets little time."""
        self.note_shared_memory()
        self.process.terminate()
        try:
            self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
        for pid in session_members(self.process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.clean()

    def clean(self) -> None:
        """Remove the server's leftovers: temporary files and shared memory."""
        self.tell_what_is_left_out()
        remove_leftovers(self.scratch)


def reason_in(log: str) -> str:
    """Return why a server ended: the last error in its log, else its last line.

    Its first process reports that a child sent it a signal, after the child's own error.
    """
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.match(line)]
    return (errors or lines or ["it printed nothing"])[-1]


def remove_leftovers(scratch: Path) -> None:
    """Remove the shared memory noted in a scratch folder, and the folder."""
    notes = scratch / _NOTES
    if notes.is_file():
        for line in notes.read_text().splitlines():
            path = Path(line)
            if path.parent == _SHARED_MEMORY:
                path.unlink(missing_ok=True)
    shutil.rmtree(scratch, ignore_errors=True)


def session_members(session: int) -> Iterator[int]:
    """Yield the processes of a session (Linux; elsewhere none)."""
    for pid in psutil.pids():
        with suppress(ProcessLookupError):
            if os.getsid(pid) == session:
                yield pid


async def _answers(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(url, timeout=aiohttp.ClientTimeout(_ANSWER_S)) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


async def freeze_collectors(http: aiohttp.ClientSession, url: str) -> None:
    """Have a server's garbage collectors pass over what it holds now: most of it lives to its end.

    The scheduler, the tokenizer and the detokenizer do so. A server that does not is slower and
    works: it is logged.
    """
    try:
        limit = aiohttp.ClientTimeout(_FREEZE_S)
        async with http.post(f"{url}/freeze_gc", timeout=limit) as response:
            response.raise_for_status()
    except (aiohttp.ClientError, TimeoutError) as error:
        _log.warning("SGLang's garbage collectors are not frozen: %r", error)
