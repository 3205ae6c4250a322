"""Pure: the scenario that a run's settings describe on given hardware."""

from dataclasses import dataclass

from slipstream.broker.ledger.throttle import StalenessTarget
from slipstream.deploy.config import RunConfig
from slipstream.deploy.simulate.laws import EngineLaw, LearnerLaw, PublishLaw
from slipstream.deploy.simulate.lengths import Lengths
from slipstream.deploy.simulate.scenario import Faults, Scenario
from slipstream.deploy.sizing.gpus import Gpu
from slipstream.learner.model.hf_config import HfConfig
from slipstream.wire.errors import ConfigError

_WEIGHT_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What a run is imagined on; shares are of a data sheet's rates."""

    gpu: Gpu
    engines: int
    gpus_per_engine: int
    learner_gpus: int
    bandwidth_share: float = 0.6  # of the memory's, in an engine
    flops_share: float = 0.6  # of the peak, in an engine
    base_s: float = 0.005  # of a decode step, beside reading and multiplying
    mfu: float = 0.4  # of the learner
    step_s: float = 5.0  # of a learner step, whatever its tokens
    link: float = 50e9  # bytes per second into an engine's host
    to_device: float = 50e9  # bytes per second from a host's memory into one GPU


def scenario_of(
    config: RunConfig,
    hf: HfConfig,
    hardware: Hardware,
    *,
    lengths: Lengths,
    prompt_tokens: int,
    passes: float = 1.0,
    steps: int | None = None,
    faults: Faults | None = None,
    kl_per_lag: float = 0.0,
    seed: int = 0,
) -> Scenario:
    """Return the scenario of a run.

    Args:
        config: its settings.
        hf: the policy's architecture.
        hardware: what it is imagined on.
        lengths: of the responses.
        prompt_tokens: of each prompt.
        passes: of the learner over a batch (``LearnerLaw.of``).
        steps: learner steps; None is run.steps.
        faults: what goes wrong; None is nothing.
        kl_per_lag: mismatch_kl of a token over the square of its staleness.
        seed: of everything that is drawn.

    Raises:
        ConfigError: an engine does not hold the model, or numbers contradict each other.
    """
    run, generators = config.run, config.generators.generators
    target = run.staleness_target
    if target.mismatch_kl is not None and not kl_per_lag:
        raise ConfigError(
            "run.staleness_target.mismatch_kl: a simulation computes no policy; say with "
            "--kl-per-lag how many nats a token of staleness 1 has"
        )
    num_bytes = _WEIGHT_BYTES * hf.num_parameters
    try:
        engine = EngineLaw.of(
            hf,
            hardware.gpu,
            num_gpus=hardware.gpus_per_engine,
            base_s=hardware.base_s,
            bandwidth_share=hardware.bandwidth_share,
            flops_share=hardware.flops_share,
        )
    except ValueError as error:
        raise ConfigError(f"{error} (--gpus-per-engine)") from error
    return Scenario(
        steps=run.steps if steps is None else steps,
        groups_per_step=run.groups_per_step,
        group_size=run.group_size,
        max_staleness_steps=run.staleness_bound,
        max_in_flight=config.broker.broker.max_in_flight,
        staleness_mode=run.staleness_mode,
        prefetch=config.learner.learner.prefetch,
        kl_per_lag=kl_per_lag,
        engines=hardware.engines,
        max_sequences=generators.max_sequences,
        engine=engine,
        learner=LearnerLaw.of(
            hf,
            hardware.gpu,
            num_gpus=hardware.learner_gpus,
            mfu=hardware.mfu,
            step_s=hardware.step_s,
            passes=passes,
        ),
        publish=PublishLaw.of(
            num_bytes,
            from_learner=hardware.to_device * hardware.learner_gpus,
            link=hardware.link,
            to_engine=hardware.to_device * hardware.gpus_per_engine,
        ),
        lengths=lengths,
        prompt_tokens=prompt_tokens,
        faults=faults or Faults(),
        target=StalenessTarget(target.mismatch_kl, target.p95_lag) if target.is_set else None,
        seed=seed,
    )
