"""The weight bus's interface to an inference engine."""

from pathlib import Path
from typing import Protocol

from slipstream.wire.messages.manifest import Bucket
from slipstream.wire.messages.versions import PolicyVersion


class EngineWeights(Protocol):
    """Control over the weights of a running engine. Every method raises EngineError on failure.

    Between ``pause`` and ``resume`` nothing is generated; requests in flight wait. Weights change
    in one of two ways: ``begin_update``, a ``load_bucket`` for each bucket, ``end_update``; or
    ``load_folder``. If either fails midway, the engine holds a mixture.
    """

    async def open_group(
        self, *, host: str, port: int, group_name: str, rank: int, world_size: int, backend: str
    ) -> None:
        """Join a process group with this engine's first rank as ``rank``; returns once joined."""
        ...

    async def close_group(self, group_name: str) -> None:
        """Leave a group and close an update that a failure left open; never fails."""
        ...

    async def pause(self) -> int:
        """Stop generating; return how many generations are in flight."""
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

    async def load_folder(self, folder: Path) -> None:
        """Load all tensors from the safetensors files in a folder; forget cached prefixes."""
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
