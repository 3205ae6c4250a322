"""Algorithms that a run cannot train are refused with the settings at fault."""

from pathlib import Path

import pytest

from slipstream.algos.compose import Algorithm
from slipstream.learner.config import learner_settings
from slipstream.learner.training.algorithm import algorithm_of, frozen_policies
from slipstream.wire.errors import ConfigError
from slipstream.wire.settings.load import Table
from tests.support.blank_model import write_blank_model


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


def algorithm(model: str, run: Table | None = None, **sections: Table) -> Algorithm:
    whole = {"model": model, "steps": 10, **(run or {})}
    return algorithm_of(learner_settings({"run": whole, **sections}))


def test_a_critic_that_warms_up_for_the_whole_run_is_refused(model: str):
    section: Table = {"preset": "ppo", "critic": {"warmup_steps": 10}}
    with pytest.raises(ConfigError, match=r"warmup_steps = 10 leaves no step of run\.steps = 10"):
        algorithm(model, algo=section)
    assert algorithm(model, run={"steps": 11}, algo=section).trains_policy(10)


def test_an_advantage_that_compares_siblings_needs_two(model: str):
    with pytest.raises(ConfigError, match=r"run\.group_size must be >= 2 for algo\.advantage"):
        algorithm(model, run={"group_size": 1}, algo={"preset": "grpo"})


def test_endpoint_with_another_distribution_is_refused(model: str):
    for sampling, message in [
        ({"temperature": 0.5}, r"at temperature 1, got sampling\.temperature = 0\.5"),
        ({"min_response_tokens": 1}, r"sampling\.min_response_tokens = 1 bars the end"),
        ({"top_p": 0.9}, r"sampling\.top_p = 0\.9, top_k = -1 and min_p = 0 leave tokens out"),
    ]:
        teacher = {"coefficient": 1.0, "endpoint": "http://127.0.0.1:1"}
        with pytest.raises(ConfigError, match=message):
            algorithm(model, algo={"teacher": teacher}, sampling=sampling)


def test_an_endpoint_of_whole_distributions_takes_truncated_samples_as_if_they_were_whole(
    model: str,
):
    teacher = {"coefficient": 1.0, "endpoint": "http://127.0.0.1:1"}
    sampling: Table = {"top_p": 0.9, "kept_tokens": "drop"}
    assert algorithm(model, algo={"teacher": teacher}, sampling=sampling).choice.has_teacher


def test_the_routing_before_the_first_of_several_updates_needs_several(model: str):
    run: Table = {"routing_replay": "R2"}
    with pytest.raises(ConfigError, match=r'"R2" repeats .* set learner\.minibatches > 1 or "R3"'):
        algorithm(model, run=run)
    assert algorithm(model, run=run, learner={"minibatches": 2})
    assert algorithm(model, run={"routing_replay": "R3"})


def test_missing_teacher_is_refused(model: str):
    why = r"needs a teacher: algo\.teacher\.model \(a Hugging Face folder, its URL or its name on"
    with pytest.raises(ConfigError, match=why):
        algorithm(model, algo={"teacher": {"coefficient": 1.0}})


def test_tokens_are_not_held_to_where_their_only_minibatch_begins(model: str):
    held: Table = {"preset": "decoupled-ppo", "correction": "kl-cov"}
    with pytest.raises(
        ConfigError, match=r"kl-cov holds tokens .* set learner\.minibatches > 1 or"
    ):
        algorithm(model, algo=held)
    assert algorithm(model, algo=held, learner={"minibatches": 2}).corrects_before
    assert algorithm(model, algo={**held, "anchor": "behavior"}).corrects_before


def test_rewards_of_turns_need_an_environment(model: str):
    for advantage, setting in [
        ({"name": "grpo", "over": "turns"}, 'over = "turns"'),
        ({"name": "rloo", "over": "turns"}, 'over = "turns"'),
        ({"name": "discounted-returns", "rewards": "turns"}, 'rewards = "turns"'),
        ({"name": "gae", "over": "turns", "rewards": "turns"}, 'rewards = "turns"'),
    ]:
        algo: Table = {"preset": "ppo", "whiten": "none", "advantage": advantage}
        if advantage["name"] != "gae":
            algo["preset"] = "grpo"
        with pytest.raises(
            ConfigError, match=rf"algo\.advantage\.{setting} needs environment\.function, got none"
        ):
            algorithm(model, algo=algo)
        assert algorithm(model, algo=algo, environment={"function": "a.py:A"}).needs_turn_rewards


def test_one_turn_may_be_an_action(model: str):
    assert algorithm(model, algo={"preset": "ppo", "advantage": {"over": "turns"}})


def test_policies_beside_the_trained_one_may_be_urls(tmp_path: Path):
    for layers, name in enumerate(("model", "reference", "teacher"), start=1):
        write_blank_model(tmp_path / name, hidden=16, layers=layers)
    table: Table = {
        "run": {"model": str(tmp_path / "model"), "cache_dir": str(tmp_path / "cache")},
        "algo": {
            "kl": {"coefficient": 0.1, "reference": f"file://{tmp_path}/reference"},
            "teacher": {"coefficient": 1.0, "model": f"file://{tmp_path}/teacher"},
        },
    }
    settings = learner_settings(table)
    frozen = frozen_policies(algorithm_of(settings), settings)
    assert [hf.num_hidden_layers for hf in frozen] == [2, 3]


@pytest.mark.parametrize(
    "teacher",
    [{"coefficient": 1.0, "endpoint": "http://127.0.0.1:1"}, {"coefficient": 0.0, "model": "gone"}],
)
def test_a_teacher_that_is_elsewhere_or_not_asked_is_no_policy_here(model: str, teacher: Table):
    settings = learner_settings({"run": {"model": model}, "algo": {"teacher": teacher}})
    assert frozen_policies(algorithm_of(settings), settings) == []
