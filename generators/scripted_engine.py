"""An engine without weights or torch: its tokens follow from the seed, its time from a clock.

For unit tests, chaos runs and simulations of many generators. It keeps the promises of a real
engine (tests/contract/test_engines.py): versions change in mid-answer, a pause holds every answer,
a seed decides an answer under one version, cancelling ends the work.
"""

import asyncio
import math
import random
from collections.abc import Sequence
from pathlib import Path

from generators.engine import Completion, SamplingParams
from generators.weight_files import check_weight_files
from wire.manifest import Bucket
from wire.versions import PolicyVersion

_CHUNK = 8  # tokens between two looks at the clock


class ScriptedEngine:
    """Answers of random length; about one in ten is ten times as long as the others."""

    def __init__(
        self,
        *,
        vocabulary: int,
        end_token_id: int,
        mean_tokens: float = 16.0,
        tokens_per_second: float = math.inf,
    ) -> None:
        """Script an engine.

        Args:
            vocabulary: token ids are 0 .. vocabulary - 1.
            end_token_id: ends an answer, before ``max_new_tokens`` do.
            mean_tokens: of nine answers in ten.
            tokens_per_second: of each answer, however many there are at a time.
        """
        self._vocabulary = vocabulary
        self._end_token_id = end_token_id
        self._mean_tokens = mean_tokens
        self._tokens_per_second = tokens_per_second
        self._version = PolicyVersion(0, 0)
        self._runs = asyncio.Event()
        self._runs.set()
        self._num_in_flight = 0
        self._unseeded = random.Random(0)  # noqa: S311 a script, not a secret

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
        try:
            return list(
                await asyncio.gather(*(self._answer(prompt_ids, params, seed) for seed in chosen))
            )
        finally:
            self._num_in_flight -= count

    async def _answer(self, prompt_ids: list[int], params: SamplingParams, seed: int) -> Completion:
        rng = random.Random(f"{prompt_ids} {seed}")  # noqa: S311 a script, not a secret
        length = 1 + int(rng.expovariate(1.0 / self._mean_tokens))
        if rng.random() < 0.1:
            length *= 10
        length = max(length, params.min_new_tokens + 1)
        ids: list[int] = []
        starts: list[tuple[int, PolicyVersion]] = []
        while len(ids) < min(length, params.max_new_tokens):
            await self._runs.wait()
            chunk = min(_CHUNK, length - len(ids), params.max_new_tokens - len(ids))
            if not starts or starts[-1][1] != self._version:
                starts.append((len(ids), self._version))
            ids += [self._token(rng) for _ in range(chunk)]
            if math.isfinite(self._tokens_per_second):
                await asyncio.sleep(chunk / self._tokens_per_second)
        stops = length <= params.max_new_tokens
        if stops:
            ids[-1] = self._end_token_id
        return Completion(
            token_ids=ids,
            logprobs=[-math.log(self._vocabulary)] * len(ids),
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
        """Go on with every answer."""
        self._runs.set()
