"""Records what an engine computes for tokens: log-probabilities, and outputs of its layers."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np

from slipstream.generators.config import GeneratorSettings
from slipstream.generators.sglang.process import SglangProcess
from slipstream.wire.errors import EngineError
from slipstream.wire.models.alignment import LOGPROBS, PARTS, point

_ARRAY = np.ndarray[Any, Any]
_HOOK = "slipstream.generators.sglang.recording:recorder_of"


def recording_flags(num_layers: int, folder: Path) -> dict[str, str | int | float | bool]:
    """Return settings of [generators.sglang] with which the layers of an engine are recorded."""
    modules = {
        # Attention of hybrid models is no module of its own there: its last projection is one.
        "attention": ("self_attn", "linear_attn", "o_proj"),
        "mlp": ("mlp", "block_sparse_moe"),
        "experts": ("mlp.topk", "block_sparse_moe.topk"),
    }
    hooks = [
        {
            "name": point(layer, part),
            "target_modules": [f"model.layers.{layer}.{name}" for name in modules[part]],
            "hook_factory": _HOOK,
            "config": {
                "folder": str(folder),
                "number": layer * len(PARTS) + number,
                "experts": part == "experts",
            },
        }
        for layer in range(num_layers)
        for number, part in enumerate(PARTS)
    ]
    return {
        "forward_hooks": json.dumps(hooks),
        "disable_radix_cache": True,  # every token is computed
        "disable_cuda_graph": True,
        "chunked_prefill_size": -1,
    }


def record(
    settings: GeneratorSettings, sequences: Sequence[Sequence[int]], folder: Path
) -> dict[str, _ARRAY]:
    """Start an engine with ``recording_flags`` and return what it computes, by point.

    Args:
        settings: Settings of the engine; its layers write to ``folder``.
        sequences: Token ids.
        folder: Folder of ``recording_flags``.

    Raises:
        ConfigError: the engine does not start.
        EngineError: the engine does not answer as it should.
    """
    process = SglangProcess.start(settings, "align")
    try:
        asyncio.run(process.until_ready(settings.generators.start_timeout_s))
        for file in folder.glob("*.npy"):  # outputs of warm-up passes
            file.unlink()
        arrays = {LOGPROBS: asyncio.run(_record(process, settings, sequences))[:, None]}
    finally:
        process.stop()
    numbers = sorted({int(file.name.split(".")[0]) for file in folder.glob("*.npy")})
    for number in numbers:
        layer, part = divmod(number, len(PARTS))
        outputs = [output.reshape(len(output), -1) for output in _calls(folder, number)]
        arrays[point(layer, PARTS[part])] = np.concatenate(outputs)
    return arrays


async def _record(
    process: SglangProcess, settings: GeneratorSettings, sequences: Sequence[Sequence[int]]
) -> _ARRAY:
    """Return the log-probability of every token, [T] float32."""
    headers = {"Authorization": f"Bearer {process.api_key}"}
    timeout = aiohttp.ClientTimeout(settings.generators.request_timeout_s)
    logprobs: list[_ARRAY] = []
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as http:
        for tokens in sequences:
            process.check_alive()
            logprobs.append(await _logprobs(http, process, tokens))
    return np.concatenate(logprobs)


async def _logprobs(
    http: aiohttp.ClientSession, process: SglangProcess, tokens: Sequence[int]
) -> _ARRAY:
    """Return the log-probability of each token of a sequence, 0 for the first, [T] float32."""
    body = {
        "input_ids": list(tokens),
        "return_logprob": True,
        "logprob_start_len": 0,
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
    }
    async with http.post(f"{process.url}/generate", json=body) as response:
        data = await response.read()
        if response.status != 200:
            raise EngineError(f"SGLang /generate: {response.status} {data[:300]!r}")
    rows = msgspec.json.decode(data)["meta_info"]["input_token_logprobs"]
    return np.array([row[0] or 0.0 for row in rows], np.float32)


def _calls(folder: Path, number: int) -> list[_ARRAY]:
    """Return the outputs of a point in the order of the calls, whatever their first number is."""
    files = {int(file.name.split(".")[1]): file for file in folder.glob(f"{number}.*.npy")}
    return [np.load(files[call], allow_pickle=False) for call in sorted(files)]
