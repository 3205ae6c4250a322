"""An SGLang server with the adapters of many tenants, the most recently used ones loaded.

A version is named by its digest, and never changes. Every request names its version. Shapes: N
tokens of a prompt or answer, k most probable tokens of each place.
"""

import asyncio
import hashlib
import logging
import math
import shutil
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from slipstream.generators.sglang.engine import SglangEngine
from slipstream.wire.errors import EngineError
from slipstream.wire.messages.commands import Sample, Sampled, SampledAnswer, Top
from slipstream.wire.models.adapters import CONFIG, TENSORS

_log = logging.getLogger(__name__)
Fetch = Callable[[str], Awaitable[tuple[bytes, bytes]]]
"""Returns adapter_config.json and adapter_model.safetensors of a version."""


class ServingEngine(SglangEngine):
    """HTTP client of one server that was started for adapters."""

    def __init__(
        self,
        url: str,
        api_key: str,
        *,
        kept: int,
        folder: Path,
        fetch: Fetch,
        **options: Any,  # noqa: ANN401 options of a server without adapters
    ) -> None:
        """Connect to a server that has no version.

        The ``kept`` most recently used versions stay loaded, and others while an answer uses them.
        ``fetch`` gets a version's files, which the server reads from a ``folder``.
        """
        super().__init__(url, api_key, **options)
        self._kept = kept
        self._folder = folder
        self._fetch = fetch
        self._uses: OrderedDict[str, int] = OrderedDict()  # answers by version, the newest use last
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._unloading = asyncio.Lock()

    @property
    def versions(self) -> tuple[str, ...]:
        """Loaded versions, the most recently used one last."""
        return tuple(self._uses)

    async def answer(self, sample: Sample) -> Sampled:
        """Return the answers to a prompt, all of them under its version.

        Raises:
            EngineError: there is no answer.
        """
        async with self._used(sample.version):
            answers = await self._answers(question_of(sample), sample.count)
        return sampled_of(answers, sample)

    @asynccontextmanager
    async def _used(self, version: str) -> AsyncIterator[None]:
        """Have a version loaded, and keep it for a block."""
        if not version:
            yield
            return
        while version not in self._uses:
            if version not in self._loading:
                self._loading[version] = asyncio.create_task(self._load(version))
            await asyncio.shield(self._loading[version])
        self._uses[version] += 1
        self._uses.move_to_end(version)
        try:
            yield
        finally:
            self._uses[version] -= 1

    async def _load(self, version: str) -> None:
        try:
            config, tensors = await self._fetch(version)
            if hashlib.sha256(config + tensors).hexdigest() != version:
                raise EngineError(f"the files of version {version} are others than it names")
            await self._make_room()
            own = self._folder / version
            await asyncio.to_thread(_write, own, config, tensors)
            try:
                body = {"lora_name": version, "lora_path": str(own)}
                await self._control("/load_lora_adapter", body, self._load_timeout)
            finally:
                await asyncio.to_thread(shutil.rmtree, own, ignore_errors=True)
            self._uses[version] = 0
        finally:
            del self._loading[version]

    async def _make_room(self) -> None:
        """Unload versions that no answer uses until there is room for one more."""
        async with self._unloading:
            unused = [version for version, count in self._uses.items() if not count]
            for version in unused[: max(0, len(self._uses) + 1 - self._kept)]:
                if self._uses.get(version):
                    continue  # it was asked for meanwhile
                del self._uses[version]
                try:
                    await self._control("/unload_lora_adapter", {"lora_name": version})
                except EngineError as error:
                    _log.warning("version %s stays in the engine: %s", version[:12], error)

    @override
    async def close(self) -> None:
        for task in self._loading.values():
            task.cancel()
        await asyncio.gather(*self._loading.values(), return_exceptions=True)
        await super().close()


def question_of(sample: Sample) -> dict[str, Any]:
    """Return the body of SGLang's request for answers."""
    ids = np.frombuffer(sample.tokens, "<i4").tolist()
    sampling: dict[str, Any] = {
        "temperature": sample.temperature,
        "max_new_tokens": sample.max_tokens,
        "top_p": sample.top_p,
        "top_k": sample.top_k,
        "ignore_eos": sample.ignores_end,
    }
    if sample.stop:
        sampling["stop"] = list(sample.stop)
    if sample.stop_ids:
        sampling["stop_token_ids"] = list(sample.stop_ids)
    seeds = [seed_of(sample.seed, number) for number in range(sample.count)]
    wants_prompt = sample.prompt_logprobs or sample.prompt_top > 0
    body: dict[str, Any] = {
        "input_ids": [ids] * sample.count,
        "sampling_params": [{**sampling, "sampling_seed": seed} for seed in seeds],
        "return_logprob": True,
        # The first answer alone has the prompt's: SGLang computes a prompt again for it.
        "logprob_start_len": [0 if wants_prompt and not n else -1 for n in range(sample.count)],
        "top_logprobs_num": [
            max(sample.sample_top, 0 if n else sample.prompt_top) for n in range(sample.count)
        ],
    }
    return body | ({"lora_path": sample.version} if sample.version else {})


def seed_of(seed: int, number: int) -> int:
    """Return the seed of one of a sample's answers, 63 bits."""
    digest = hashlib.sha256(f"{seed}/{number}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def sampled_of(answers: Sequence[Mapping[str, Any]], sample: Sample) -> Sampled:
    """Return SGLang's answers.

    Raises:
        EngineError: an answer is malformed, or reports a failure.
    """
    try:
        found = tuple(_answer(answer, sample) for answer in answers)
        info = answers[0]["meta_info"]
        prompt = top = None
        if sample.prompt_logprobs:
            rows = info["input_token_logprobs"]
            prompt = _floats([math.nan if row[0] is None else row[0] for row in rows])
        if sample.prompt_top:
            top = _top(info["input_top_logprobs"], sample.prompt_top)
        cached = info["cached_tokens"]
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise EngineError(f"SGLang /generate: unexpected answer, {error!r}") from error
    return Sampled(
        version=sample.version,
        answers=found,
        prompt_logprobs=prompt,
        prompt_top=top,
        cached_tokens=cached,
    )


def _answer(answer: Mapping[str, Any], sample: Sample) -> SampledAnswer:
    info = answer["meta_info"]
    reason, rows = info["finish_reason"]["type"], info["output_token_logprobs"]
    if reason not in {"stop", "length"}:
        raise EngineError(f"SGLang /generate ended with {info['finish_reason']}")
    if [row[1] for row in rows] != answer["output_ids"]:
        raise EngineError(f"SGLang /generate: {len(rows)} logprobs of other tokens")
    top = _top(info["output_top_logprobs"], sample.sample_top) if sample.sample_top else None
    return SampledAnswer(
        tokens=np.array(answer["output_ids"], "<i4").tobytes(),
        logprobs=_floats([row[0] for row in rows]),
        finish="stop" if reason == "stop" else "length",
        top=top,
    )


def _top(places: Sequence[Sequence[Sequence[Any]] | None], count: int) -> Top:
    """Return the most probable tokens of each place; -1 and NaN where there are none."""
    ids = np.full((len(places), count), -1, "<i4")
    logprobs = np.full((len(places), count), np.nan, "<f4")
    for number, place in enumerate(places):
        for column, (logprob, token, *_) in enumerate((place or ())[:count]):
            ids[number, column], logprobs[number, column] = token, logprob
    return Top(k=count, ids=ids.tobytes(), logprobs=logprobs.tobytes())


def _floats(values: Sequence[float]) -> bytes:
    return np.array(values, "<f4").tobytes()


def _write(folder: Path, config: bytes, tensors: bytes) -> None:
    try:
        folder.mkdir(parents=True, mode=0o700)
        (folder / CONFIG).write_bytes(config)
        (folder / TENSORS).write_bytes(tensors)
    except OSError as error:
        raise EngineError(f"no room for an adapter in {folder}: {error}") from error
