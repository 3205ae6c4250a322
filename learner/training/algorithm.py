"""The run's algorithm, from its settings."""

from pathlib import Path

from slipstream.algos.choice import AlgoChoice, TeacherOptions
from slipstream.algos.compose import Algorithm
from slipstream.algos.config import choice_of
from slipstream.algos.parts import OptionsError, PartError
from slipstream.learner.config import LearnerSettings
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.source_files import module_named
from slipstream.wire.models.hf_config import HfConfig, load_hf_config
from slipstream.wire.settings.sections import SamplingSection, local_model, model_folder
from slipstream.wire.settings.value_errors import wrong_value


def frozen_policies(algorithm: Algorithm, settings: LearnerSettings) -> list[HfConfig]:
    """Return the learner's frozen policies, a reference and a teacher, each once.

    With adapters the policy itself is the reference, too.

    Raises:
        ConfigError: a policy has no usable config.json.
    """
    choice, run, folders = algorithm.choice, settings.run, dict[Path, str]()
    if choice.needs_reference and not settings.base_is(choice.kl.reference):
        setting, name = "algo.kl.reference", choice.kl.reference
        folders[local_model(run, name, setting) if name else model_folder(run)] = setting
    if choice.has_teacher and choice.teacher.model:
        teacher = local_model(run, choice.teacher.model, "algo.teacher.model")
        folders.setdefault(teacher, "algo.teacher.model")
    return [load_hf_config(folder, setting) for folder, setting in folders.items()]


def _reader_of_turns(choice: AlgoChoice) -> str:
    """Return the setting that makes the advantage read rewards of turns."""
    part, options = choice.advantage.part, choice.advantage.options
    names = (name for name in options.__struct_fields__ if getattr(options, name) == "turns")
    named = next(names, "")
    return f'algo.advantage.{named} = "turns"' if named else f"algo.advantage = {part.name!r}"


def algorithm_of(settings: LearnerSettings) -> Algorithm:
    """Return the composed algorithm of a run.

    Raises:
        ConfigError: the settings name no algorithm that this run can train.
    """
    try:
        choice = choice_of(settings.algo, module_named)
    except OptionsError as error:
        wrong = wrong_value(error.values, error.kind, error.where, error.error)
        raise ConfigError(wrong) from error
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
    if "turn_rewards" in choice.advantage.needs and not settings.environment.is_named:
        raise ConfigError(
            f"{_reader_of_turns(choice)} needs environment.function, got none: without an "
            "environment a trajectory is a single turn, and its reward is that of the turn"
        )
    holds = any(correction.part.name == "kl-cov" for correction in choice.corrections)
    if holds and choice.anchor == "proximal" and settings.learner.minibatches == 1:
        raise ConfigError(
            "algo.correction.kl-cov holds tokens to the start of the step (algo.anchor = "
            '"proximal"), and the only minibatch is there: set learner.minibatches > 1 or '
            'algo.anchor = "behavior"'
        )
    if run.routing_replay == "R2" and settings.learner.minibatches == 1:
        raise ConfigError(
            'run.routing_replay = "R2" repeats choices in updates after the first of a step, and '
            'learner.minibatches = 1 has no other: set learner.minibatches > 1 or "R3"'
        )
    if choice.has_teacher:
        _refuse_teacher(choice.teacher, settings.sampling)
    return Algorithm(choice, max_response_tokens=settings.sampling.max_response_tokens)


def _refuse_teacher(teacher: TeacherOptions, sampling: SamplingSection) -> None:
    """Refuse a missing teacher, and one that answers about another distribution.

    Raises:
        ConfigError: naming the settings.
    """
    if not teacher.model and not teacher.endpoint:
        raise ConfigError(
            "algo.teacher.coefficient > 0 needs a teacher: algo.teacher.model (a Hugging Face "
            "folder, its URL or its name on the Hugging Face hub) or algo.teacher.endpoint (URL of "
            "an SGLang server)"
        )
    if not teacher.endpoint:
        return
    if sampling.temperature != 1.0:
        raise ConfigError(
            "algo.teacher.endpoint answers with log-probabilities at temperature 1, got "
            f"sampling.temperature = {sampling.temperature:g}: algo.teacher.model takes any"
        )
    if sampling.min_response_tokens > 0:
        raise ConfigError(
            "algo.teacher.endpoint has log-probabilities over the whole vocabulary, and "
            f"sampling.min_response_tokens = {sampling.min_response_tokens} bars the end of a "
            "response: algo.teacher.model bars it, too"
        )
    if sampling.records_kept:
        raise ConfigError(
            "algo.teacher.endpoint has log-probabilities over the whole vocabulary, and "
            f"sampling.top_p = {sampling.top_p:g}, top_k = {sampling.top_k} and min_p = "
            f"{sampling.min_p:g} leave tokens out: algo.teacher.model leaves them out, too"
        )
