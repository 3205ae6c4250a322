"""Identity of the place in which agents can open each other's files."""

import os
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PROCESSES = Path("/proc/self/ns/pid")


def host_identity() -> str:
    """Return a text that agents have in common which can open each other's files in /proc.

    That takes one kernel, one numbering of processes, and one user. Empty if the kernel does not
    say.
    """
    try:
        boot, processes = _BOOT_ID.read_text().strip(), _PROCESSES.stat().st_ino
    except OSError:
        return ""
    return f"{boot}/{processes}/{os.geteuid()}"
