"""The relay's commands, carried out at an engine that holds several versions at once.

Nothing is paused, and no failure tears an engine: a version that is loaded and not adopted is used
by no request.
"""

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from typing_extensions import override

from slipstream.weightbus.agent.engine import Adoption, EngineWeights
from slipstream.weightbus.agent.updates import EngineUpdates
from slipstream.weightbus.version.engine_checksums import digest_of
from slipstream.wire.errors import EngineError
from slipstream.wire.messages.manifest import WeightManifest
from slipstream.wire.messages.versions import PolicyVersion

_log = logging.getLogger(__name__)


class EngineAdapters(EngineWeights, Protocol):
    """Control over the adapters of a running engine. Methods raise EngineError on failure."""

    @property
    def num_answering(self) -> int:
        """Answers in flight."""
        ...

    async def load_adapter(self, received: Path, version: PolicyVersion) -> None:
        """Load one more version, from the safetensors file in a folder."""
        ...

    async def drop_adapter(self, version: PolicyVersion) -> None:
        """Unload a version that is not adopted."""
        ...


class AdapterUpdates(EngineUpdates):
    """Versions of one engine, and the publish that it takes part in."""

    def __init__(self, engine: EngineAdapters, **others: Any) -> None:  # noqa: ANN401 its own
        super().__init__(engine, **others)
        self._adapters = engine

    @override
    def _offer(self, manifest: WeightManifest) -> None:
        super()._offer(manifest)
        self._is_torn = False

    @override
    async def _stage(self, received: Path) -> Mapping[str, float]:
        """Do nothing: what ``_swap`` loads is next to the adapter that is used."""
        return {}

    @override
    async def _swap(self, received: Path, version: PolicyVersion, digest: str) -> Adoption:
        """Load one more version and answer under it from now on."""
        began_s = time.monotonic()
        await self._adapters.load_adapter(received, version)
        self._is_torn = True  # there is a version to adopt, or to drop
        loaded_s = time.monotonic()
        checksums = await self._adapters.checksums() if digest else {}
        seconds = {"load": loaded_s - began_s, "verify": time.monotonic() - loaded_s}
        num_answering = self._adapters.num_answering
        if digest and digest_of(checksums) != digest:
            return Adoption(num_answering, seconds, checksums)
        await self._adapters.label(version)
        return Adoption(num_answering, seconds)

    @override
    async def abandon(self, why: str) -> None:
        """Drop what was loaded in a failed publish."""
        if not self._is_torn:
            return
        _log.warning("publish abandoned: %s", why)
        self._is_torn = False
        try:
            await self._adapters.drop_adapter(self._offered.version)
        except EngineError as error:
            _log.warning("a version that is not used stays in the engine: %s", error)
