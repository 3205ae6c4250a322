"""The planner beside what is published and what is measured: bars of `benchmarks.bench_scale`.

Published are memory and fewest GPUs of verl's recipes (recipes.toml beside this file); measured
are, on this host's CPU, tensors of a learner's ranks, the growth of a process, and an engine's
cache.
"""

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from benchmarks.scale.recipes import GB, Recipe, Recipes, fewest_gpus, memory_of, recipes
from benchmarks.sglang_server import sglang_server
from slipstream.deploy.commands.plan.memory import RSS, MeasuredRank, measured
from slipstream.deploy.config import run_config
from slipstream.deploy.predict.memory.gpu import kv_bytes_per_token
from slipstream.deploy.predict.memory.learner_rank import TENSORS
from slipstream.generators.config import GeneratorSettings, generator_settings
from slipstream.wire.models.hf_config import load_hf_config
from slipstream.wire.settings.load import load_table
from tests.e2e.hosts import toml_of
from tests.support.blank_model import write_blank_model
from tests.support.random_llama import write_random_weights
from tests.support.tiny_models import write_tiny_model

MOST_OFF = 10.0  # per cent
CACHED_TOKENS = 2_000_000  # enough for a cache whose size SGLang tells in four digits
_LARGE: dict[str, object] = {"vocab_size": 300_000, "tie_word_embeddings": False}  # 614 MB
_FLOAT32 = 4
# Family, settings of [learner], changes of config.json.
LAYOUTS: dict[str, tuple[str, dict[str, object], dict[str, object]]] = {
    "dense, 1 rank": ("llama", {}, _LARGE),
    "dense, 2 ranks": ("qwen3", {"ranks": 2}, {}),
    "experts, 2 ranks": ("qwen3_moe", {"ranks": 2, "expert_parallel": 2}, {}),
}


class Bar(NamedTuple):
    """A figure that must be at most ``need``."""

    name: str
    value: float
    unit: str
    need: float


def planner_bars() -> list[Bar]:
    """Return all bars; about two minutes, most of them for starting processes."""
    return [*published_bars(), *learner_bars(), cache_bar()]


def published_bars() -> list[Bar]:
    """Return how far predictions are from what verl publishes; nothing is measured."""
    given = recipes()
    return [bar for recipe in given.recipes for bar in _of_recipe(recipe, given)]


def _of_recipe(recipe: Recipe, given: Recipes) -> list[Bar]:
    memory, name = memory_of(recipe, given), recipe.model
    fewest = abs(fewest_gpus(recipe, given) - recipe.published_gpus)
    bars = [Bar(f"{name}: fewest GPUs, off the published", fewest, "GPUs", 0)]
    for what, predicted, published in (
        ("memory of a GPU", memory.gpu, recipe.published_gpu_gb),
        ("memory of a host", memory.median_host, recipe.published_host_gb),
        ("memory of the largest host", memory.largest_host, recipe.published_largest_host_gb),
    ):
        if published is not None:
            off = percent_off(predicted, published * GB)
            bars.append(Bar(f"{name}: {what}, off the published", off, "%", MOST_OFF))
    return bars


def percent_off(value: float, expected: float) -> float:
    """Return how far a value is from what is expected, in per cent."""
    return abs(value / expected - 1) * 100


def learner_bars() -> list[Bar]:
    """Return how far real ranks are from the plan."""
    bars = []
    for name, (family, learner, changed) in LAYOUTS.items():
        ranks = measured_ranks(family, learner, changed)
        off = max(
            percent_off(rank.measured[kind], rank.estimated[kind])
            for rank in ranks
            for kind in TENSORS
            if rank.estimated[kind]
        )
        bars.append(Bar(f"learner's tensors, {name}: off the plan", off, "%", MOST_OFF))
        if changed is _LARGE:
            bars.append(
                Bar(f"learner's process, {name}: off the plan", growth_off(ranks[0]), "%", MOST_OFF)
            )
    return bars


def growth_off(one: MeasuredRank) -> float:
    """Return how far the growth of a rank's process is from the bytes of its tensors."""
    model = sum(one.estimated[kind] for kind in TENSORS)
    before = one.estimated[RSS] - model
    return percent_off(one.measured[RSS] - before, model)


def measured_ranks(
    family: str, learner: dict[str, object], changed: dict[str, object]
) -> list[MeasuredRank]:
    """Start the ranks of a tiny model on this CPU and return what each holds."""
    with tempfile.TemporaryDirectory(prefix="plan-") as name:
        folder = Path(name)
        model = write_tiny_model(folder / "model", family)
        path = model / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changed))
        settings = folder / "run.toml"
        (folder / "train.jsonl").write_text(json.dumps({"prompt": "1", "answer": "1"}) + "\n")
        settings.write_text(
            toml_of(
                {
                    "run.model": str(model),
                    "data.file": str(folder / "train.jsonl"),
                    "sampling.max_prompt_tokens": 16,
                    "sampling.max_response_tokens": 48,
                    "learner.max_tokens_per_microbatch": 200,
                    "generators.device": "cpu",
                    **{f"learner.{key}": value for key, value in learner.items()},
                }
            )
        )
        config = run_config(load_table(settings))
        return measured(config, load_hf_config(model), settings, [])


def cache_bar() -> Bar:
    """Return how far a real engine's cache is from the law of its bytes per token."""
    with tempfile.TemporaryDirectory(prefix="kv-") as name:
        model = Path(name) / "model"
        write_blank_model(model, hidden=64, layers=2)
        write_random_weights(model, scale=0.1, seed=3)
        settings = generator_settings(
            {
                "run": {"name": "p", "dir": name, "model": str(model)},
                "sampling": {"max_prompt_tokens": 16, "max_response_tokens": 100},
                "generators": {"device": "cpu", "max_cached_tokens": CACHED_TOKENS},
            }
        )
        found = cache_bytes(settings)
        per_token = kv_bytes_per_token(load_hf_config(model), element_bytes=_FLOAT32)
    off = percent_off(found, per_token * CACHED_TOKENS)
    return Bar("an engine's cache on the CPU: off the plan", off, "%", MOST_OFF)


def cache_bytes(settings: GeneratorSettings) -> float:
    """Start an engine and return the bytes of its cache, as SGLang tells them."""

    async def told(url: str, key: str) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {key}"}
        limit = aiohttp.ClientTimeout(total=settings.generators.start_timeout_s)
        async with (
            aiohttp.ClientSession(headers=headers, timeout=limit) as http,
            http.get(f"{url}/server_info") as response,
        ):
            return dict(await response.json())

    with sglang_server(settings) as server:
        info = asyncio.run(told(server.url, server.api_key))
    return float(info["internal_states"][0]["memory_usage"]["kvcache"]) * 2**30


if __name__ == "__main__":
    for bar in planner_bars():
        print(f"{bar.name}: {bar.value:.2f} {bar.unit} (at most {bar.need:g})", flush=True)
