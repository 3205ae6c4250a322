"""Writes checkpoints, all ranks together, with Megatron's distributed checkpointing.

A checkpoint is written into a folder of another name, synced to disk and renamed by rank 0 when
every rank is done: one that bears its name is complete. Whatever goes wrong on any rank, all
ranks give it up together.

Tensors are written by torch's own writer in this process. Megatron's default starts a manager
and forks writer processes, which takes seconds and forks a process with running threads.
"""

import logging
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from megatron.core.dist_checkpointing.core import (
    CheckpointingConfig,
    CheckpointingException,
    save_config,
)
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as save_with_torch
from typing_extensions import override

from slipstream.learner.checkpoints.digests import write_digests
from slipstream.learner.model.collectives import any_rank
from slipstream.learner.model.topology import Topology
from slipstream.learner.training.policy import Policy
from slipstream.wire.errors import ConfigError, SlipstreamError
from slipstream.wire.files.checkpoints import (
    INFO_FILE,
    LEDGER_FILE,
    CheckpointInfo,
    checkpoint_name,
    encode_info,
    ledger_file,
)
from slipstream.wire.files.replace import put_in_place

_log = logging.getLogger(__name__)
_UNFINISHED = ".unfinished"
_REPLACED = ".replaced"
_BACKEND = CheckpointingConfig("torch_dist", 1)
T = TypeVar("T")


class CheckpointError(SlipstreamError):
    """A checkpoint could not be written; earlier ones are untouched."""


def prepare_folder(folder: Path) -> None:
    """Make RUN/checkpoints, clear leftovers of a crash, and check that it can be written.

    Raises:
        ConfigError: it cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob(f".*{_UNFINISHED}"):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        for path in folder.glob(f".*{_REPLACED}"):
            complete = folder / path.name.removeprefix(".").removesuffix(_REPLACED)
            if complete.exists():
                shutil.rmtree(path)
            else:  # ended between the two renames of put_in_place
                path.rename(complete)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"cannot write checkpoints to {folder}: {error.strerror} (run.dir, run.name)"
        ) from error


def save_checkpoint(
    policy: Policy,
    topology: Topology,
    folder: Path,
    info: CheckpointInfo,
    ledger: Callable[[], bytes],
) -> Path:
    """Write a checkpoint into RUN/checkpoints and return its folder; every rank calls this.

    Rank 0 calls ``ledger`` for that of the broker.

    Raises:
        CheckpointError: on every rank, if any of them failed; nothing is left behind.
    """
    final = folder / checkpoint_name(info.step)
    unfinished = folder / f".{final.name}{_UNFINISHED}"
    together = _Together(final, topology)
    try:
        together.on_rank_0(lambda: _begin(unfinished, info, ledger()))
        sharded, common = together.on_all(  # parts split over ranks, parts that all hold alike
            lambda: save_preprocess(
                {**policy.sharded_state(is_loading=False), "rng": random_state(topology)}
            )
        )
        together.on_rank_0(lambda: torch.save(common, unfinished / COMMON_STATE_FNAME))
        together.on_all(lambda: _write_tensors(sharded, unfinished))
        together.on_rank_0(lambda: _finish(unfinished, final))
    finally:
        if topology.rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
    return final


class _Together:
    """Runs parts of a save so that all ranks learn whether all of them succeeded."""

    def __init__(self, target: Path, topology: Topology) -> None:
        self._target = target
        self._topology = topology

    def on_all(self, part: Callable[[], T]) -> T:
        """Run a part on every rank."""
        results: list[T] = []
        failure: BaseException | None = None
        try:
            results.append(part())
        except (
            OSError,
            RuntimeError,  # torch's writer, on a full disk
            ValueError,
            CheckpointException,  # not an Exception
            CheckpointingException,
            SlipstreamError,
        ) as error:
            failure = error
        if any_rank(failure is not None, world_size=self._topology.world_size):
            reason = reason_of(failure) if failure is not None else "another rank failed"
            raise CheckpointError(
                f"cannot write the checkpoint {self._target}: {reason}"
            ) from failure
        return results[0]

    def on_rank_0(self, part: Callable[[], None]) -> None:
        """Run a part on rank 0; the others wait for its outcome."""
        self.on_all(part if self._topology.rank == 0 else lambda: None)


def reason_of(failure: BaseException) -> str:
    """Return one line about a failure of a disk or of torch's reader or writer."""
    if isinstance(failure, CheckpointException) and failure.failures:
        rank, (error, _trace) = next(iter(failure.failures.items()))
        return f"rank {rank}: {reason_of(error)}"
    if isinstance(failure, OSError) and failure.strerror:
        return failure.strerror
    return str(failure).partition("\n")[0] or type(failure).__name__


class _Writer(FileSystemWriter):
    """Raises the disk's error: torch sends other ranks only the missing part of its archive."""

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[Any]:
        """Write this rank's part."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            if cause is None:
                raise
            raise OSError(cause.errno, cause.strerror) from error


def _begin(unfinished: Path, info: CheckpointInfo, ledger: bytes) -> None:
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    (unfinished / LEDGER_FILE).write_bytes(ledger_file(ledger))
    (unfinished / INFO_FILE).write_bytes(encode_info(info))


def _write_tensors(sharded: dict[str, Any], folder: Path) -> None:
    """Write every rank's part; an error on one rank is raised on all of them."""
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
    save_with_torch(
        mcore_to_pyt_state_dict(by_key, is_loading=False),
        storage_writer=_Writer(folder, thread_count=1),
        planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
    )


def _finish(unfinished: Path, final: Path) -> None:
    save_config(_BACKEND, str(unfinished))
    write_digests(unfinished)
    put_in_place(unfinished, final)


def random_state(topology: Topology) -> ShardedObject:
    """Return the state of this rank's random numbers."""
    state = {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),  # on a CPU, torch's own once more
        "megatron": dict(get_cuda_rng_tracker().get_states()),
        "python": random.getstate(),
    }
    return ShardedObject("rng", state, (topology.world_size,), (topology.rank,))
