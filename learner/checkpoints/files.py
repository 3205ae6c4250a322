"""Writes and reads checkpoints, all ranks together, with Megatron's distributed checkpointing.

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

import msgspec
import torch
from megatron.core import dist_checkpointing
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
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as save_with_torch
from typing_extensions import override

from slipstream.learner.checkpoints.digests import damage_of, write_digests
from slipstream.learner.checkpoints.identity import refuse_other_model
from slipstream.learner.model.collectives import any_rank
from slipstream.learner.model.topology import Topology
from slipstream.learner.training.policy import Policy
from slipstream.wire.errors import ConfigError, SlipstreamError
from slipstream.wire.files.checkpoints import (
    INFO_FILE,
    LEDGER_FILE,
    CheckpointInfo,
    checkpoint_name,
    ledger_file,
)
from slipstream.wire.files.replace import put_in_place

_log = logging.getLogger(__name__)
_UNFINISHED = ".unfinished"
_REPLACED = ".replaced"
_BACKEND = CheckpointingConfig("torch_dist", 1)
T = TypeVar("T")


class CheckpointError(SlipstreamError):
    """A checkpoint could not be written; those written before are untouched."""


class DamagedCheckpointError(ConfigError):
    """A checkpoint cannot be read: a part of it is missing or cut off."""


def prepare_folder(folder: Path) -> None:
    """Make RUN/checkpoints, clear what a crash left in it, and see that it can be written.

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
        sharded, common = together.on_all(  # what is split over ranks, what all hold alike
            lambda: save_preprocess(
                {**policy.sharded_state(is_loading=False), "rng": _rng(topology)}
            )
        )
        together.on_rank_0(lambda: torch.save(common, unfinished / COMMON_STATE_FNAME))
        together.on_all(lambda: _write_tensors(sharded, unfinished))
        together.on_rank_0(lambda: _finish(unfinished, final))
    finally:
        if topology.rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
    return final


def load_checkpoint(policy: Policy, topology: Topology, folder: Path, info: CheckpointInfo) -> None:
    """Fill model, optimizer, schedule and random numbers from a checkpoint; every rank calls this.

    It may have been written by other parallel sizes. Random numbers are restored where the sizes
    are the same; otherwise they stay as they were seeded.

    Raises:
        ConfigError: it is of another model.
        DamagedCheckpointError: on every rank, if any of them cannot read it.
    """
    refuse_other_model(policy.model, folder, info)
    if policy.critic is not None and not info.has_critic:
        raise ConfigError(
            f"{folder} holds no critic, and algo.advantage needs one: resume with the algorithm "
            "that wrote it, or export it and start a run from it (run.model)"
        )
    same = (info.ranks, info.tensor_parallel) == (topology.world_size, topology.tensor_parallel)
    wanted = policy.sharded_state(is_loading=True, has_reference=info.has_reference)
    if info.has_reference and not policy.renews_reference:
        _log.warning(
            "%s holds a renewed reference policy, and algo.kl.renew_every is 0: it is the one of "
            "algo.kl.reference again",
            folder.name,
        )
    if policy.renews_reference and not info.has_reference:
        _log.info("%s holds no reference policy: it starts as algo.kl.reference", folder.name)
    if same:
        wanted["rng"] = _rng(topology)
    failure: DamagedCheckpointError | None = None
    state: dict[str, Any] = {}
    try:
        if topology.rank == 0:
            _refuse_damaged(folder)
    except DamagedCheckpointError as error:
        failure = error
    if not any_rank(failure is not None, world_size=topology.world_size):
        try:
            state = _load(wanted, folder)
        except DamagedCheckpointError as error:
            failure = error
    if any_rank(failure is not None, world_size=topology.world_size):
        raise failure or DamagedCheckpointError(
            f"cannot read the checkpoint {folder}: another learner rank failed"
        )
    policy.load_state(state)
    if same:
        random.setstate(state["rng"]["python"])
        torch.cuda.set_rng_state(state["rng"]["cuda"])
        torch.set_rng_state(state["rng"]["torch"])
        get_cuda_rng_tracker().set_states(state["rng"]["megatron"])
    else:
        _log.info(
            "%s was written by %d ranks with tensor parallelism %d: random numbers start over",
            folder.name,
            info.ranks,
            info.tensor_parallel,
        )


def load_weights(model: GPTModel, folder: Path, info: CheckpointInfo) -> None:
    """Fill a model alone from a checkpoint of any layout.

    Raises:
        ConfigError: it is of another model.
        DamagedCheckpointError: it cannot be read.
    """
    refuse_other_model(model, folder, info)
    _refuse_damaged(folder)
    state = _load({"model": model.sharded_state_dict()}, folder)
    model.load_state_dict(state["model"])


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
            reason = _reason(failure) if failure is not None else "another rank failed"
            raise CheckpointError(
                f"cannot write the checkpoint {self._target}: {reason}"
            ) from failure
        return results[0]

    def on_rank_0(self, part: Callable[[], None]) -> None:
        """Run a part on rank 0; the others wait for its outcome."""
        self.on_all(part if self._topology.rank == 0 else lambda: None)


def _reason(failure: BaseException) -> str:
    """Return one line about a failure."""
    if isinstance(failure, CheckpointException) and failure.failures:
        rank, (error, _trace) = next(iter(failure.failures.items()))
        return f"rank {rank}: {_reason(error)}"
    if isinstance(failure, OSError) and failure.strerror:
        return failure.strerror
    return str(failure).partition("\n")[0] or type(failure).__name__


class _Writer(FileSystemWriter):
    """Raises the disk's error: torch sends other ranks only what its archive missed."""

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


def encode_info(info: CheckpointInfo) -> bytes:
    """Return the bytes of checkpoint.json."""
    return msgspec.json.format(msgspec.json.encode(info), indent=2) + b"\n"


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


def _refuse_damaged(folder: Path) -> None:
    if damage := damage_of(folder):
        raise DamagedCheckpointError(f"cannot read the checkpoint {folder}: {damage}")


def _load(wanted: dict[str, Any], folder: Path) -> dict[str, Any]:
    if not (folder / COMMON_STATE_FNAME).is_file():  # Megatron's own complaint is no sentence
        raise DamagedCheckpointError(
            f"cannot read the checkpoint {folder}: no {COMMON_STATE_FNAME}"
        )
    try:
        state: dict[str, Any] = dist_checkpointing.load(wanted, str(folder))
    except (Exception, CheckpointException) as error:  # whatever a damaged file leads to
        raise DamagedCheckpointError(
            f"cannot read the checkpoint {folder}: {_reason(error)}"
        ) from error
    return state


def _rng(topology: Topology) -> ShardedObject:
    """Return the state of this rank's random numbers."""
    state = {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),  # on a CPU, torch's own once more
        "megatron": dict(get_cuda_rng_tracker().get_states()),
        "python": random.getstate(),
    }
    return ShardedObject("rng", state, (topology.world_size,), (topology.rank,))
