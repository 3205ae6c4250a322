"""Pure: the scenario that a run's settings describe on given hardware."""

from dataclasses import dataclass, field

from slipstream.broker.ledger.throttle import StalenessTarget
from slipstream.deploy.config import RunConfig
from slipstream.deploy.predict.laws.engine_law import EngineLaw, engine_law
from slipstream.deploy.predict.laws.gpus import Cluster
from slipstream.deploy.predict.laws.learner_law import LearnerLaw, PublishLaw
from slipstream.deploy.predict.laws.publishes import publish_cost
from slipstream.deploy.predict.memory.gpu import static_share
from slipstream.deploy.predict.simulate.lengths import Lengths
from slipstream.deploy.predict.simulate.scenario import Faults, Scenario
from slipstream.generators.config import GeneratorsSection
from slipstream.wire.errors import ConfigError
from slipstream.wire.models.hf_config import HfConfig

_WEIGHT_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Imagined hardware of a run."""

    cluster: Cluster
    engines: int
    gpus_per_engine: int
    learner_gpus: int
    step_s: float = 5.0  # constant seconds of a learner step


@dataclass(frozen=True, slots=True, kw_only=True)
class Imagined:
    """Properties of a run that its settings do not state."""

    lengths: Lengths  # distribution for the responses
    prompt_tokens: int  # length of each prompt
    passes: float = 1.0  # passes of the learner over a batch (``LearnerLaw.of``)
    steps: int | None = None  # learner steps; None is run.steps
    publish_every: int = 1  # learner steps
    score_s: float = 0.0  # from an answer to its reward
    useless_share: float = 0.0  # share of groups with all rewards equal, which are dropped
    kl_per_lag: float = 0.0  # mismatch_kl of a token over the square of its staleness
    faults: Faults = field(default_factory=Faults)
    seed: int = 0  # seed of all draws


def scenario_of(
    config: RunConfig, hf: HfConfig, hardware: Hardware, imagined: Imagined
) -> Scenario:
    """Return the scenario of a run.

    Args:
        config: The run's settings.
        hf: the policy's architecture.
        hardware: Imagined hardware.
        imagined: Other imagined properties.

    Raises:
        ConfigError: an engine does not hold the model, or numbers contradict each other.
    """
    run, generators = config.run, config.generators.generators
    cluster, target = hardware.cluster, run.staleness_target
    if target.mismatch_kl is not None and not imagined.kl_per_lag:
        raise ConfigError(
            "run.staleness_target.mismatch_kl: a simulation computes no policy; say with "
            "--kl-per-lag how many nats a token of staleness 1 has"
        )
    cost = publish_cost(
        _WEIGHT_BYTES * hf.num_parameters,
        cluster,
        learner_gpus=hardware.learner_gpus,
        engines=hardware.engines,
        engine_ranks=hardware.gpus_per_engine,
        fanout=config.learner.weightbus.fanout,
    )
    return Scenario(
        steps=run.steps if imagined.steps is None else imagined.steps,
        groups_per_step=run.groups_per_step,
        group_size=run.group_size,
        max_staleness_steps=run.staleness_bound,
        max_in_flight=config.broker.broker.max_in_flight,
        siblings_together=generators.siblings_together,
        staleness_mode=run.staleness_mode,
        prefetch=config.learner.learner.prefetch,
        publish_every=imagined.publish_every,
        score_s=imagined.score_s,
        useless_share=imagined.useless_share,
        kl_per_lag=imagined.kl_per_lag,
        engines=hardware.engines,
        max_sequences=generators.max_sequences,
        engine=_engine_law(hf, hardware, generators),
        learner=LearnerLaw.of(
            hf,
            cluster.gpu,
            num_gpus=hardware.learner_gpus,
            mfu=cluster.learner_share,
            step_s=hardware.step_s,
            passes=imagined.passes,
        ),
        publish=PublishLaw.of(cost),
        lengths=imagined.lengths,
        prompt_tokens=imagined.prompt_tokens,
        faults=imagined.faults,
        target=StalenessTarget(target.mismatch_kl, target.p95_lag) if target.is_set else None,
        seed=imagined.seed,
    )


def _engine_law(hf: HfConfig, hardware: Hardware, generators: GeneratorsSection) -> EngineLaw:
    """Return the law of an engine.

    Raises:
        ConfigError: The GPUs of an engine do not hold the model.
    """
    try:
        return engine_law(
            hf,
            hardware.cluster,
            ranks=hardware.gpus_per_engine,
            attention_groups=generators.attention_groups,
            memory_share=static_share(generators),
        )
    except ValueError as error:
        raise ConfigError(f"{error} (--gpus-per-engine)") from error
