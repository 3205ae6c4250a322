"""An engine without weights or torch: its tokens follow from the seed, its time from a clock.

For unit tests, chaos runs and simulations of many generators. It keeps the promises of a real
engine (tests/contract/test_engines.py): versions change in mid-answer, a pause holds every answer,
a seed decides an answer under one version, cancelling ends the work, an answer that no longer fits
into the cache is retracted and resumes later.
"""

import asyncio
import math
import random
from collections.abc import Sequence
from pathlib import Path

from slipstream.generators.engine import Completion, EngineLoad, SamplingParams
from slipstream.weightbus.agent.weight_files import check_weight_files
from slipstream.wire.errors import EngineError
from slipstream.wire.messages.manifest import Bucket
from slipstream.wire.messages.versions import PolicyVersion
from tests.support.engine_steps import EngineInSteps

_CHUNK = 8  # tokens between two readings of the clock


class ScriptedEngine(EngineInSteps):
    """Answers of random length; about one in ten is ten times as long as the others."""

    def __init__(
        self,
        *,
        vocabulary: int,
        end_token_id: int,
        mean_tokens: float = 16.0,
        tokens_per_second: float = math.inf,
        cached_tokens: int = 1 << 20,
    ) -> None:
        """Script an engine.

        Args:
            vocabulary: token ids are 0 .. vocabulary - 1.
            end_token_id: ends an answer, before ``max_new_tokens`` do.
            mean_tokens: of nine answers in ten.
            tokens_per_second: of each answer, however many there are at a time.
            cached_tokens: of prompts and answers together; an answer without room waits for it.
        """
        self._vocabulary = vocabulary
        self._end_token_id = end_token_id
        self._mean_tokens = mean_tokens
        self._tokens_per_second = tokens_per_second
        self._version = PolicyVersion(0, 0)
        self._runs = asyncio.Event()
        self._runs.set()
        self._num_in_flight = 0
        self._cached_tokens = cached_tokens
        self._held: dict[object, int] = {}  # tokens in the cache, by answer
        self._freed = asyncio.Event()
        self._num_retractions = 0
        self._unseeded = random.Random(0)

    async def sample(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        count: int,
        seeds: Sequence[int] = (),
    ) -> list[Completion]:
        """Return ``count`` answers, each from its seed, when all are finished."""
        chosen = list(seeds) or [self._unseeded.getrandbits(63) for _ in range(count)]
        if params.temperature == 0.0:
            chosen = [0] * count
        self._num_in_flight += count
        answers = [asyncio.create_task(self._cached(prompt_ids, params, seed)) for seed in chosen]
        try:
            return list(await asyncio.gather(*answers))
        finally:
            self._num_in_flight -= count
            for answer in answers:  # one without an answer ends the others
                answer.cancel()

    def end_session(self, session: str) -> None:
        """Do nothing: no prefix is kept."""

    async def load(self) -> EngineLoad:
        """Return what the engine is busy with."""
        return EngineLoad(
            num_running=len(self._held),
            num_waiting=self._num_in_flight - len(self._held),
            used_tokens=sum(self._held.values()),
            capacity_tokens=self._cached_tokens,
            num_retractions=self._num_retractions,
        )

    async def _cached(self, prompt_ids: list[int], params: SamplingParams, seed: int) -> Completion:
        key = object()
        try:
            return await self._answer(key, prompt_ids, params, seed)
        finally:
            self._give_up(key)

    async def _hold(self, key: object, num_tokens: int) -> None:
        """Have an answer's tokens in the cache; where they do not fit it waits with none."""
        while True:
            others = sum(self._held.values()) - self._held.get(key, 0)
            if others + num_tokens <= self._cached_tokens:
                self._held[key] = num_tokens
                return
            if others == 0:
                raise EngineError(
                    f"an answer of {num_tokens} tokens does not fit into a cache of "
                    f"{self._cached_tokens}"
                )
            self._num_retractions += self._give_up(key)
            self._freed.clear()
            await self._freed.wait()

    def _give_up(self, key: object) -> bool:
        """Forget an answer's tokens; return whether it had any."""
        self._freed.set()
        return self._held.pop(key, 0) > 0

    async def _answer(
        self, key: object, prompt_ids: list[int], params: SamplingParams, seed: int
    ) -> Completion:
        seen = [image.span for image in params.images]
        rng = random.Random(f"{prompt_ids} {seen} {seed}")
        length = 1 + int(rng.expovariate(1.0 / self._mean_tokens))
        if rng.random() < 0.1:
            length *= 10
        length = max(length, params.min_new_tokens + 1)
        ids: list[int] = []
        starts: list[tuple[int, PolicyVersion]] = []
        while len(ids) < min(length, params.max_new_tokens):
            chunk = min(_CHUNK, length - len(ids), params.max_new_tokens - len(ids))
            await self._hold(key, len(prompt_ids) + len(ids) + chunk)
            await self._runs.wait()
            if not starts or starts[-1][1] != self._version:
                starts.append((len(ids), self._version))
            ids += [self._token(rng) for _ in range(chunk)]
            if math.isfinite(self._tokens_per_second):
                await asyncio.sleep(chunk / self._tokens_per_second)
        stops = length <= params.max_new_tokens
        if stops:
            ids[-1] = self._end_token_id
        others = min(params.max_kept, self._vocabulary) - 1
        kept = [[(token + i) % self._vocabulary for i in range(others + 1)] for token in ids]
        return Completion(
            token_ids=ids,
            logprobs=[-math.log(others + 1 if params.max_kept else self._vocabulary)] * len(ids),
            kept=kept if params.max_kept else None,
            version_starts=starts,
            finish_reason="stop" if stops else "length",
        )

    def _token(self, rng: random.Random) -> int:
        token = rng.randrange(self._vocabulary - 1)
        return token + (token >= self._end_token_id)

    # ---- weights, of which there are none ------------------------------------

    async def open_group(
        self, *, host: str, port: int, group_name: str, rank: int, world_size: int, backend: str
    ) -> None:
        """Do nothing."""

    async def close_group(self, group_name: str) -> None:
        """Do nothing."""

    async def pause(self) -> int:
        """Hold every answer; return how many there are."""
        self._runs.clear()
        return self._num_in_flight

    async def begin_update(self) -> None:
        """Do nothing."""

    async def load_bucket(self, bucket: Bucket, *, group_name: str, last: bool) -> None:
        """Do nothing."""

    async def end_update(self) -> None:
        """Do nothing."""

    async def load_folder(self, folder: Path) -> None:
        """Check that the folder holds whole safetensors files."""
        await asyncio.to_thread(check_weight_files, folder)

    async def checksums(self) -> dict[str, str]:
        """Return the checksums of no tensors."""
        return {}

    async def label(self, version: PolicyVersion) -> None:
        """Report tokens from now on as chosen by ``version``."""
        self._version = version

    async def resume(self) -> None:
        """Resume every answer."""
        self._runs.set()
