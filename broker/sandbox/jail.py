"""Trusted commands that may leave processes behind, run so that they can be killed whole."""

import functools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from slipstream.broker.sandbox.bubblewrap import (
    PROBE_S,
    bubblewrap,
    explained,
    init_argv,
    trusted_argv,
)

SHARED_MEMORY = "/dev/shm"  # noqa: S108 its files are memory


def jailed(
    command: Sequence[str], *, hide: Sequence[Path] = (), shared_bytes: int = 0
) -> list[str]:
    """Return the argv that runs a trusted command in a PID namespace of its own.

    Files, network, environment, working folder and inherited descriptors stay as they are. Killing
    the started process kills everything below it; killing its one child, process 1 of the
    namespace, ends it when everything below is gone. Its exit code is that of the command,
    128 + N after signal N, and 1 if bubblewrap did not start it (reason on stderr).

    Paths to ``hide`` are covered by empty files and folders. With ``shared_bytes`` shared memory is
    its own, too, and ends with it: as much in the files of /dev/shm, and none of System V's.

    Raises:
        SandboxUnavailableError: there is no bubblewrap.
    """
    arguments = [bubblewrap(), "--die-with-parent", "--as-pid-1", "--unshare-pid"]
    arguments += trusted_argv()
    # There a user's processes can be killed all at once, where its cgroups are its own.
    arguments += ["--ro-bind-try", "/sys/fs/cgroup", "/sys/fs/cgroup"]
    covered: list[Path] = []
    for real in sorted(Path(os.path.realpath(path)) for path in hide):  # folders before their files
        if any(real.is_relative_to(folder) for folder in covered):
            continue
        if real.is_dir():
            arguments += ["--perms", "0755", "--size", "4096", "--tmpfs", str(real)]
            arguments += ["--remount-ro", str(real)]
            covered.append(real)
        elif real.exists():
            arguments += ["--dev-bind", "/dev/null", str(real)]
    if sys.pycache_prefix is not None and Path(sys.pycache_prefix).is_dir():
        # Roles import what lies there: a jailed program reads it, and writes none.
        arguments += ["--ro-bind", sys.pycache_prefix, sys.pycache_prefix]
    if shared_bytes:
        arguments += ["--unshare-ipc", "--perms", "1777", "--size", str(shared_bytes)]
        arguments += ["--tmpfs", SHARED_MEMORY]
    return [*arguments, "--", *init_argv(command)]


def kept(command: Sequence[str]) -> list[str]:
    """Return the argv that runs a trusted command without namespaces, under a subreaper.

    SIGTERM to the started process kills all that can be found below it, as does the end of the
    command, or of the calling process.
    """
    return init_argv(command)


@functools.cache
def check_jail() -> None:
    """Check, once per process, that a ``jailed`` command runs.

    Raises:
        SandboxUnavailableError: that does not work here.
    """
    probe = [sys.executable, "-I", "-S", "-c", "import os; raise SystemExit(os.getppid() != 1)"]
    try:
        done = subprocess.run(  # noqa: S603 our own interpreter
            jailed(probe), stdin=subprocess.DEVNULL, capture_output=True, timeout=PROBE_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise explained(str(error)) from error
    if done.returncode:
        raise explained(done.stderr.decode(errors="replace"))
