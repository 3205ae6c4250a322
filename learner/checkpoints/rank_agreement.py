"""Agreement of all ranks on whether a part of a save has succeeded on all."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

from slipstream.learner.model.collectives import any_rank
from slipstream.learner.model.topology import Topology
from slipstream.wire.errors import SlipstreamError

T = TypeVar("T")


class CheckpointError(SlipstreamError):
    """A checkpoint could not be written; earlier ones are untouched."""


class CheckpointStuckError(CheckpointError):
    """A checkpoint is still being written, without progress."""


class RankAgreement:
    """Runs parts of a save so that all ranks learn if all succeeded."""

    def __init__(self, target: Path, topology: Topology) -> None:
        self._target = target
        self._topology = topology

    def on_all(self, part: Callable[[], T]) -> T:
        """Run a part on every rank.

        Raises:
            CheckpointError: on every rank, if the part failed on any.
        """
        results: list[T] = []
        failure: BaseException | None = None
        try:
            results.append(part())
        except (
            OSError,
            RuntimeError,  # torch's writer, on a full disk
            ValueError,
            MemoryError,
            CheckpointException,  # not an Exception
            CheckpointingException,
            SlipstreamError,
        ) as error:
            failure = error
        if any_rank(failure is not None):
            reason = reason_of(failure) if failure is not None else "another rank failed"
            raise CheckpointError(
                f"cannot write the checkpoint {self._target}: {reason}"
            ) from failure
        return results[0]

    def on_rank_0(self, part: Callable[[], None]) -> None:
        """Run a part on rank 0; the others wait for its outcome.

        Raises:
            CheckpointError: on every rank, if the part failed.
        """
        self.on_all(part if self._topology.rank == 0 else lambda: None)


def reason_of(failure: BaseException) -> str:
    """Return one line about a failure of a disk or of torch's reader or writer."""
    if isinstance(failure, CheckpointException) and failure.failures:
        rank, (error, _trace) = next(iter(failure.failures.items()))
        return f"rank {rank}: {reason_of(error)}"
    if isinstance(failure, OSError) and failure.strerror:
        return failure.strerror
    return str(failure).partition("\n")[0] or type(failure).__name__
