"""The run's algorithm, from its settings."""

from algos.compose import Algorithm
from algos.config import choice_of
from algos.parts import PartError
from learner.config import LearnerSettings
from wire.errors import ConfigError


def algorithm_of(settings: LearnerSettings) -> Algorithm:
    """Return the composed algorithm of a run.

    Raises:
        ConfigError: the settings name no algorithm, or one that this run cannot train.
    """
    try:
        choice = choice_of(settings.algo)
    except PartError as error:
        raise ConfigError(str(error)) from error
    run = settings.run
    if choice.is_group_relative and run.group_size < 2:
        raise ConfigError(
            f"run.group_size must be >= 2 for algo.advantage = {choice.advantage.part.name!r}, "
            f"which compares siblings, got {run.group_size}"
        )
    if choice.critic.warmup_steps >= run.steps and choice.needs_values:
        raise ConfigError(
            f"algo.critic.warmup_steps = {choice.critic.warmup_steps} leaves no step of "
            f"run.steps = {run.steps} to train the policy in"
        )
    return Algorithm(choice, max_response_tokens=settings.sampling.max_response_tokens)
