"""A host's model folder: its contents, and whether it equals that of the learner's host."""

from collections.abc import Mapping
from pathlib import Path

from slipstream.deploy.preflight.check.facts import Fact, fail, ok
from slipstream.wire.errors import ConfigError, EngineError
from slipstream.wire.models.hf_config import HfConfig
from slipstream.wire.models.model_digests import model_digests
from slipstream.wire.models.model_files import weight_files
from slipstream.wire.models.tokenizer_hash import tokenizer_hash

_SETTING = "run.model"


def observe_model(folder: Path, hf: HfConfig) -> tuple[list[Fact], dict[str, str]]:
    """Return the facts of a model folder, and digests by part."""
    from slipstream.learner.model.weights.hf_tensors import HfTensors  # torch
    from slipstream.weightbus.agent.weight_files import check_weight_files  # safetensors

    facts, digests = [], {}
    try:
        digests["tokenizer"] = tokenizer_hash(folder)
    except ConfigError as error:
        facts.append(fail("tokenizer", str(error), _SETTING))
    try:
        weight_files(folder)
        check_weight_files(folder)
        with HfTensors(folder) as tensors:
            tensors.refuse_others(hf)
    except (ConfigError, EngineError) as error:
        return [*facts, fail("model", str(error), _SETTING)], digests
    digests |= model_digests(folder)
    shown = ", ".join(f"{name} {digest[:12]}" for name, digest in digests.items())
    return [*facts, ok("model", f"{folder}: {shown}", _SETTING)], digests


def judge_models(ours: Mapping[str, str], theirs: Mapping[str, str]) -> Fact:
    """Return whether a host has the learner host's model; both are digests by part."""
    wrong = [
        f"{name} is {theirs.get(name, 'missing')[:12]} here, {digest[:12]} on the learner's"
        for name, digest in ours.items()
        if theirs.get(name) != digest
    ]
    if wrong:
        return fail("same model", "; ".join(wrong), _SETTING)
    return ok("same model", "as on the learner's host", _SETTING)
