"""The disk of a run: its sync time, and room for the checkpoints."""

import os
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from slipstream.deploy.config import RunConfig, nearest_folder
from slipstream.deploy.predict.memory.host import checkpoint_bytes, most_checkpoints
from slipstream.deploy.preflight.check.facts import Fact, fail, ok, warn
from slipstream.wire.models.hf_config import HfConfig

_SYNCS, _BLOCK_BYTES = 7, 4096
_SLOW_SYNC_S = 0.02  # every commit of the broker waits for a sync
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class SeenDisk:
    """The disk of a run folder."""

    folder: Path  # nearest existing folder
    sync_s: float  # median
    free_bytes: int


def see_disk(folder: Path) -> SeenDisk:
    """Sync a file without a name a few times; it is gone when this returns.

    Raises:
        OSError: nothing can be written there.
    """
    parent = nearest_folder(folder)
    seconds = []
    with tempfile.TemporaryFile(dir=parent) as file:
        for _ in range(_SYNCS):
            file.write(os.urandom(_BLOCK_BYTES))
            file.flush()
            start_s = time.perf_counter()
            os.fsync(file.fileno())
            seconds.append(time.perf_counter() - start_s)
    return SeenDisk(parent, statistics.median(seconds), shutil.disk_usage(parent).free)


def judge_sync(seen: SeenDisk) -> Fact:
    """Return a commit's wait for the disk; a slow disk is no failure."""
    found = f"{1e3 * seen.sync_s:.1f} ms for {_BLOCK_BYTES // 1024} KiB in {seen.folder}"
    if seen.sync_s > _SLOW_SYNC_S:
        limit = (
            f", expected at most {1e3 * _SLOW_SYNC_S:g} ms: every acknowledged change waits for it"
        )
        return warn("fsync", found + limit, "run.dir, broker.redis.fsync")
    return ok("fsync", found, "run.dir")


def judge_space(free_bytes: int, one_bytes: int, count: int) -> Fact:
    """Return whether the checkpoints fit.

    Args:
        free_bytes: Free bytes on the disk.
        one_bytes: Size of a checkpoint.
        count: Largest number of checkpoints at a time.
    """
    need = count * one_bytes
    setting = "run.dir, checkpoint.keep_last"
    found = (
        f"{free_bytes / _MIB:,.0f} MiB are free; {count} checkpoint{'s' if count > 1 else ''} of "
        f"{one_bytes / _MIB:,.1f} MiB take {need / _MIB:,.0f} MiB"
    )
    return (ok if need <= free_bytes else fail)("disk space", found, setting)


def observe_disk(
    config: RunConfig, hf: HfConfig, *, has_checkpoints: bool, on_gpu: bool, has_critic: bool
) -> list[Fact]:
    """Return the facts of a run folder's disk.

    Args:
        config: The run.
        hf: the policy's architecture.
        has_checkpoints: True with the learner on this host; else only the broker's store is here.
        on_gpu: True if the learner is on a GPU.
        has_critic: True if the learner trains a critic.
    """
    try:
        seen = see_disk(config.run.folder)
    except OSError as error:
        why = f"{nearest_folder(config.run.folder)} cannot be written: {error.strerror}"
        return [fail("fsync", why, "run.dir")]
    if not has_checkpoints:
        return [judge_sync(seen)]
    size = checkpoint_bytes(hf, on_gpu=on_gpu, has_critic=has_critic, lora=config.learner.lora)
    count = most_checkpoints(config.learner.checkpoint)
    return [judge_sync(seen), judge_space(seen.free_bytes, size, count)]
