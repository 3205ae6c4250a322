"""GPUs that this process may use, found without CUDA: a count must not create a context."""

import os
import re
import subprocess
from functools import cache
from pathlib import Path

_PROC, _DEVICES = Path("/proc/driver/nvidia/gpus"), Path("/dev")
_LOOK_S = 60.0  # limit for a hanging driver
_LISTED = re.compile(r"^GPU (\d+): .*\(UUID: (\S+)\)$", re.MULTILINE)
_SHOWN = re.compile(r"^GPU UUID:\s*(GPU-[0-9a-f-]+)\s*$", re.MULTILINE)  # ? if unknown
_VARIABLE = "CUDA_VISIBLE_DEVICES"


def usable_gpus(proc: Path = _PROC, devices: Path = _DEVICES) -> tuple[str, ...]:
    """Return the GPUs that this process may use, each as CUDA_VISIBLE_DEVICES names it.

    The variable chooses among the host's GPUs; if it is not set, all are usable, by number. The
    driver's folders are ``proc`` and ``devices``.
    """
    host = gpus_of_host(proc, devices)
    return chosen_gpus(os.environ.get(_VARIABLE), host)  # noqa: TID251 CUDA has no other


def chosen_gpus(variable: str | None, host: dict[str, str]) -> tuple[str, ...]:
    """Return the GPUs that CUDA takes from ``variable``: all before the first invalid name.

    Args:
        variable: CUDA_VISIBLE_DEVICES; None if not set.
        host: The GPUs of the host, UUID by number; empty if unknown. CUDA also accepts the
            beginning of a UUID. Names of GPUs without a known UUID, and of parts of a GPU (MIG),
            are accepted unchecked.
    """
    if variable is None:
        return tuple(host)
    chosen: list[str] = []
    num_unknown = sum(not uuid for uuid in host.values())
    for name in filter(None, map(str.strip, variable.split(","))):
        fits = [uuid for uuid in host.values() if uuid.startswith(name)]
        is_known = name in host or len(fits) == 1 or (bool(host) and name.startswith("MIG-"))
        if not is_known and not fits and name.startswith("GPU-") and num_unknown:
            num_unknown -= 1
            is_known = True
        if not is_known or name in chosen:
            break
        chosen.append(name)
    return tuple(chosen)


@cache
def gpus_of_host(proc: Path = _PROC, devices: Path = _DEVICES) -> dict[str, str]:
    """Return the UUIDs of this host's GPUs by number, as the driver lists them.

    If its program is missing or hidden, they come from /proc, or else their devices are counted,
    without UUIDs; containers may hide any of these.
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
    if proc.is_dir():  # one folder per GPU, named by its place on the bus, as CUDA counts
        uuids = [_uuid_in(folder / "information") for folder in sorted(proc.iterdir())]
    else:
        uuids = [""] * len(list(devices.glob("nvidia[0-9]*")))
    return {str(number): uuid for number, uuid in enumerate(uuids)}


def _uuid_in(file: Path) -> str:
    try:
        found = _SHOWN.search(file.read_text("utf-8", "replace"))
    except OSError:
        return ""
    return found[1] if found else ""
