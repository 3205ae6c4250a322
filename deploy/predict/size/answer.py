"""The complete answer of `slipstream plan`: memory, layouts, a publish, a split, with laws."""

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from slipstream.deploy.predict.laws.engine_law import engine_law
from slipstream.deploy.predict.laws.figure import Figure
from slipstream.deploy.predict.laws.learner_step import step_figures
from slipstream.deploy.predict.laws.publish_cost import Cost
from slipstream.deploy.predict.laws.publishes import publish_cost, version_bytes
from slipstream.deploy.predict.memory.gpu import GIB, learner_memory, shadow_bytes, static_share
from slipstream.deploy.predict.memory.learner_rank import MemoryPart
from slipstream.deploy.predict.size.engines import EngineSize, engine_size, larger_engines
from slipstream.deploy.predict.size.pools import (
    Demand,
    Split,
    SplitForecast,
    best_splits,
    closed_form,
)
from slipstream.deploy.predict.size.proposals import PlanRequest, Proposal, gpu_counts, proposals
from slipstream.weightbus.config import WeightBusSection
from slipstream.wire.errors import ConfigError
from slipstream.wire.models.flops import num_multiplied_parameters
from slipstream.wire.models.fp8 import bytes_per_parameter
from slipstream.wire.models.hf_config import HfConfig

_MOST_BOUND = 8  # largest staleness bound to try


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """Complete answer."""

    parameters: Sequence[Figure]
    learner_memory: Sequence[MemoryPart]  # current settings
    learner_step: Sequence[Figure]  # seconds of their step
    engine: EngineSize
    engine_is_given: bool  # True if the settings' engine fits; else it is the next larger one
    fewest_gpus: int  # fewest GPUs of the learner
    layouts: Sequence[Proposal]
    publishes: dict[str, Cost]  # publishes of the best split
    splits: Sequence[SplitForecast]


def answer(asked: PlanRequest) -> RunPlan:
    """Return the answer.

    Raises:
        ConfigError: no layout and engine fit on this many GPUs, or no engine holds the model.
    """
    ranks = asked.config.generators.generators.num_ranks
    engine = engine_size(asked.hf, asked.config, asked.cluster, asked.gpus, fewest_gpus=ranks)
    if asked.gpus <= engine.ranks:
        raise ConfigError(
            f"--gpus is {asked.gpus}: one engine takes {engine.ranks} "
            f"(generators.sglang.tp_size), expected one more for the learner at least"
        )
    most = asked.gpus - engine.ranks
    counts = gpu_counts(most, asked.cluster.gpus_per_host)
    by_count = {count: proposals(asked, count) for count in counts}
    layouts = [layout for fitting in by_count.values() for layout in fitting]
    if not layouts:
        raise ConfigError(
            f"--gpus is {asked.gpus}: no layout of the learner fits on up to {most} GPUs of "
            f"{asked.cluster.gpu.memory_gib:g} GiB (--gpu) beside an engine of {engine.ranks}; "
            "expected more GPUs, larger ones, or a smaller learner.max_tokens_per_microbatch"
        )
    engines = [engine, *larger_engines(asked.hf, asked.config, asked.cluster, engine)]
    splits = _splits(asked, engines, [fitting[0] for fitting in by_count.values() if fitting])
    best, bus = splits[0].split, asked.config.learner.weightbus
    return RunPlan(
        parameters=_parameters(asked.hf, asked.config.learner.weightbus),
        learner_memory=learner_memory(
            asked.hf, asked.config.learner, frozen=asked.frozen, has_critic=asked.has_critic
        ),
        learner_step=step_figures(asked.hf, asked.config.learner, asked.work, asked.cluster),
        engine=engine,
        engine_is_given=engine.ranks == ranks,
        fewest_gpus=min(layout.gpus for layout in layouts),
        layouts=layouts,
        publishes={
            "star": _publish(asked, best, replace(bus, fanout=0)),
            "chain": _publish(asked, best, replace(bus, fanout=1, digests="auto")),
        },
        splits=splits,
    )


def _parameters(hf: HfConfig, bus: WeightBusSection) -> list[Figure]:
    shapes = "shapes of config.json's tensors"
    return [
        Figure("parameters", hf.num_parameters, "", shapes),
        Figure(
            "of which a token meets",
            num_multiplied_parameters(hf),
            "",
            "of its experts alone, and the output layer; not the embedding",
        ),
        Figure(
            f"a version, {'fp8' if bus.is_fp8 else 'bfloat16'}",
            version_bytes(hf, bus) / 1e9,
            "GB",
            f"{bytes_per_parameter(hf, is_fp8=bus.is_fp8):.3g} P",
        ),
    ]


def _publish(asked: PlanRequest, split: Split, bus: WeightBusSection) -> Cost:
    return publish_cost(
        version_bytes(asked.hf, bus),
        asked.cluster,
        learner_gpus=split.learner.gpus,
        engines=split.engines,
        engine_ranks=split.engine.ranks,
        bus=bus,
        has_shadow=shadow_bytes(split.engine.memory) > 0,
    )


def _splits(
    asked: PlanRequest, engines: Sequence[EngineSize], best: Sequence[Proposal]
) -> list[SplitForecast]:
    """Return the best outcome for each number of the learner's GPUs, fastest first."""
    run, sampling = asked.config.run, asked.config.generators.sampling
    demand = Demand(
        groups=run.groups_per_step,
        group_size=run.group_size,
        prompt_tokens=asked.prompt_tokens,
        response_tokens=asked.response_tokens,
        longest_response=sampling.max_response_tokens,
        max_sequences=asked.config.generators.generators.max_sequences,
    )
    law = closed_form(
        demand,
        lambda size: engine_law(
            asked.hf,
            asked.cluster,
            ranks=size.ranks,
            attention_groups=size.groups,
            memory_share=static_share(asked.config.generators.generators)
            - shadow_bytes(size.memory) / GIB / asked.cluster.gpu.memory_gib,
            is_fp8=asked.config.generators.weightbus.is_fp8,
            cache_bytes=asked.config.generators.generators.cache_bytes,
        ),
        lambda split: _publish(asked, split, asked.config.learner.weightbus),
    )
    bounds = range(min(run.staleness_bound, _MOST_BOUND) + 1)
    splits = [
        Split(
            learner=learner,
            engines=(asked.gpus - learner.gpus) // engine.ranks,
            engine=engine,
            bound=bound,
        )
        for learner in best
        for engine in engines
        for bound in bounds
        if asked.gpus - learner.gpus >= engine.ranks
    ]
    return best_splits(splits, law, run.groups_per_step)
