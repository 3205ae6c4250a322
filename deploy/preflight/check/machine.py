"""Memory and GPUs of a host."""

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from slipstream.deploy.predict.memory.gpu import GIB
from slipstream.deploy.predict.memory.learner_rank import MemoryPart
from slipstream.deploy.preflight.check.facts import Fact, fail, ok, warn
from slipstream.wire.gpus import usable_gpus

_SHARED = Path("/dev/shm")  # noqa: S108 the kernel's shared memory
_QUERY = "index,uuid,name,memory.total,memory.free,driver_version"
_ANSWER_S = 60.0  # limit for a hanging driver
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class SeenGpu:
    """One GPU of a host."""

    index: str
    uuid: str
    model: str
    total_bytes: int
    free_bytes: int
    driver: str


def read_gpus(listing: str) -> list[SeenGpu]:
    """Return the GPUs in the output of nvidia-smi (CSV without header and units).

    Other lines, such as those of a GPU without memory of its own, are left out.
    """
    found = []
    for line in listing.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if (
            len(fields) == len(_QUERY.split(","))
            and fields[3].isdecimal()
            and fields[4].isdecimal()
        ):
            index, uuid, model, total, free, driver = fields
            found.append(SeenGpu(index, uuid, model, int(total) * _MIB, int(free) * _MIB, driver))
    return found


def see_gpus() -> list[SeenGpu]:
    """Return the usable GPUs of this process, as the driver describes them, without CUDA."""
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(  # noqa: S603 a fixed command
            command, capture_output=True, text=True, check=False, timeout=_ANSWER_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    usable = usable_gpus()
    return [
        gpu
        for gpu in read_gpus(done.stdout)
        if any(gpu.index == name or gpu.uuid.startswith(name) for name in usable)
    ]


def judge_gpus(
    seen: Sequence[SeenGpu], num_usable: int, need: int, *, wanted: bool, nccl: str
) -> list[Fact]:
    """Return whether a host has the GPUs of its processes.

    Args:
        seen: GPUs as the driver describes them.
        num_usable: Usable GPUs of this process; the driver may not describe all.
        need: Number of GPUs of the processes here.
        wanted: True if the engines here run on GPUs.
        nccl: Installed version of NCCL; empty without one.
    """
    setting = "generators.device, learner.ranks, generators.count"
    if not wanted:
        return [ok("GPUs", "none is used: everything runs on the CPU", "generators.device")]
    found = f"{num_usable} may be used, {need} are needed"
    kinds = sorted({f"{gpu.model}, driver {gpu.driver}" for gpu in seen})
    found += "".join(f"; {kind}" for kind in kinds) + f"; NCCL {nccl or 'is not installed'}"
    facts = [(ok if num_usable >= need else fail)("GPUs", found, setting)]
    if not nccl:
        facts.append(warn("NCCL", "no package of it is installed: NCCL groups cannot open", ""))
    busy = [gpu for gpu in seen if gpu.free_bytes < 0.9 * gpu.total_bytes]
    if busy:
        shown = ", ".join(
            f"GPU {gpu.index}: {gpu.free_bytes / GIB:.1f} of {gpu.total_bytes / GIB:.1f} GiB free"
            for gpu in busy
        )
        facts.append(warn("GPU in use", shown, "CUDA_VISIBLE_DEVICES"))
    return facts


def judge_memory(
    name: str, parts: Sequence[MemoryPart], total_bytes: int, free_bytes: int, setting: str
) -> Fact:
    """Return whether an estimate fits into memory: a failure if it exceeds the total.

    Args:
        name: Name of the memory.
        parts: Parts of the estimate.
        total_bytes: Size of the memory.
        free_bytes: Free part of it now.
        setting: Setting that changes the estimate.
    """
    need = sum(part.num_bytes for part in parts)
    shown = ", ".join(f"{part.what} {part.num_bytes / GIB:.2f}" for part in parts) or "nothing"
    found = (
        f"about {need / GIB:.2f} GiB are needed ({shown}); {free_bytes / GIB:.2f} of "
        f"{total_bytes / GIB:.2f} GiB are free"
    )
    judged = fail if need > total_bytes else warn if need > free_bytes else ok
    return judged(name, found, setting)


def host_memory_now() -> tuple[int, int]:
    """Return the total and available memory of this host, in bytes."""
    memory = psutil.virtual_memory()
    return int(memory.total), int(memory.available)


def shared_memory_now() -> tuple[int, int] | None:
    """Return the size of /dev/shm and its free part, in bytes; None without /dev/shm."""
    if not _SHARED.is_dir():
        return None
    usage = shutil.disk_usage(_SHARED)
    return usage.total, usage.free
