"""The weight bus's interface to an inference engine."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from slipstream.wire.messages.manifest import Bucket
from slipstream.wire.messages.versions import PolicyVersion


class Adoption(NamedTuple):
    """The result of ``EngineWeights.adopt_folder``."""

    num_in_flight: int  # generations, at the pause
    phase_seconds: Mapping[str, float]  # keys are from PUBLISH_PHASES
    differing: Mapping[str, str] = {}
    """Checksums of all tensors, if they are not the expected ones."""
    is_paused: bool = False
    """Whether it stays paused: the differing tensors are those that it would generate with."""


class EngineWeights(Protocol):
    """Control over the weights of a running engine. Every method raises EngineError on failure.

    Between a pause and ``resume`` nothing is generated; requests in flight wait. Weights change in
    one of two ways: by ``adopt_folder``; or by ``pause_for_update``, a ``load_bucket`` for each
    bucket, and ``finish_update``. If either fails midway, the engine holds a mixture.
    """

    async def open_group(
        self, *, host: str, port: int, group_name: str, rank: int, world_size: int, backend: str
    ) -> None:
        """Join a process group with this engine's first rank as ``rank``; returns once joined."""
        ...

    async def close_group(self, group_name: str) -> None:
        """Leave a group and close an update that a failure left open; never fails."""
        ...

    async def begin_update(self) -> None:
        """Open an update."""
        ...

    async def load_bucket(self, bucket: Bucket, *, group_name: str, last: bool) -> None:
        """Receive one bucket over the group; ``last`` also forgets cached prefixes."""
        ...

    async def end_update(self) -> None:
        """Close an update."""
        ...

    async def checksums(self) -> dict[str, str]:
        """Return the checksum of every tensor by the engine's own name."""
        ...

    async def label(self, version: PolicyVersion) -> None:
        """Report tokens chosen from now on as chosen by ``version``."""
        ...

    async def resume(self) -> None:
        """Continue generating."""
        ...

    async def pause_for_update(self) -> int:
        """Pause and open an update; return how many generations are in flight."""
        ...

    async def finish_update(self, version: PolicyVersion, *, digest: str) -> Mapping[str, str]:
        """Close an update, compare, label and resume; without a digest nothing is compared.

        An engine whose checksums have another ``digest_of`` stays paused, unlabelled: these are
        returned.
        """
        ...

    async def stage_folder(self, folder: Path, version: PolicyVersion) -> Mapping[str, float]:
        """Load a folder next to the live weights, which are not touched, while it generates.

        Returns the seconds by phase, from PUBLISH_PHASES; empty if it has no room, or cannot do so.
        What ``adopt_folder`` promises of the file holds here too.
        """
        ...

    async def adopt_folder(self, folder: Path, version: PolicyVersion, *, digest: str) -> Adoption:
        """Pause, load a folder, compare, label and resume; without a digest nothing is compared.

        A version that is staged is compared before the pause. An engine whose live weights have
        another ``digest_of`` stays paused, unlabelled. So does one
        that fails, unless it had not begun to load or had the label already: then it generates. The
        file may be overwritten while it is loaded, which is a failure: ``mapped_file.watched``.
        """
        ...
