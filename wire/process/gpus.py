"""GPUs this process may use, found without CUDA: a count must not create a context."""

import os
import re
import subprocess
from functools import cache
from pathlib import Path

_PROC, _DEVICES = Path("/proc/driver/nvidia/gpus"), Path("/dev")
_LOOK_S = 60.0  # a driver that hangs must not hang a command
_LISTED = re.compile(r"^GPU (\d+): .*\(UUID: (\S+)\)$", re.MULTILINE)
_VARIABLE = "CUDA_VISIBLE_DEVICES"


def usable_gpus() -> tuple[str, ...]:
    """Return the GPUs that this process may use, each as CUDA_VISIBLE_DEVICES names it.

    That variable, where it is set, chooses among the host's GPUs; else it is all of them, by
    their numbers.
    """
    return chosen_gpus(os.environ.get(_VARIABLE), gpus_of_host())  # noqa: TID251 CUDA has no other


def chosen_gpus(variable: str | None, host: dict[str, str]) -> tuple[str, ...]:
    """Return the GPUs CUDA takes from ``variable``: all before the first that is none.

    Args:
        variable: CUDA_VISIBLE_DEVICES; None if it is not set.
        host: the GPUs of the host, UUID by number. CUDA takes the beginning of a UUID too, and
            parts of a GPU (MIG), which are only looked up in the GPUs' own list.
    """
    if variable is None:
        return tuple(host)
    chosen: list[str] = []
    for name in filter(None, map(str.strip, variable.split(","))):
        fits = [uuid for uuid in host.values() if uuid.startswith(name)]
        is_known = name in host or len(fits) == 1 or (bool(host) and name.startswith("MIG-"))
        if not is_known or name in chosen:
            break
        chosen.append(name)
    return tuple(chosen)


@cache
def gpus_of_host() -> dict[str, str]:
    """Return the UUIDs of this host's GPUs by number, as the driver lists them.

    Where its program is missing or hidden, GPUs are counted in the driver's part of /proc,
    else by their devices; containers may hide any of these. Each has its number for a UUID then.
    """
    command = ["nvidia-smi", "-L"]
    try:
        done = subprocess.run(  # noqa: S603 a fixed command
            command, capture_output=True, text=True, check=False, timeout=_LOOK_S
        )
    except (OSError, subprocess.TimeoutExpired):
        listed = {}
    else:
        listed = dict(_LISTED.findall(done.stdout)) if done.returncode == 0 else {}
    if listed:
        return listed
    shown = list(_PROC.iterdir()) if _PROC.is_dir() else list(_DEVICES.glob("nvidia[0-9]*"))
    return {str(number): str(number) for number in range(len(shown))}
