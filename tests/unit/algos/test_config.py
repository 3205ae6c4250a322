import math
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slipstream.algos.choice import AlgoChoice
from slipstream.algos.compose import Algorithm
from slipstream.algos.config import PARTS, choice_of
from slipstream.algos.corrections import ImportanceSamplingOptions, RejectionOptions
from slipstream.algos.parts import PartError, advantage, surrogate
from slipstream.algos.presets import PRESETS
from slipstream.algos.section import AlgoSection
from slipstream.algos.surrogates import CispoOptions, PpoOptions
from slipstream.wire.files.source_files import module_named
from tests.support.own_parts import SquareOptions

OWN = "tests.support.own_parts"


def chosen(**settings: object) -> AlgoChoice:
    return choice_of(msgspec.convert({"preset": "decoupled-ppo", **settings}, AlgoSection))


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_an_algorithm(preset: str):
    choice = chosen(preset=preset)
    assert choice.preset == preset
    for kind in ("advantage", "surrogate"):
        part = getattr(choice, kind).part
        assert PARTS[kind][part.name] is part


def test_the_default_keeps_to_the_policy_that_sampled():
    """As docs/staleness.md measured it; decoupled PPO does not, and keeps its name."""
    default = choice_of(AlgoSection())
    assert (default.surrogate.part.name, default.anchor) == ("ppo-clip", "behavior")
    assert default.surrogate.options == PpoOptions(clip_low=0.2, clip_high=0.2)
    assert corrections(default) == {}
    decoupled = chosen(preset="decoupled-ppo")
    assert (decoupled.surrogate, decoupled.anchor) == (default.surrogate, "proximal")
    assert corrections(decoupled) == {
        "importance-sampling": ImportanceSamplingOptions(level="token", high=5.0)
    }
    assert (decoupled.advantage, decoupled.reduce) == (default.advantage, default.reduce)


def test_parts_are_named_as_they_are_found():
    for kind, parts in PARTS.items():
        assert all(name == part.name and part.kind == kind for name, part in parts.items())
        assert all(part.summary for part in parts.values())


def test_a_setting_changes_the_part_of_the_preset():
    choice = chosen(preset="dapo", surrogate={"clip_low": 0.1})
    assert choice.surrogate.options == PpoOptions(clip_low=0.1, clip_high=0.28)


def test_another_name_takes_none_of_the_settings_of_the_part_it_replaces():
    assert chosen(preset="dapo", surrogate="cispo").surrogate.options == CispoOptions()
    again = chosen(preset="dapo", surrogate="ppo-clip").surrogate.options
    assert again == PpoOptions(clip_high=0.28)
    table = chosen(preset="dapo", surrogate={"name": "cispo", "clip_high": 1.0})
    assert table.surrogate.options == CispoOptions(clip_high=1.0)


def corrections(choice: AlgoChoice) -> dict[str, object]:
    return {one.part.name: one.options for one in choice.corrections}


def test_corrections_are_added_changed_and_taken_away():
    default = ImportanceSamplingOptions(level="token", high=5.0)
    assert corrections(chosen()) == {"importance-sampling": default}
    more = chosen(correction={"rejection": {"high": 3.0}, "importance-sampling": {"low": 0.1}})
    assert corrections(more) == {
        "importance-sampling": ImportanceSamplingOptions(level="token", high=5.0, low=0.1),
        "rejection": RejectionOptions(high=3.0),
    }
    assert corrections(chosen(correction="none")) == {}
    assert corrections(chosen(correction={"importance-sampling": False})) == {}
    assert list(corrections(chosen(correction="opsm"))) == ["opsm"]


def test_parts_of_ones_own_are_taken_by_module_and_function():
    choice = chosen(
        surrogate={"name": f"{OWN}:square", "strength": 3.0},
        advantage=f"{OWN}:sign",
        correction={f"{OWN}:fresh": {}, "importance-sampling": False},
    )
    assert choice.surrogate.options == SquareOptions(strength=3.0)
    assert choice.advantage.part.name == "sign"
    assert list(corrections(choice)) == ["fresh"]


REFUSED: dict[str, dict[str, Any]] = {
    r"algo.data.scale must be a finite number, got nan": {"data": {"scale": math.nan}},
    r"algo.kl.coefficient must be a finite number, got inf": {"kl": {"coefficient": math.inf}},
    r"algo.entropy_bonus must be a finite number, got inf": {"entropy_bonus": math.inf},
    r"algo.likelihood.least_reward must be a finite number, got nan": {
        "likelihood": {"coefficient": 0.1, "least_reward": math.nan}
    },
    r"algo.correction.rejection.high must be a finite number, got nan": {
        "correction": {"rejection": {"high": math.nan}}
    },
    r"algo.advantage.weights.right must be a finite number, got -inf": {
        "advantage": {"name": "gdpo", "weights": {"right": -math.inf}}
    },
    r"algo.advantage = 'grpo' is given the rewards of turns, and algo.data.clip": {
        "advantage": {"name": "grpo", "over": "turns"},
        "data": {"clip": 1.0},
    },
    r"algo.advantage = 'gae' is given the rewards of turns, and algo.data.clip and normalize": {
        "advantage": {"name": "gae", "rewards": "turns"},
        "data": {"normalize": "batch"},
    },
    r"algo.advantage = 'rloo' compares rewards of turns, and a KL in the reward": {
        "advantage": {"name": "rloo", "over": "turns"},
        "kl": {"coefficient": 0.1, "place": "reward"},
    },
    r"algo.advantage.over counts the steps of turns, and length_adaptive": {
        "advantage": {"name": "gae", "over": "both", "length_adaptive": True}
    },
    r"algo.advantage.over = .both. knows rewards at ends of turns, and a KL in the reward": {
        "advantage": {"name": "gae", "over": "both"},
        "kl": {"coefficient": 0.1, "name": "k1", "place": "reward"},
    },
    r"algo.advantage.discount has no effect without algo.advantage.over": {
        "advantage": {"name": "grpo", "discount": 0.9}
    },
    r"algo.advantage.discount_by has no effect with algo.advantage.over": {
        "advantage": {"name": "gae", "over": "turns", "discount": 0.9, "discount_by": "turn"}
    },
    r"algo.advantage.discount_by has no effect as long as algo.advantage.discount is 1": {
        "advantage": {"name": "discounted-returns", "discount_by": "turn"}
    },
    r"unknown setting algo.advantage.rewards; known are discount, discount_by": {
        "advantage": {"name": "reinforce++-baseline", "rewards": "turns"}
    },
    r"zero_variance = .mask. leaves out groups of equal rewards, .*parts or turns of rewards": {
        "advantage": {"name": "grpo", "over": "turns"},
        "data": {"zero_variance": "mask"},
    },
    r"algo.preset = 'grppo' is not known; there are async-default, decoupled-ppo": {
        "preset": "grppo"
    },
    r"algo.surrogate = 'ppo' is not known; there are cispo, .*MODULE:FUNCTION": {
        "surrogate": "ppo"
    },
    r"algo.surrogate.name must be the name of a part, got 3": {"surrogate": {"name": 3}},
    r"algo.advantage.name must be the name of a part, got \['grpo'\]": {
        "advantage": {"name": ["grpo"]}
    },
    r"unknown setting algo.surrogate.clip; known are clip_low, clip_high": {
        "surrogate": {"clip": 0.2}
    },
    r"algo.surrogate: Expected `float` <= 1.0 - at `\$.clip_low`": {"surrogate": {"clip_low": 2.0}},
    r"algo.surrogate = 'no.such:part' cannot be loaded: ModuleNotFoundError: No module": {
        "surrogate": "no.such:part"
    },
    r"own_parts:undecorated' is <function .*; expected a function under @.*algos.parts.surrogate": {
        "surrogate": f"{OWN}:undecorated"
    },
    r"own_parts:sign' is <advantage sign>; expected a function under @.*algos.parts.surrogate": {
        "surrogate": f"{OWN}:sign"
    },
    r"algo.correction.rejection must be a table of settings or false, got 3": {
        "correction": {"rejection": 3}
    },
    r"algo.correction.rejection: rejection needs low <= high, got low 3.0, high 2.0": {
        "correction": {"rejection": {"low": 3.0}}
    },
    r"needs the reward of a greedy answer to each prompt, which is not generated": {
        "advantage": "remax"
    },
    r"algo.critic has no meaning without an advantage that needs values": {"critic": {"lr": 1e-3}},
    r'algo.kl.name = "full" has no meaning in the reward': {
        "kl": {"coefficient": 0.1, "name": "full", "place": "reward"}
    },
    r"algo.kl.name = 'k3\+' differs from its estimator in the gradient only": {
        "kl": {"coefficient": 0.1, "name": "k3+", "place": "reward"}
    },
    r"correct for the same difference once more": {"anchor": "behavior"},
    r"approximate-proximal replaces the proximal policy": {
        "preset": "grpo",
        "correction": "approximate-proximal",
    },
    r"algo.reduce.length is the constant of sequence-mean-token-sum-norm alone": {
        "reduce": {"length": 8}
    },
    r'algo.reduce.denominator = "kept" has no meaning without a correction that rejects': {
        "reduce": {"denominator": "kept"}
    },
    r"algo.whiten = 'group' after algo.data.normalize = \"group\" does the same twice": {
        "advantage": "reinforce",
        "whiten": "group",
        "data": {"normalize": "group"},
    },
    r"algo.data.normalize already centers and scales rewards": {"data": {"normalize": "group"}},
    r'algo.data.resample_power has no effect without algo.data.resample = "pow"': {
        "data": {"resample": "max-min", "resample_power": 2.0}
    },
    r'algo.data.resample_share has no effect without algo.data.resample = "max-random"': {
        "data": {"resample": "pow", "resample_share": 0.5}
    },
    r"algo.kl has no effect as long as algo.kl.coefficient is 0": {"kl": {"name": "k1"}},
    r"algo.anchor has no effect: policy-gradient has no ratio": {
        "surrogate": "policy-gradient",
        "anchor": "behavior",
    },
    r"algo.advantage.decay has no effect with length_adaptive": {
        "preset": "vapo",
        "advantage": {"decay": 0.9},
    },
    r"algo.advantage.length_alpha has no effect without length_adaptive": {
        "preset": "ppo",
        "advantage": {"length_alpha": 0.1},
    },
    r"algo.data.resample counts a trajectory several times": {
        "preset": "m2po",
        "data": {"resample": "max-min"},
    },
    r"algo.correction.importance-sampling: importance-sampling needs low <= high": {
        "correction": {"importance-sampling": {"low": 9.0}}
    },
    r'algo.kl.name = "full" is a sum over all tokens, of which the behavior policy reports one': {
        "kl": {"coefficient": 0.1, "name": "full", "to": "behavior"}
    },
    r"algo.kl.importance_weighted weighs an estimate in the loss": {
        "kl": {"coefficient": 0.1, "name": "k1", "place": "reward", "importance_weighted": True}
    },
    r"algo.kl.reference and algo.kl.renew_every have no effect without a reference policy": {
        "preset": "dppo",
        "kl": {"renew_every": 10},
    },
    r"algo.advantage = 'gdpo' reads the parts of the reward": {
        "advantage": {"name": "gdpo", "weights": {"right": 1.0}},
        "data": {"scale": 2.0},
    },
    r"and algo.data .* or a KL in the reward would change the reward alone": {
        "advantage": {"name": "gdpo", "weights": {"right": 1.0}},
        "kl": {"coefficient": 0.1, "name": "k1", "place": "reward"},
    },
    r"algo.teacher takes a model or an endpoint, not both": {
        "preset": "distill",
        "teacher": {"model": "/m", "endpoint": "http://h"},
    },
    r"algo.teacher has no effect as long as algo.teacher.coefficient is 0": {
        "teacher": {"model": "/m"}
    },
    r"algo.teacher.api_key_file and algo.teacher.concurrency are of algo.teacher.endpoint": {
        "preset": "distill",
        "teacher": {"model": "/m", "concurrency": 3},
    },
    r"algo.likelihood has no effect as long as algo.likelihood.coefficient is 0": {
        "likelihood": {"least_reward": 2.0}
    },
    r"algo.advantage.std_over and epsilon have no effect without divide_by_std": {
        "preset": "dr-grpo",
        "advantage": {"std_over": "batch"},
    },
    r"algo.advantage = 'gdpo' needs algo.advantage.weights": {"advantage": "gdpo"},
    r"algo.advantage = 'zero' learns nothing without algo.teacher or algo.likelihood": {
        "preset": "distill",
        "teacher": {"coefficient": 0.0},
    },
    r"algo.advantage = 'maxrl' needs rewards >= 0": {"preset": "dapo", "advantage": "maxrl"},
    r'algo.data.zero_variance = "mask" leaves out groups of equal rewards, which teach here': {
        "teacher": {"coefficient": 0.1},
        "data": {"zero_variance": "mask"},
    },
    r"algo.correction.clip-cov: clip-cov needs low < high, got low 6.0, high 5.0": {
        "correction": {"clip-cov": {"low": 6.0}}
    },
    r"algo.data.resample counts a trajectory several times, and a correction that decides": {
        "correction": {"importance-sampling": {"normalize": True}},
        "data": {"resample": "max-min"},
    },
    r"algo.advantage = 'optimal-token-baseline' compares tokens of siblings": {
        "advantage": "optimal-token-baseline",
        "data": {"resample": "max-min"},
    },
    r"algo.data.overlong_penalty needs algo.data.overlong_buffer": {
        "data": {"overlong_penalty": 2.0}
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_makes_no_sense_is_refused_with_the_setting_and_the_reason(message: str):
    with pytest.raises(PartError, match=message):
        chosen(**REFUSED[message])


def test_importance_sampling_is_allowed_where_the_surrogate_has_no_ratio():
    choice = chosen(surrogate="policy-gradient")
    assert list(corrections(choice)) == ["importance-sampling"]


def test_a_part_cannot_need_what_there_is_not():
    for part, needs, message in [
        (surrogate, ("luck",), r"surrogate mine: needs \['luck'\]; known of this kind are"),
        *(
            (advantage, (name,), f"{name} are of tokens, so it needs tokens, too")
            for name in ("values", "whole_step", "squares")
        ),
        (
            advantage,
            ("tokens", "reward_parts"),
            "reward_parts are of trajectories, and tokens have none",
        ),
    ]:
        with pytest.raises(PartError, match=message):
            part("mine", needs=needs)


# ---- what a choice needs ----


def test_a_divergence_from_the_behavior_policy_needs_no_reference():
    assert chosen(preset="grpo").needs_reference
    choice = chosen(preset="dppo")
    assert choice.has_kl
    assert not choice.needs_reference
    assert (choice.kl.to, choice.kl.name, choice.kl.coefficient) == ("behavior", "k2", 0.002)
    assert choice.anchor == "behavior"


def test_a_part_that_needs_the_reference_has_one_loaded():
    choice = chosen(surrogate=f"{OWN}:shown", kl={"reference": "/ref", "renew_every": 5})
    assert choice.needs_reference
    assert not choice.has_kl
    made = Algorithm(choice, max_response_tokens=4)
    assert made.needs_reference_logprobs
    assert made.shows_minibatch
    assert made.needs_proximal
    assert [made.renews_reference(step) for step in (4, 5, 6, 10)] == [False, True, False, True]
    assert not Algorithm(chosen(), max_response_tokens=4).renews_reference(5)


def test_settings_of_a_part_may_need_more():
    plain, normalized = (
        chosen(correction={"importance-sampling": {"normalize": on}}) for on in (False, True)
    )
    assert "whole_minibatch" not in plain.needs_of_tokens
    assert "whole_minibatch" in normalized.needs_of_tokens
    assert Algorithm(normalized, max_response_tokens=4).corrects_before


def test_what_teaches_without_rewards_learns_from_equal_ones():
    assert not chosen().learns_from_equal_rewards
    assert chosen(preset="distill").learns_from_equal_rewards
    assert chosen(teacher={"coefficient": 0.1}).learns_from_equal_rewards
    assert chosen(likelihood={"coefficient": 0.1}).learns_from_equal_rewards


def test_a_correction_by_its_name_alone_has_the_bounds_of_its_page():
    plain = chosen(preset="dr-grpo", anchor="proximal", correction="importance-sampling")
    assert corrections(plain) == {
        "importance-sampling": ImportanceSamplingOptions(
            level="token", high=2.0, low=0.0, normalize=False
        )
    }


def test_the_presets_of_papers_reduce_as_they_do():
    rules = {name: chosen(preset=name).reduce.name for name in ("sapo", "gspo", "dppo", "drpo")}
    assert rules["sapo"] == rules["gspo"] == "sequence-mean-token-mean"
    assert rules["dppo"] == rules["drpo"] == "token-mean"


def test_trust_regions_are_as_wide_as_in_their_papers():
    def bounds(name: str) -> tuple[float | None, float | None]:
        options: Any = PARTS["surrogate"][name].options()
        return options.clip_low, options.clip_high

    assert bounds("ppo-clip")[0] == 0.2  # arXiv 1707.06347
    assert bounds("gspo") == (3e-4, 4e-4)  # arXiv 2507.18071
    assert bounds("gmpo") == (0.4, 0.4)  # arXiv 2507.20673, of the log-ratio
    assert bounds("cispo")[0] is None  # arXiv 2506.13585: no floor


def test_part_can_be_loaded_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text = "from tests.support.own_parts import square as mine\n"
    (tmp_path / "my_part.py").write_text(text)
    section = AlgoSection(surrogate={"name": f"{tmp_path / 'my_part.py'}:mine", "strength": 2.0})
    assert choice_of(section, module_named).surrogate.options == SquareOptions(strength=2.0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one])
    for name in ("my_part.py:mine", "my_part:mine"):
        assert choice_of(AlgoSection(surrogate=name), module_named).surrogate.part.name == "square"
    with pytest.raises(PartError, match=r"'no_file.py:f' cannot be loaded: FileNotFoundError: No"):
        choice_of(AlgoSection(surrogate="no_file.py:f"), module_named)
    (tmp_path / "ends.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(PartError, match=r"'ends.py:f' cannot be loaded: SystemExit: 3"):
        choice_of(AlgoSection(surrogate="ends.py:f"), module_named)


def test_options_cannot_need_an_unknown_input():
    with pytest.raises(PartError, match=r"correction greedy: needs \['luck'\]; known of this kind"):
        chosen(correction={f"{OWN}:greedy": {}})


def test_an_anchor_has_an_effect_where_tokens_are_held_to_it():
    choice = chosen(surrogate="policy-gradient", anchor="behavior", correction="kl-cov")
    assert choice.anchor == "behavior"


def test_a_whole_step_of_tokens_knows_its_proximal_policy():
    choice = chosen(advantage=f"{OWN}:of_all")
    assert Algorithm(choice, max_response_tokens=4).needs_proximal
