"""Writes checkpoints, all ranks together, with Megatron's distributed checkpointing.

A checkpoint is written into a folder of another name, synced to disk and renamed by rank 0 when
every rank is done: under its own name a checkpoint is complete. If anything fails on any rank, all
ranks give the checkpoint up together.

Training waits until each rank's tensors are copied; if nothing is trained meanwhile, until they
are written: docs/adr/0041.
"""

import io
import logging
import random
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.torch import (
    _replace_state_dict_keys_with_sharded_keys,
)
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.distributed.checkpoint.storage import WriteResult

from slipstream.learner.checkpoints.digests import write_digests
from slipstream.learner.checkpoints.part import CheckpointPart
from slipstream.learner.checkpoints.rank_agreement import (
    CheckpointError,
    CheckpointStuckError,
    RankAgreement,
)
from slipstream.learner.checkpoints.staging import TensorStaging
from slipstream.learner.model.collectives import any_rank
from slipstream.learner.model.topology import Topology
from slipstream.learner.training.policy import Policy
from slipstream.weightbus.net.threads import submit
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.checkpoints import (
    INFO_FILE,
    LEDGER_FILE,
    CheckpointInfo,
    checkpoint_name,
    encode_info,
    ledger_file,
)
from slipstream.wire.files.replace import put_in_place
from slipstream.wire.process.patience import Patience, Signs

_log = logging.getLogger(__name__)
_UNFINISHED = ".unfinished"
_REPLACED = ".replaced"
_BACKEND = CheckpointingConfig("torch_dist", 1)
_POLL_S = 0.1

Stage: TypeAlias = Literal["staged", "writing", "written", "complete", "renamed"]
"""Stage of a save: training may continue; a rank writes its next tensor; a rank has written all its
tensors; all files are there; the checkpoint has its name."""


def ignore(_stage: Stage) -> None:
    """Do nothing about a stage."""


def prepare_folder(folder: Path) -> None:
    """Make RUN/checkpoints, clear leftovers of a crash, and check that it can be written.

    Raises:
        ConfigError: it cannot be written.
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
            else:  # a crash between the two renames of put_in_place
                path.rename(complete)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"cannot write checkpoints to {folder}: {error.strerror} (run.dir, run.name)"
        ) from error


class Save:
    """A checkpoint on its way to disk. Every rank has one, and all call its methods alike.

    The main threads collect, copy and plan together. Then a thread of each rank writes its part,
    without collectives. Once the main threads agree that all parts are written, a thread of rank 0
    adds the description of the whole, syncs and renames.
    """

    def __init__(
        self,
        policy: Policy,
        topology: Topology,
        folder: Path,
        info: CheckpointInfo,
        ledger: Callable[[], bytes],
        *,
        timeout_s: float,
        staging: TensorStaging | None = None,
        observe: Callable[[Stage], None] = ignore,
    ) -> None:
        """Begin to write into RUN/checkpoints.

        Without ``staging``, memory for copies of the tensors, the policy must not change before it
        is written. ``ledger`` returns the broker's part of the checkpoint, on rank 0; ``observe``
        is called at each stage, on the thread that has reached it.

        Raises:
            CheckpointError: on every rank, if any of them failed; nothing is left behind.
        """
        self.path = folder / checkpoint_name(info.step)
        self.num_polls = 0  # polls by ``wait``
        self._unfinished = folder / f".{self.path.name}{_UNFINISHED}"
        self._topology = topology
        self._agreement = RankAgreement(self.path, topology)
        self._observe = observe
        self._timeout_s = timeout_s
        self._num_signs = 0  # signs of progress
        self._patience = Patience(
            f"{self.path.name} to be written", timeout_s, lambda: Signs(0.0, self._num_signs, 0)
        )
        self._files: dict[str, bytes] = {}  # files of rank 0 besides the tensors
        try:
            self._agreement.on_rank_0(lambda: self._begin(info, ledger))
            self._part = self._planned(policy, staging)
        except CheckpointError:
            self._clear()
            raise
        observe("staged")
        self._all_wrote = topology.world_size == 1  # a single rank waits for no other
        self._work: Future[Any] = submit(self._write)

    def advance(self) -> bool:
        """Do what can be done without waiting; return True if the checkpoint has its name.

        Raises:
            CheckpointError: on every rank, if any of them failed; nothing is left behind.
        """
        if any_rank(not self._work.done()):
            return False
        work = self._work
        try:
            if self._all_wrote:
                self._agreement.on_all(work.result)
                return True
            of_all = self._agreement.on_all(lambda: self._part.gathered(work.result))
        except CheckpointError:
            self._clear()
            raise
        self._all_wrote = True
        if self._topology.rank == 0:
            self._work = submit(lambda: self._finish(of_all))
        return False

    def wait(self) -> None:
        """Wait until the checkpoint has its name.

        Raises:
            CheckpointError: on every rank, if any of them failed; nothing is left behind.
            CheckpointStuckError: on every rank, if a rank's thread made no progress for too long.
        """
        while not self.advance():
            self.num_polls += 1
            is_stuck = not self._work.done() and self._patience.is_over()
            if any_rank(is_stuck):  # no rank waits long for the slowest
                raise CheckpointStuckError(
                    f"{self.path.name} is still being written, a learner rank has made no progress "
                    f"with it for {self._timeout_s:g} s (learner.timeout_s)"
                )
            wait_for([self._work], _POLL_S)

    def _begin(self, info: CheckpointInfo, ledger: Callable[[], bytes]) -> None:
        self._files = {LEDGER_FILE: ledger_file(ledger()), INFO_FILE: encode_info(info)}
        shutil.rmtree(self._unfinished, ignore_errors=True)
        self._unfinished.mkdir(parents=True)

    def _planned(self, policy: Policy, staging: TensorStaging | None) -> CheckpointPart:
        """Return this rank's part of the policy, as it is now."""
        topology = self._topology
        sharded, common = self._agreement.on_all(  # parts split over ranks, parts all hold
            lambda: save_preprocess(
                {**policy.sharded_state(is_loading=False), "rng": random_state(topology)}
            )
        )
        if topology.rank == 0:
            self._files[COMMON_STATE_FNAME] = _serialized(common)
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(
            sharded, keep_only_main_replica=True
        )
        if staging is not None:
            self._agreement.on_all(lambda: _stage(by_key, staging))
        return self._agreement.on_all(
            lambda: CheckpointPart(
                by_key, self._unfinished, self._on_tensor, is_staged=staging is not None
            )
        )

    def _write(self) -> list[WriteResult]:
        """Write this rank's part, on its thread; a single rank also finishes."""
        for name, data in self._files.items():
            (self._unfinished / name).write_bytes(data)
        results = self._part.write()
        self._observe("written")
        if self._all_wrote:
            self._finish([results])
        return results

    def _finish(self, results: list[list[WriteResult]]) -> None:
        """Add the description of all ranks' parts, and rename; on a thread of rank 0."""
        self._part.finish(results)
        save_config(_BACKEND, str(self._unfinished))
        write_digests(self._unfinished, self._progress)
        self._observe("complete")
        put_in_place(self._unfinished, self.path)
        self._observe("renamed")

    def _on_tensor(self) -> None:
        self._progress()
        self._observe("writing")

    def _progress(self) -> None:
        self._num_signs += 1

    def _clear(self) -> None:
        """Remove what was written; no thread of any rank is writing any more."""
        if self._topology.rank == 0:
            shutil.rmtree(self._unfinished, ignore_errors=True)


def _stage(by_key: dict[str, list[ShardedBase]], staging: TensorStaging) -> None:
    """Replace tensors that training changes by copies."""
    tensors = [
        tensor for many in by_key.values() for tensor in many if isinstance(tensor, ShardedTensor)
    ]
    for tensor, copy in zip(
        tensors, staging.copy([tensor.data for tensor in tensors]), strict=True
    ):
        tensor.data = copy


def _serialized(state: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def random_state(topology: Topology) -> ShardedObject:
    """Return the state of this rank's random numbers."""
    state = {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),  # on a CPU, the same as "torch"
        "megatron": dict(get_cuda_rng_tracker().get_states()),
        "python": random.getstate(),
    }
    return ShardedObject("rng", state, (topology.world_size,), (topology.rank,))
