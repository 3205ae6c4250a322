import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from broker.rewards import exact_match
from broker.rewards.loading import Reward, load_reward
from wire.control import ScoringItem
from wire.errors import ConfigError
from wire.trajectory import Prompt, Score, Transcript

ITEM = ScoringItem(group_id=3, sibling=1, lease_id=9)


def transcript(response: str) -> Transcript:
    return Transcript(
        prompt=Prompt(prompt="61+61=", ground_truth="122", data_source="add"),
        response=response,
        num_response_tokens=3,
        finish_reason="stop",
    )


def score_with(result: object) -> Score:
    def function(_source: str, _solution: str, _truth: str, _extra: Mapping[str, object]) -> object:
        if isinstance(result, Exception):
            raise result
        return result

    return Reward("test:function", function).score(ITEM, transcript("122"))


@pytest.mark.parametrize(("response", "value"), [(" 122\n", 1.0), ("121", 0.0), ("", 0.0)])
def test_exact_match_ignores_white_space_at_both_ends(response: str, value: float):
    score = load_reward("broker.rewards.exact_match:score").score(ITEM, transcript(response))
    assert (score.group_id, score.sibling, score.lease_id) == (3, 1, 9)
    assert (score.reward, score.unavailable) == (value, "")
    assert score.function == "broker.rewards.exact_match:score"


@pytest.mark.parametrize(
    ("truth", "response", "value"),
    [
        (122, "122", 1.0),
        (0.5, " 0.5", 1.0),
        (True, "true", 1.0),
        (["122", 122.5, " x "], "x", 1.0),
        (["122"], '["122"]', 0.0),
        ({"a": [1]}, '{"a": [1]}', 1.0),
        (None, "", 0.0),
    ],
)
def test_exact_match_compares_with_any_json_truth(truth: object, response: str, value: float):
    assert exact_match.score("s", response, truth, {}) == value


def test_a_function_of_a_file_sees_all_four_arguments(tmp_path: Path):
    path = tmp_path / "mine.py"
    path.write_text(
        "def length(data_source, solution_str, ground_truth, extra_info):\n"
        "    assert (data_source, ground_truth, dict(extra_info)) == ('add', '122', {})\n"
        "    return len(solution_str)\n"
    )
    assert load_reward(f"{path}:length").score(ITEM, transcript("1234")).reward == 4.0


@pytest.mark.parametrize(("result", "value"), [(2, 2.0), (True, 1.0), (-0.5, -0.5), (0, 0.0)])
def test_a_number_is_the_reward(result: float, value: float):
    assert score_with(result).reward == value


def test_a_dictionary_carries_its_parts():
    score = score_with({"score": 0.5, "format": 1, "note": "fine", "broken": math.nan})
    assert score.reward == 0.5
    assert score.parts == {"score": 0.5, "format": 1.0}


@pytest.mark.parametrize(
    ("result", "why"),
    [
        (ValueError("no number"), "raised ValueError: no number"),
        (math.nan, "invalid: returned nan"),
        (math.inf, "invalid: returned inf"),
        (None, "invalid: returned None"),
        ("1.0", "invalid: returned '1.0'"),
        ({"format": 1.0}, "invalid: returned {'format': 1.0}"),
        ({"score": None}, "invalid: returned {'score': None}"),
        ([1.0], r"invalid: returned [1.0]"),
    ],
)
def test_what_is_no_reward_is_unavailable_and_never_zero(result: object, why: str):
    score = score_with(result)
    assert score.reward is None
    assert score.unavailable == why
    assert score.function == "test:function"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("broker.rewards.exact_match", "is not MODULE:FUNCTION"),
        ("no_such_module_at_all:score", "No module named"),
        ("broker.rewards.exact_match:grade", "has no attribute 'grade'"),
        ("no_such_file.py:score", "No such file"),
        ("broker.rewards.loading:__name__", "is not callable"),
    ],
)
def test_a_function_that_is_not_there_is_named(name: str, why: str):
    with pytest.raises(ConfigError, match=why) as caught:
        load_reward(name)
    assert repr(name) in str(caught.value)


def test_a_number_too_large_for_a_reward_is_unavailable():
    assert score_with(10**400).reward is None


def test_a_function_that_exits_is_unavailable_and_does_not_end_the_worker():
    def leave(*_arguments: object) -> float:
        raise SystemExit(3)

    item = ScoringItem(group_id=1, sibling=0, lease_id=2)
    transcript = Transcript(
        prompt=Prompt(prompt="1+1="), response="2", num_response_tokens=1, finish_reason="stop"
    )
    score = Reward("leave", leave).score(item, transcript)
    assert score.reward is None
    assert "SystemExit" in score.unavailable


def test_a_file_that_fails_at_import_is_a_clear_error(tmp_path: Path):
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0\n")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        load_reward(f"{broken}:score")
