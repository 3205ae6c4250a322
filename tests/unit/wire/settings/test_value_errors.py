import re

import pytest

from slipstream.broker.config import DataSection
from slipstream.deploy.config import DeploySection
from slipstream.learner.config import LearnerSection
from slipstream.wire.errors import ConfigError
from slipstream.wire.settings.load import Section, load_table, section
from slipstream.wire.settings.sections import (
    EvalSection,
    LoggingSection,
    RunSection,
    SamplingSection,
)

KINDS = {
    "run": RunSection,
    "data": DataSection,
    "sampling": SamplingSection,
    "eval": EvalSection,
    "logging": LoggingSection,
    "learner": LearnerSection,
    "deploy": DeploySection,
}
WRONG = {
    "run.steps=abc": 'run.steps must be a whole number of at least 1, got "abc"',
    "run.steps=1.5": "run.steps must be a whole number of at least 1, got 1.5",
    "run.mode=asnyc": (
        'run.mode must be one of "async", "sync", got "asnyc": did you mean "async"?'
    ),
    "data.as_chat=True": (
        'data.as_chat must be true or false, got "True": write true, in small letters'
    ),
    "eval.every_steps=-1": (
        "eval.every_steps must be a whole number of at least 0, got -1: 0 is never"
    ),
    "sampling.temperature=None": (
        'sampling.temperature must be a number above 0, got "None": leave the setting out for '
        "its default"
    ),
    "sampling.top_p=1.5": "sampling.top_p must be a number above 0 and of at most 1, got 1.5",
    "logging.trackers=['console', 'wandb']": "the terminal is always written to",
    "logging.trackers=wandb": 'got "wandb": write ["wandb"]',
    "learner.offload=['weight']": 'each one of "weights", "gradients", "optimizer"',
    "data.sources.mine.weight=heavy": "data.sources.mine.weight must be a number",
    "data.sources=3": "data.sources must be a table, got 3",
    "eval.sets.held.file=3": "eval.sets.held.file must be text, got 3",
    "deploy.ray.address=3": "deploy.ray.address must be text",
}


@pytest.mark.parametrize("override", WRONG)
def test_a_wrong_value_is_told_in_words(override: str):
    name = override.partition(".")[0]
    kind: type[Section] = KINDS[name]
    with pytest.raises(ConfigError, match=re.escape(WRONG[override])) as raised:
        section(load_table(None, [override]), name, kind)
    assert "`" not in str(raised.value)
    assert "$" not in str(raised.value)


def test_a_missing_field_is_named():
    class Needed(Section, frozen=True, kw_only=True):
        file: str

    with pytest.raises(ConfigError, match=r"run.file must be given"):
        section({"run": {}}, "run", Needed)


def test_what_no_single_value_explains_is_told_as_the_decoder_does():
    class Tight(Section, frozen=True, kw_only=True):
        first: int = 1

        def __post_init__(self) -> None:
            raise ValueError("first and second do not go together")

    with pytest.raises(ConfigError, match=r"section \[run\]: first and second"):
        section({"run": {"first": 2}}, "run", Tight)
