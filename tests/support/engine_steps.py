"""Steps of a publish, one by one: for engines of tests, and to observe SGLang between them."""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

from slipstream.generators.sglang.engine import SglangEngine
from slipstream.weightbus.agent.engine import Adoption, EngineWeights
from slipstream.weightbus.version.engine_checksums import digest_of
from slipstream.wire.messages.versions import PolicyVersion


class EngineInSteps(ABC):
    """Carries out the orders of several steps by single methods."""

    @abstractmethod
    async def pause(self) -> int:
        """Stop generating; return how many generations are in flight."""

    @abstractmethod
    async def begin_update(self) -> None:
        """Open an update."""

    @abstractmethod
    async def end_update(self) -> None:
        """Close an update."""

    @abstractmethod
    async def load_folder(self, folder: Path) -> None:
        """Load all tensors from a folder."""

    @abstractmethod
    async def checksums(self) -> dict[str, str]:
        """Return the checksum of every tensor."""

    @abstractmethod
    async def label(self, version: PolicyVersion) -> None:
        """Report tokens from now on as chosen by a version."""

    @abstractmethod
    async def resume(self) -> None:
        """Generate again."""

    async def pause_for_update(self) -> int:
        """Pause and open an update."""
        num_in_flight = await self.pause()
        await self.begin_update()
        return num_in_flight

    async def finish_update(self, version: PolicyVersion, *, digest: str) -> Mapping[str, str]:
        """Close an update, compare, label and resume."""
        await self.end_update()
        checksums = await self.checksums() if digest else {}
        if digest and digest_of(checksums) != digest:
            return checksums
        await self.label(version)
        await self.resume()
        return {}

    async def stage_folder(self, folder: Path, version: PolicyVersion) -> Mapping[str, float]:
        """Have no room for a second copy."""
        del folder, version
        return {}

    async def adopt_folder(self, folder: Path, version: PolicyVersion, *, digest: str) -> Adoption:
        """Pause, load a folder, compare, label and resume."""
        times = [time.monotonic()]
        num_in_flight = await self.pause()
        times.append(time.monotonic())
        await self.load_folder(folder)
        times.append(time.monotonic())
        checksums = await self.checksums() if digest else {}
        times.append(time.monotonic())
        phases = dict(zip(("pause", "load", "verify"), _differences(times), strict=True))
        if digest and digest_of(checksums) != digest:
            return Adoption(num_in_flight, phases, checksums, is_paused=True)
        await self.label(version)
        await self.resume()
        return Adoption(num_in_flight, phases | {"commit": time.monotonic() - times[-1]})


def _differences(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(times)]


async def pause(engine: EngineWeights) -> int:
    """Pause an engine; return how many generations are in flight."""
    if isinstance(engine, EngineInSteps):
        return await engine.pause()
    assert isinstance(engine, SglangEngine)
    num_in_flight = engine._num_in_flight
    await engine._ordered(("pause",))
    return num_in_flight


async def load_folder(engine: EngineWeights, folder: Path) -> None:
    """Load all tensors from a folder into an engine that is paused."""
    if isinstance(engine, EngineInSteps):
        await engine.load_folder(folder)
    else:
        assert isinstance(engine, SglangEngine)
        await engine._ordered(("load",), folder=folder)
