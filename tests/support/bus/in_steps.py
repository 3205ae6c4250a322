"""An engine whose calls of several steps are its other methods, one after the other."""

import time
from collections.abc import Mapping
from pathlib import Path

from slipstream.weightbus.agent.engine import Adoption, EngineWeights
from slipstream.weightbus.version.engine_checksums import digest_of
from slipstream.wire.messages.versions import PolicyVersion


class InSteps:
    """Gives a class of the other methods of ``EngineWeights`` the last three."""

    async def pause_for_update(self: EngineWeights) -> int:
        """Pause and open an update."""
        num_in_flight = await self.pause()
        await self.begin_update()
        return num_in_flight

    async def finish_update(
        self: EngineWeights, version: PolicyVersion, *, digest: str
    ) -> Mapping[str, str]:
        """Close an update, compare, label and resume."""
        await self.end_update()
        checksums = await self.checksums() if digest else {}
        if digest and digest_of(checksums) != digest:
            return checksums
        await self.label(version)
        await self.resume()
        return {}

    async def adopt_folder(
        self: EngineWeights, folder: Path, version: PolicyVersion, *, digest: str
    ) -> Adoption:
        """Pause, load, compare, label and resume."""
        seconds: dict[str, float] = {}
        since_s = time.monotonic()

        def lap(phase: str) -> None:
            nonlocal since_s
            now_s = time.monotonic()
            seconds[phase], since_s = now_s - since_s, now_s

        num_in_flight = await self.pause()
        lap("pause")
        await self.load_folder(folder)
        lap("load")
        checksums = await self.checksums() if digest else {}
        lap("verify")
        if digest and digest_of(checksums) != digest:
            return Adoption(num_in_flight, seconds, checksums)
        await self.label(version)
        await self.resume()
        lap("commit")
        return Adoption(num_in_flight, seconds)
