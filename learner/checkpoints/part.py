"""One rank's part of a checkpoint, by torch's file-system writer.

Megatron's own writer starts a manager and forks writer processes, which takes seconds and forks a
process with running threads (docs/adr/0015).
"""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    mcore_to_pyt_state_dict,
)
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper
from typing_extensions import override

from slipstream.learner.model import device

_AHEAD_BYTES = 10_000_000  # bytes copied from the GPU during other writes; torch's default


class CheckpointPart:
    """One rank's part of a checkpoint: planned by all ranks together, then written by each alone.

    This is torch's ``save`` in two halves. The asynchronous saves of torch and Megatron run
    collectives in the thread, or fork a process that has threads.
    """

    def __init__(
        self,
        by_key: dict[str, list[ShardedBase]],
        folder: Path,
        progress: Callable[[], None],
        *,
        is_staged: bool,
    ) -> None:
        """Plan the part. An error on one rank is raised on all.

        ``progress`` is called as each tensor or object is written. Unless ``is_staged``, ``write``
        copies tensors from the GPU.
        """
        self._planner = _Planner(progress)
        ahead = 0 if is_staged else _AHEAD_BYTES  # 0 waits for no GPU
        self._writer = _Writer(folder, thread_count=1, per_thread_copy_ahead=ahead)
        self._ranks = _DistWrapper(None, use_dist=True, coordinator_rank=0)
        self._metadata: Metadata | None = None  # on rank 0
        self._device = None if is_staged else device.device()
        state = mcore_to_pyt_state_dict(by_key, is_loading=False)  # objects become bytes here
        self._plan = self._ranks.reduce_scatter("plan", lambda: self._own(state), self._of_all)

    def write(self) -> list[WriteResult]:
        """Write this rank's tensors and objects, and sync; return their places."""
        if self._device is not None and self._device.type == "cuda":  # new threads use the first
            torch.cuda.set_device(self._device)
        written: list[WriteResult] = self._writer.write_data(self._plan, self._planner).value()
        return written

    def gathered(self, written: Callable[[], list[WriteResult]]) -> list[list[WriteResult]]:
        """Return the results of ``write`` of every rank, on rank 0; every rank calls this.

        Raises:
            CheckpointException: on every rank, if ``written`` raises on any; it names that rank.
        """
        of_all: list[list[WriteResult]] = []
        self._ranks.all_reduce("write", written, of_all.extend)
        return of_all

    def finish(self, results: list[list[WriteResult]]) -> None:
        """Write the index of all parts, on rank 0."""
        if self._metadata is None:
            raise ValueError("only the rank that planned for all knows what there is")
        self._writer.finish(self._metadata, results)

    def _own(self, state: dict[str, Any]) -> SavePlan:
        self._planner.set_up_planner(
            state, self._writer.storage_meta(), is_coordinator=self._ranks.is_coordinator
        )
        self._writer.set_up_storage_writer(self._ranks.is_coordinator)
        return self._writer.prepare_local_plan(self._planner.create_local_plan())

    def _of_all(self, plans: list[SavePlan]) -> list[SavePlan]:
        planned, self._metadata = self._planner.create_global_plan(plans)
        return self._writer.prepare_global_plan(planned)


class _Planner(MCoreSavePlanner):  # type: ignore[misc]  # megatron is untyped
    """Megatron's planner, which also reports each tensor written."""

    def __init__(self, progress: Callable[[], None]) -> None:
        super().__init__(dedup_replicated_tensors=False, flatten_state_dict=False)
        self._progress = progress

    @override
    def create_local_plan(self) -> SavePlan:
        """Plan this rank's part, without pinned memory on reading."""
        plan: SavePlan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.pin_memory = False
        return plan

    @override
    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """Return the next data to write."""
        self._progress()
        data: Tensor | io.BytesIO = super().resolve_data(write_item)
        return data


class _Writer(FileSystemWriter):
    """Raises the disk's error: torch tells other ranks only about the missing archive part."""

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
