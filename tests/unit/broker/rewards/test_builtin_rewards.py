import contextlib

import pytest

from slipstream.broker.rewards.final_answer import after_thought, marked_answer
from slipstream.broker.rewards.lengths import linear, overlong
from slipstream.broker.rewards.loading import load_function, load_reader
from slipstream.broker.rewards.pattern import Pattern, think_answer
from slipstream.broker.rewards.sdk import Unavailable
from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.trajectory import Json, Prompt
from tests.support.judged import LONG, RIGHT, WEIGHTED, outcome, transcript

JUDGE = "slipstream.broker.rewards.judge:LlmJudge"


# ---- the final answer ----------------------------------------------------------


def test_the_answer_stands_after_the_thought():
    for text, after in [
        ("7", "7"),
        ("<think>7</think> 8", " 8"),
        ("7</think> 8", " 8"),  # the prompt has opened the thought
        ("<think>7</think> 8 <think>9</think>10", "10"),
        ("<think>7", ""),
        ("<think>7</think> 8 <think>9", ""),
        ("<think>6<think>7</think> 8</think> 9", " 9"),
        ("<think>7</think>", ""),
    ]:
        assert after_thought(text) == after


def test_the_marked_answer_is_found():
    for text, marked in [
        (r"first \boxed{1}, then \boxed{\frac{1}{2}} .", r"\frac{1}{2}"),
        ("<answer>1</answer> no, <answer> 2\n</answer>", "2"),
        ("48 + 24 = 72\n#### 72\nbye", "72"),
        (r"\boxed{7} <answer>8</answer> #### 9", "7"),
        (r"<answer>so \boxed {7}</answer>", "7"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        ("just 12", None),
        ("#### Step 1\n3 + 4 = 7\n#### **Conclusion**\nThe answer is 7.", None),
        ("#### Final answer\n\\(7\\)", None),
    ]:
        assert marked_answer(text) == marked
    assert marked_answer("#### 72", hashes=False) is None


@pytest.mark.parametrize(
    "text",
    [
        r"cut off \boxed{12",
        r"\boxed{1} or \boxed{2",
        "<answer>12",
        "<answer>1</answer> or <answer>2",
    ],
)
def test_an_answer_whose_mark_is_not_closed_is_empty(text: str):
    assert marked_answer(text) == ""


COMPARING = ("exact_match", "numeric", "math_answer", "code")


# ---- a row without a truth -------------------------------------------------------


@pytest.mark.parametrize("name", COMPARING)
def test_a_row_without_a_truth_gets_no_reward(name: str):
    function = f"slipstream.broker.rewards.{name}:score"
    for response in ("", "7", "```python\nprint(7)\n```"):
        found = outcome(function, transcript(response, None))
        assert found.unavailable == "the row has no ground_truth (data.ground_truth_column)"
    reader = load_reader(function, {})
    assert reader is not None
    with pytest.raises(Unavailable, match="the row has no ground_truth"):
        reader(Prompt(prompt=""))


def test_sums_and_judges_read_rows_as_their_parts_and_templates_do():
    judge: dict[str, Json] = {"url": "http://judge/v1"}
    for name, options, readable in [
        (WEIGHTED, {"parts": {"right": RIGHT, "long": LONG}}, False),
        (WEIGHTED, {"parts": {"long": LONG}}, True),
        (JUDGE, judge, False),
        (JUDGE, judge | {"template": "Good? {answer}"}, True),
    ]:
        reader = load_reader(name, options)
        assert reader is not None
        with contextlib.nullcontext() if readable else pytest.raises(Unavailable):
            reader(Prompt(prompt="", ground_truth=None))
        reader(Prompt(prompt="", ground_truth="7"))
    assert load_reader("slipstream.broker.rewards.lengths:linear", {}) is None
    assert (
        "the row has no ground_truth" in outcome(JUDGE, transcript("7", None), **judge).unavailable
    )


def test_a_row_that_is_not_of_reasoning_gym_cannot_be_read():
    reader = load_reader("slipstream.broker.rewards.reasoning_gym:score", {})
    assert reader is not None
    with pytest.raises(ValueError, match="extra_info holds no reasoning_gym and entry"):
        reader(Prompt(prompt="", ground_truth="7"))


# ---- patterns ------------------------------------------------------------------


def test_a_pattern_is_searched_and_its_groups_are_metrics():
    pattern = Pattern(pattern=r"answer:\s*(?P<number>\d+)?(?P<word>[a-z]+)?")
    found = pattern.score(transcript("The answer: 12"))
    assert found == {"score": 1.0, "number": 1.0, "word": 0.0}
    assert pattern.score(transcript("no"))["score"] == 0.0


def test_a_pattern_can_be_for_all_of_the_answer():
    pattern = Pattern(pattern="yes.*", mode="fullmatch", ignore_case=True)
    assert pattern.score(transcript("YES\nsir"))["score"] == 1.0
    assert pattern.score(transcript("oh yes"))["score"] == 0.0


@pytest.mark.parametrize("options", [{"pattern": "("}, {"pattern": "a", "mode": "match"}, {}])
def test_a_wrong_pattern_is_refused_when_it_is_loaded(options: dict[str, Json]):
    with pytest.raises(ConfigError, match=r"reward\.options"):
        load_function("slipstream.broker.rewards.pattern:Pattern", options)


def test_thought_and_answer_must_be_in_their_tags():
    for text, score in [
        ("<think>a</think><answer>b</answer>", 1.0),
        ("\n<think>a\n</think>\n<answer>\nb</answer>\n", 1.0),
        ("<think>a</think><answer>b</answer> bye", 0.0),
        ("<think>a</think> so <answer>b</answer>", 0.0),
        ("<think> </think><answer>b</answer>", 0.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a<answer></think>b</answer>", 0.0),
        ("<think>a</think><answer>b", 0.0),
        ("<think><think>a</think><answer>b</answer>", 0.0),
        ("a</think><answer>b</answer>", 0.0),
    ]:
        assert think_answer(transcript(text)) == score


def test_first_tag_may_be_in_the_prompt():
    assert think_answer(transcript("a</think><answer>b</answer>"), opened=True) == 1.0


# ---- lengths -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "penalty"), [(0, 0.0), (80, 0.0), (85, -0.25), (100, -1.0), (101, -1.0)]
)
def test_the_overlong_punishment_is_that_of_dapo(tokens: int, penalty: float):
    found = overlong(transcript("", tokens=tokens), max_tokens=100, cache_tokens=20)
    assert found == penalty
    halved = overlong(transcript("", tokens=tokens), max_tokens=100, cache_tokens=20, factor=0.5)
    assert halved == penalty / 2


@pytest.mark.parametrize("cache_tokens", [0, -1, 101])
def test_an_overlong_punishment_without_a_slope_is_no_reward(cache_tokens: int):
    found = outcome(
        "slipstream.broker.rewards.lengths:overlong",
        transcript(""),
        max_tokens=100,
        cache_tokens=cache_tokens,
    )
    assert "cache_tokens" in found.unavailable


@pytest.mark.parametrize(("tokens", "penalty"), [(5, 0.0), (20, -0.1), (500, -0.3)])
def test_a_linear_penalty_starts_late_and_ends(tokens: int, penalty: float):
    found = linear(transcript("", tokens=tokens), per_token=0.01, free_tokens=10, most=0.3)
    assert found == pytest.approx(penalty)
