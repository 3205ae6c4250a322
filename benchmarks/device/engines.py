"""A real engine on this machine's device, as a stage needs it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import torch

from slipstream.generators.config import generator_settings
from slipstream.generators.sglang.engine import SglangEngine
from slipstream.generators.sglang.process import SglangProcess
from slipstream.generators.sglang.running import running_engine
from tests.support.blank_model import write_blank_model
from tests.support.random_llama import write_random_weights

# An engine on a GPU that it shares, and that starts soon.
SMALL: dict[str, str | int | float | bool] = {
    "disable_cuda_graph": True,
    "mem_fraction_static": 0.5,
    "max_total_tokens": 16384,
}


def has_cuda() -> bool:
    return torch.cuda.is_available()


def device_name() -> Literal["cpu", "cuda"]:
    return "cuda" if has_cuda() else "cpu"


def engine_dtype() -> torch.dtype:
    return torch.bfloat16 if has_cuda() else torch.float32


def write_model(folder: Path, *, seed: int, hidden: int | None = None) -> Path:
    """Write a random small Llama; on a GPU its heads have the 64 channels that kernels expect."""
    hidden = hidden or (256 if has_cuda() else 64)
    write_blank_model(folder, hidden=hidden, layers=2)
    write_random_weights(folder, scale=0.08 if hidden == 256 else 0.2, seed=seed)
    return folder


@asynccontextmanager
async def engine_of(
    model: Path,
    folder: Path,
    name: str,
    *,
    longest: int = 456,
    mode: Literal["retract", "in_place"] = "retract",
    overlaps: bool = False,
    graphs: bool = False,
    start_s: float,
) -> AsyncIterator[tuple[SglangProcess, SglangEngine]]:
    """Start a server and yield it with its client once it answers.

    ``graphs``: its decoding is recorded as CUDA graphs; nothing on a CPU.
    """
    flags = dict(SMALL) if has_cuda() else {}
    if graphs and flags.pop("disable_cuda_graph", False):
        flags |= {"cuda_graph_backend_prefill": "disabled", "cuda_graph_max_bs_decode": 8}
    flags["disable_overlap_schedule"] = not overlaps
    settings = generator_settings(
        {
            "run": {"name": name, "dir": str(folder), "model": str(model), "group_size": 2},
            "sampling": {"max_prompt_tokens": 16, "max_response_tokens": longest - 16},
            "generators": {
                "device": device_name(),
                "max_cached_tokens": 8192,
                "max_sequences": 8,
                "start_timeout_s": start_s,
                "sglang": flags,
            },
            "weightbus": {"in_flight": mode},
        }
    )
    never: asyncio.Task[object] = asyncio.create_task(asyncio.Event().wait())
    try:
        async with running_engine(settings, name, never) as started:
            if started is None:
                raise RuntimeError("the engine did not start")
            yield started
    finally:
        never.cancel()
