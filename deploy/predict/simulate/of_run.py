"""Pure: the scenario that a run's settings describe on given hardware."""

from dataclasses import dataclass

from slipstream.broker.ledger.throttle import StalenessTarget
from slipstream.deploy.config import RunConfig
from slipstream.deploy.predict.laws.engine_law import EngineLaw, engine_law
from slipstream.deploy.predict.laws.gpus import Cluster
from slipstream.deploy.predict.laws.learner_law import LearnerLaw, PublishLaw
from slipstream.deploy.predict.laws.publishes import publish_cost, version_bytes
from slipstream.deploy.predict.memory.gpu import static_share
from slipstream.deploy.predict.simulate.lengths import Lengths
from slipstream.deploy.predict.simulate.scenario import Scenario
from slipstream.wire.errors import ConfigError
from slipstream.wire.models.hf_config import HfConfig

_STEP_S = 5.0  # constant seconds of a learner step


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Imagined hardware of a run."""

    cluster: Cluster
    engines: int
    gpus_per_engine: int
    learner_gpus: int


def scenario_of(
    config: RunConfig,
    hf: HfConfig,
    hardware: Hardware,
    *,
    lengths: Lengths,
    prompt_tokens: int,
    passes: float,
) -> Scenario:
    """Return the scenario of a run, without anything that its settings do not state.

    Args:
        config: The run's settings.
        hf: the policy's architecture.
        hardware: Imagined hardware.
        lengths: Distribution of the lengths of responses.
        prompt_tokens: Length of each prompt.
        passes: Passes of the learner over a batch (``LearnerLaw.of``).

    Raises:
        ConfigError: an engine does not hold the model, or numbers contradict each other.
    """
    run, generators = config.run, config.generators.generators
    cluster, target = hardware.cluster, run.staleness_target
    cost = publish_cost(
        version_bytes(hf, config.learner.weightbus),
        cluster,
        learner_gpus=hardware.learner_gpus,
        engines=hardware.engines,
        engine_ranks=hardware.gpus_per_engine,
        bus=config.learner.weightbus,
    )
    return Scenario(
        steps=run.steps,
        groups_per_step=run.groups_per_step,
        group_size=run.group_size,
        max_staleness_steps=run.staleness_bound,
        max_in_flight=config.broker.broker.max_in_flight,
        siblings_together=generators.siblings_together,
        staleness_mode=run.staleness_mode,
        prefetch=config.learner.learner.prefetch,
        engines=hardware.engines,
        max_sequences=generators.max_sequences,
        engine=_engine_law(hf, hardware, config),
        learner=LearnerLaw.of(
            hf,
            cluster.gpu,
            num_gpus=hardware.learner_gpus,
            mfu=cluster.learner_share,
            step_s=_STEP_S,
            passes=passes,
        ),
        publish=PublishLaw.of(cost),
        lengths=lengths,
        prompt_tokens=prompt_tokens,
        target=StalenessTarget(target.mismatch_kl, target.p95_lag) if target.is_set else None,
    )


def _engine_law(hf: HfConfig, hardware: Hardware, config: RunConfig) -> EngineLaw:
    """Return the law of an engine.

    Raises:
        ConfigError: The GPUs of an engine do not hold the model.
    """
    generators = config.generators.generators
    try:
        return engine_law(
            hf,
            hardware.cluster,
            ranks=hardware.gpus_per_engine,
            attention_groups=generators.attention_groups,
            memory_share=static_share(generators),
            is_fp8=config.generators.weightbus.is_fp8,
            cache_bytes=generators.cache_bytes,
        )
    except ValueError as error:
        raise ConfigError(f"{error} (--gpus-per-engine)") from error
