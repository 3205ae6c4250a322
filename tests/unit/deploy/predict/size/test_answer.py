"""The whole answer, from settings to a split that the run's own checks accept."""

from dataclasses import replace

import pytest

from slipstream.deploy.config import run_config
from slipstream.deploy.predict.laws.gpus import Cluster, gpu_of
from slipstream.deploy.predict.size.answer import answer
from slipstream.deploy.predict.size.proposals import PlanRequest
from slipstream.wire.errors import ConfigError
from slipstream.wire.settings.load import to_table
from tests.support.planned import H100, config_of, shape_of

QWEN = "Qwen3-30B-A3B"


def asked(gpus: int, **sections: dict[str, object]) -> PlanRequest:
    return PlanRequest(
        config=config_of(QWEN, **sections),
        hf=shape_of(QWEN),
        cluster=H100,
        gpus=gpus,
        prompt_tokens=500,
        response_tokens=1500,
        frozen=(),
        has_critic=False,
    )


def test_the_best_split_is_a_run_that_its_checks_accept():
    question = asked(32)
    found = answer(question)
    best = found.splits[0]
    split = best.split
    assert split.learner.gpus + split.generator_gpus <= 32
    assert 0 <= split.bound <= question.config.run.max_staleness_steps
    learner = to_table(split.learner.settings.learner)
    generators = {"count": split.engines, "sglang": split.engine.sglang}
    accepted = run_config({**question.config.table, "learner": learner, "generators": generators})
    assert accepted.learner.learner.ranks == split.learner.gpus
    assert found.fewest_gpus == min(one.gpus for one in found.layouts)
    assert best.step_s <= 1.02 * min(one.step_s for one in found.splits)
    assert found.publishes.keys() == {"star", "chain"}


def test_an_engine_of_the_settings_is_kept_where_it_holds_the_model():
    given = asked(32, generators={"sglang": {"tp_size": 2}})
    found = answer(given)
    assert (found.engine.ranks, found.engine_is_given) == (2, True)


def test_an_engine_may_take_more_of_the_memory_than_by_default():
    """Of 64 GiB, 0.85 do not hold the weights."""
    sections = {"generators": {"sglang": {"mem_fraction_static": 0.95}}}
    small = replace(asked(32, **sections), cluster=Cluster(gpu=gpu_of(64.0)))
    assert answer(small).engine.ranks == 1


def test_too_few_gpus_are_refused_with_what_is_needed():
    with pytest.raises(ConfigError, match=r"--gpus is 1: one engine takes 1 .*one more"):
        answer(asked(1))
    with pytest.raises(ConfigError, match=r"--gpus is 2: no layout .*fits on up to 1 GPUs of 80"):
        answer(asked(2))
