"""A user namespace in which root is root and the kernel gives no more of some namespaces."""

import ctypes
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_NEW_USER_AND_MOUNTS = 0x10020000


def in_container(command: Sequence[str], most: Mapping[str, int]) -> list[str]:
    """Return the argv that runs a command in one; root only.

    Args:
        command: what to run.
        most: namespaces by kind (pid, ipc, user), of all processes there together.
    """
    limits = [f"{kind}={number}" for kind, number in most.items()]
    return [sys.executable, "-I", __file__, *limits, "--", *command]


def _main(arguments: list[str]) -> int:
    end = arguments.index("--")
    entered, enters = os.pipe()
    mapped, maps = os.pipe()
    if not (pid := os.fork()):
        os.close(maps)
        if ctypes.CDLL(None).unshare(_NEW_USER_AND_MOUNTS):
            os._exit(1)
        os.write(enters, b"y")
        os.read(mapped, 1)
        for kind, _, number in (one.partition("=") for one in arguments[:end]):
            Path(f"/proc/sys/user/max_{kind}_namespaces").write_text(number)
        os.execvp(arguments[end + 1], arguments[end + 1 :])  # noqa: S606 as told
    os.close(enters)
    if os.read(entered, 1):
        for kind in ("uid", "gid"):
            Path(f"/proc/{pid}/{kind}_map").write_text("0 0 4294967295")
    os.close(maps)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
