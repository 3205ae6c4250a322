"""Runs untrusted Python under bubblewrap (``bwrap``).

``run`` starts ``init.py`` as process 1 of a sandbox and watches it from outside: wall clock,
processor time, memory, processes and output.
"""

import contextlib
import math
import os
import secrets
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Literal, Self, TypeAlias

from slipstream.broker.sandbox.bubblewrap import (
    INIT,
    SandboxUnavailableError,
    explained,
    init_argv,
    interpreter,
    isolated_argv,
    needs_user_namespace,
    sealed,
)
from slipstream.broker.sandbox.charged_time import ChargedTime
from slipstream.broker.sandbox.process_table import children_of
from slipstream.broker.sandbox.run_usage import RunUsage

Mode: TypeAlias = Literal["namespaces", "none"]
Status: TypeAlias = Literal["ok", "failed", "timeout", "memory", "processes", "output"]
End: TypeAlias = Status | Literal["starved"]

_MIB = 1024 * 1024
_STACK_BYTES = 8 * _MIB  # stack of one thread
_POLL_S = 0.025
_END_S = 60.0
_READ_BYTES = 65536
_DISK_SHARE = 0.5  # share of own_s for which a run may also wait for a disk
NO_FILES: Mapping[str, bytes] = MappingProxyType({})
_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}  # noqa: S108
_FIRST_SPARE_UID = 1_879_048_192  # each run started by root is another user
_SPARE_UIDS = 1 << 22
_Runner: TypeAlias = Callable[[str, bytes, Mapping[str, bytes], "Limits"], "ProgramOutcome"]
_runner: _Runner | None = None


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one run, for all its processes together."""

    own_s: float = 10.0
    """Seconds in which it had a core, or wanted none; time waiting for a core does not count."""
    cpu_s: float = 10.0
    memory_bytes: int = 512 * _MIB
    max_processes: int = 32
    """Processes and threads."""
    max_output_bytes: int = _MIB
    """Of stdout and stderr together."""
    max_file_bytes: int = 16 * _MIB
    """Of one file; all files together may be four times as large."""
    start_s: float = 120.0
    """To enter the namespaces on a busy machine, before the clocks of the code start."""
    at_most: float = 20.0
    """Times own_s, by the clock of the machine: then it is too busy."""


@dataclass(frozen=True, kw_only=True)
class ProgramOutcome:
    """Outcome of a run.

    ``exit_code`` is -N after signal N, and None where we ended the run ourselves.
    """

    status: Status
    exit_code: int | None
    stdout: bytes
    stderr: bytes
    own_s: float
    cpu_s: float
    peak_bytes: int

    @property
    def text(self) -> str:
        """Stdout as text; invalid UTF-8 is replaced."""
        return self.stdout.decode(errors="replace")


def check(mode: Mode) -> None:
    """Run one line of Python; raise SandboxUnavailableError if that fails."""
    outcome = run("print(6 * 7)", mode=mode)
    if outcome.status != "ok" or outcome.stdout != b"42\n":
        shown = outcome.stderr.decode(errors="replace").strip()[-300:]
        raise SandboxUnavailableError(
            f'reward.sandbox = "{mode}" does not run Python: expected 42, got status '
            f"{outcome.status}, exit code {outcome.exit_code}, {shown or 'no output'}"
        )


def run_by(runner: _Runner) -> None:
    """From now on, hand what this process runs under bubblewrap to ``runner``."""
    global _runner  # noqa: PLW0603 what the process may do does not change again
    _runner = runner


def run(
    source: str,
    *,
    stdin: bytes = b"",
    files: Mapping[str, bytes] = NO_FILES,
    limits: Limits = Limits(),
    mode: Mode = "namespaces",
    init: Path = INIT,
) -> ProgramOutcome:
    """Run Python source with the base interpreter, without its site-packages; block until it ends.

    The code sees the system's libraries, its own work folder and nothing else: no network, no
    files of ours, no environment but PATH, HOME and LANG, no descriptors but 0, 1 and 2. Nothing
    of it is left afterwards.

    Args:
        source: Module that is run as ``__main__`` from a file in the work folder.
        stdin: Input of the code.
        files: Further files in its work folder, the current folder, by relative path.
        limits: Limits of its usage; the clocks start with the code.
        mode: ``none`` sets limits but does not protect.
        init: Process 1 of the sandbox.

    Raises:
        SandboxUnavailableError: bubblewrap does not start here, or not in time.
        ValueError: a name in ``files`` leaves the work folder.
    """
    if _runner is not None and mode == "namespaces":
        return _runner(source, stdin, files, limits)
    everything = {**files, "main.py": source.encode(errors="replace")}
    for name in everything:
        parts = PurePosixPath(name).parts
        if not parts or name.startswith("/") or ".." in parts or "\0" in name:
            raise ValueError(f"files: expected a path inside the work folder, got {name!r}")
    with (
        sealed("stdin", stdin) as given,
        StartedRun(everything, given, limits, mode, init) as started,
    ):
        return started.watch()


class StartedRun:
    """One started sandbox, its descriptors, and its usage."""

    def __init__(
        self, files: Mapping[str, bytes], stdin: int, limits: Limits, mode: Mode, init: Path = INIT
    ) -> None:
        """Start ``main.py`` of these files, with a descriptor as its input."""
        self._limits = limits
        self._plain = mode == "none"
        self._report = b""
        self._output: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        self._usage = RunUsage()
        self._own: ChargedTime | None = None  # from the start of the code
        self._start_s = time.monotonic()
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as handed:
            report, theirs = os.pipe()
            self._report_read = ours.enter_context(os.fdopen(report, "rb", buffering=0))
            handed.enter_context(os.fdopen(theirs, "wb", buffering=0))
            program = [interpreter(), "-I", "-B", "-X", "int_max_str_digits=0", "main.py"]
            rlimits = _rlimits(limits, mode)
            folder, descriptors = "/", list[int]()
            if self._plain:
                work = tempfile.TemporaryDirectory(
                    prefix="slipstream-code-", ignore_cleanup_errors=True
                )
                folder = ours.enter_context(work)
                for name, content in files.items():
                    path = Path(folder, name)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(content)
                argv = init_argv(program, report=theirs, limits=rlimits, init=init)
            else:
                argv, descriptors = isolated_argv(files, limits.max_file_bytes, handed, init)
                spare = _FIRST_SPARE_UID + secrets.randbelow(_SPARE_UIDS)
                uid = 0 if needs_user_namespace() else spare
                inside = Path("/init.py")
                argv += init_argv(program, report=theirs, limits=rlimits, uid=uid, init=inside)
            self._process = subprocess.Popen(  # noqa: S603 our own script
                argv,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[*descriptors, theirs],
                env=_ENVIRONMENT,
                cwd=folder,
                start_new_session=True,
            )
            self._stack = ours.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End all remaining processes, and wait until they are gone."""
        with self._stack, self._process:
            self._end()

    def watch(self) -> ProgramOutcome:
        """Read and measure until the run ends, or has to be ended."""
        status = self._until_the_end()
        now_s = time.monotonic()
        self._end()
        for name in ("report", *self._output):
            while self._read(name):
                pass
        return self._outcome(status, now_s)

    def _until_the_end(self) -> End | None:
        """Return why the run must be ended; None if it ended, or no more output is awaited."""
        ended = os.pidfd_open(self._process.pid)
        with os.fdopen(ended, "rb", buffering=0), selectors.DefaultSelector() as selector:
            selector.register(ended, selectors.EVENT_READ, "ended")
            selector.register(self._report_read, selectors.EVENT_READ, "report")
            for name in self._output:
                stream = getattr(self._process, name)
                os.set_blocking(stream.fileno(), False)
                selector.register(stream, selectors.EVENT_READ, name)
            return self._watched(selector)

    def _watched(self, selector: selectors.BaseSelector) -> End | None:
        next_usage_s = 0.0
        while True:
            for key, _ in selector.select(_POLL_S):
                if key.data == "ended":
                    return self._too_much_output()
                if not self._read(key.data):
                    selector.unregister(key.fileobj)
            if self._has_finished():
                return None
            now_s = time.monotonic()
            if self._own is None and b"started" in self._report:
                disk_s = _DISK_SHARE * self._limits.own_s
                self._own = ChargedTime(now_s, self._usage.cpu_s, disk_s=disk_s)
            if now_s >= next_usage_s:
                next_usage_s = now_s + _POLL_S
                levels = 1 if self._plain else 2
                most = self._limits.memory_bytes
                self._usage.update(self._process.pid, levels=levels, enough_bytes=most)
                if self._own is not None:
                    self._own.tick(
                        now_s,
                        self._usage.cpu_s,
                        wants_core=self._usage.wants_core,
                        waits_for_disk=self._usage.waits_for_disk,
                    )
            status = self._too_much_output() or self._over_limit(now_s)
            if status is not None:
                return status

    def _read(self, name: str) -> bool:
        """Read available output; return False at its end, or if there is no output yet."""
        stream = self._report_read if name == "report" else getattr(self._process, name)
        try:
            data = os.read(stream.fileno(), _READ_BYTES)
        except BlockingIOError:
            return False
        if name == "report":
            self._report += data
        else:
            self._keep(name, data)
        return bool(data)

    def _keep(self, name: str, data: bytes) -> None:
        if self._too_much_output() is None:
            self._output[name] += data

    def _has_finished(self) -> bool:
        """True once all awaited output was read, even if the run continues."""
        return False

    def _too_much_output(self) -> Status | None:
        written = sum(len(output) for output in self._output.values())
        return "output" if written > self._limits.max_output_bytes else None

    def _over_limit(self, now_s: float) -> End | None:
        """Return the limit that the run has exceeded."""
        limits, usage = self._limits, self._usage
        if self._own is None:
            return "timeout" if now_s - self._start_s > limits.start_s + limits.own_s else None
        if self._own.seconds > limits.own_s or usage.cpu_s > limits.cpu_s:
            return "timeout"
        if now_s - self._own.began_s > limits.at_most * limits.own_s:
            return "starved"
        if usage.num_tasks > limits.max_processes:
            return "processes"
        return "memory" if usage.memory_bytes > limits.memory_bytes else None

    def _end(self) -> None:
        """Kill the whole run and reap it."""
        if self._process.returncode is not None:
            return
        if self._plain:
            self._process.terminate()  # it kills its descendants
        elif not self._kill_init():
            self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(_END_S)

    def _kill_init(self) -> bool:
        """Kill process 1 of the namespace: bubblewrap ends when the kernel has killed all of it."""
        for pid in children_of(self._process.pid):
            with contextlib.suppress(OSError):
                init = os.pidfd_open(pid)
                try:
                    if pid in children_of(self._process.pid):  # and no other process by now
                        signal.pidfd_send_signal(init, signal.SIGKILL)
                        return True
                finally:
                    os.close(init)
        return False

    def _outcome(self, status: End | None, now_s: float) -> ProgramOutcome:
        """Make the outcome; raise SandboxUnavailableError if the code never started."""
        report = dict(line.partition(" ")[::2] for line in self._report.decode().splitlines())
        stderr = bytes(self._output["stderr"])
        shown = report.get("error", stderr.decode(errors="replace")[-300:])
        if status == "timeout" and not report:
            waited_s = self._limits.start_s + self._limits.own_s
            raise SandboxUnavailableError(
                f"the sandbox did not start within {waited_s:g} s: {shown.strip() or 'no output'}"
            )
        if "error" in report or "started" not in report:
            raise explained(shown)
        own = self._own or ChargedTime(now_s, 0.0, disk_s=0.0)
        if status == "starved":
            raise SandboxUnavailableError(
                f"the machine is too busy: in {now_s - own.began_s:.0f} s the run had "
                f"{own.seconds:.1f} of {self._limits.own_s:g} s for itself"
            )
        exit_code, cpu_s, peak_bytes = report.get("ended", "0 0 0").split()
        code = int(exit_code) if "ended" in report and status is None else None
        if status is None:
            status = _status_of(code, stderr)
        limit = self._limits.max_output_bytes
        return ProgramOutcome(
            status=status,
            exit_code=code,
            stdout=bytes(self._output["stdout"][:limit]),
            stderr=stderr[:limit],
            own_s=own.seconds,
            cpu_s=max(self._usage.cpu_s, float(cpu_s)),
            peak_bytes=max(self._usage.peak_bytes, int(peak_bytes)),
        )


def _status_of(code: int | None, stderr: bytes) -> Status:
    """Name the end of a run that ended by itself."""
    if code == 0:
        return "ok"
    if code == -signal.SIGXCPU:
        return "timeout"
    last = stderr.rstrip().rpartition(b"\n")[2]
    return "memory" if last.startswith(b"MemoryError") else "failed"


def _rlimits(limits: Limits, mode: Mode) -> dict[str, int]:
    """Return limits of a process, by their names in ``resource``.

    Memory and processes are looser than the limits of the run: those are measured, and a run that
    is past them is ended and called so. These stop processes faster than our polling.
    """
    rlimits = {
        "DATA": 2 * limits.memory_bytes + limits.max_processes * _STACK_BYTES,
        "AS": 4 * limits.memory_bytes + 1024 * _MIB,  # threads reserve a lot that they never touch
        "CPU": math.ceil(limits.cpu_s) + 1,
        "FSIZE": limits.max_file_bytes,
        "NOFILE": 128,
        "CORE": 1,  # a program that cores are piped to takes 0 for no limit
        "STACK": _STACK_BYTES,
        "MEMLOCK": 0,
        "MSGQUEUE": 0,
    }
    if mode == "namespaces":
        rlimits["NPROC"] = 2 * limits.max_processes + 8
    return rlimits
