"""A running SGLang server whose versions are adapters, several at a time (sglang 0.5.23).

Every request names its version, and a loaded version never changes: nothing is paused, and an
answer has one version. By itself SGLang would load an unloaded adapter again on request, from the
folder where it was read. A version's folder is gone by then, so SGLang cannot.
"""

import asyncio
import logging
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from typing_extensions import override

from slipstream.generators.engine import Completion, SamplingParams, Scores
from slipstream.generators.sglang.adapter_versions import AdapterVersions
from slipstream.generators.sglang.engine import SglangEngine, completion_of, scores_of
from slipstream.wire.errors import EngineError
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.models.adapters import CONFIG, TENSORS, AdapterFacts, adapter_config
from slipstream.wire.models.model_files import WEIGHTS

_log = logging.getLogger(__name__)
Checksums = dict[str, str]


class AdapterEngine(SglangEngine):
    """HTTP client of one server that was started for adapters."""

    def __init__(
        self,
        url: str,
        api_key: str,
        *,
        facts: AdapterFacts,
        kept: int,
        folder: Path,
        tenant: str = "",
        **options: Any,  # noqa: ANN401 options of a server without adapters
    ) -> None:
        """Connect to a server that has no version yet.

        The newest ``kept`` versions stay loaded. The server reads them from a ``folder``. Several
        tenants' clients may share a server; each knows the versions of its ``tenant`` alone.
        """
        super().__init__(url, api_key, **options)
        self._facts = facts
        self._folder = folder
        self._folders: list[Path] = []  # those that a rank may yet read
        self._tenant = tenant
        self._versions = AdapterVersions(kept)
        self._checksums: dict[PolicyVersion, Checksums] = {}  # taken when they were loaded
        self._tidying: asyncio.Task[None] | None = None

    @override
    async def close(self) -> None:
        if self._tidying is not None:
            self._tidying.cancel()
            await asyncio.gather(self._tidying, return_exceptions=True)
        if self._tenant:  # others use the server on
            for version in self._versions.loaded:
                with suppress(EngineError):
                    await self.drop_adapter(version)
        await super().close()

    def _name(self, version: PolicyVersion) -> str:
        """Return the server's name of a version."""
        return f"{self._tenant}.{version.label}" if self._tenant else version.label

    @property
    def num_answering(self) -> int:
        """Answers in flight."""
        return self._num_in_flight

    @property
    def versions(self) -> tuple[PolicyVersion, ...]:
        """All loaded versions."""
        return self._versions.loaded

    @override
    async def sample(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        count: int,
        seeds: Sequence[int] = (),
    ) -> list[Completion]:
        """Return ``count`` responses under the newest version."""
        version = self._versions.newest
        if version is None:
            raise EngineError("the engine has adopted no version yet")
        question = self._question(prompt_ids, params, count=count, seeds=seeds)
        try:
            with self._versions.used(version, count):
                answers = await self._answers(question | {"lora_path": self._name(version)}, count)
        finally:
            self._tidy_soon()
        return [completion_of(answer, params, len(prompt_ids), version) for answer in answers]

    @override
    async def score(self, sequences: Sequence[Sequence[int]], *, num_context: int) -> Scores:
        """Return logprobs under the newest version."""
        version = self._versions.newest
        if version is None:
            raise EngineError("the engine has adopted no version yet")
        body = self._scoring(sequences, num_context) | {"lora_path": self._name(version)}
        try:
            with self._versions.used(version, len(sequences)):
                answers = await self._scores(body)
        finally:
            self._tidy_soon()
        return scores_of(answers, sequences, num_context, version)

    # ---- versions ------------------------------------------------------------

    async def load_adapter(self, received: Path, version: PolicyVersion) -> None:
        """Load one more version, from the safetensors file in a folder.

        The server gets a copy: it maps the file as long as it has the version, and the agent will
        receive the next version into the same memory.
        """
        if version in self._versions.loaded:  # loaded earlier, but not adopted
            await self.drop_adapter(version)
        own = self._folder / self._name(version)
        await _remove([own])
        await asyncio.to_thread(self.write_folder, received, own)
        try:
            await self._control(
                "/load_lora_adapter",
                {"lora_name": self._name(version), "lora_path": str(own)},
                self._load_timeout,
            )
        finally:
            self._folders.append(own)
        self._versions.load(version)

    def write_folder(self, received: Path, own: Path) -> None:
        """Write a version for SGLang: its description, and a copy of the received file."""
        try:
            own.mkdir(parents=True, mode=0o700)
            (own / CONFIG).write_bytes(adapter_config(self._facts, ""))
            shutil.copyfile(received / WEIGHTS, own / TENSORS)
        except OSError as error:
            raise EngineError(f"no room for an adapter in {self._folder}: {error}") from error

    async def drop_adapter(self, version: PolicyVersion) -> None:
        """Unload a version once the answers under it have ended."""
        await self._control("/unload_lora_adapter", {"lora_name": self._name(version)})
        self._versions.drop(version)
        self._checksums.pop(version, None)

    @override
    async def checksums(self) -> Checksums:
        """Return the checksum of every tensor of the version that was loaded last.

        Raises:
            EngineError: a version that was loaded earlier has changed.
        """
        found: dict[str, Checksums] = {self._name(version): {} for version in self._versions.loaded}
        # The first rank answers when it has read a folder, others later; checksums come from all.
        read, self._folders = self._folders, []
        of_engine = await super().checksums()
        await _remove(read)
        for name, checksum in of_engine.items():
            label, _, tensor = name.partition("/")
            if label in found:  # else it is being unloaded
                found[label][tensor] = checksum
        *before, last = self._versions.staying
        for version in before:
            name = self._name(version)
            known = self._checksums.setdefault(version, found[name])
            if found[name] != known:
                raise EngineError(f"{name} in the engine is not what was loaded")
        self._checksums[last] = found[self._name(last)]
        return self._checksums[last]

    @override
    async def label(self, version: PolicyVersion) -> None:
        """Answer requests from now on under a loaded version."""
        self._versions.adopt(version)
        self._tidy_soon()

    def _tidy_soon(self) -> None:
        if self._versions.unneeded() and (self._tidying is None or self._tidying.done()):
            self._tidying = asyncio.create_task(self._tidy())

    async def _tidy(self) -> None:
        """Unload versions that are not needed any more; a failure is tried again later."""
        while unneeded := self._versions.unneeded():
            try:
                await self.drop_adapter(unneeded[0])
            except EngineError as error:
                _log.warning("%s stays in the engine: %s", unneeded[0].label, error)
                return

    @override
    async def resume(self) -> None:
        """Do nothing: the engine was not paused."""


async def _remove(folders: Sequence[Path]) -> None:
    for folder in folders:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
