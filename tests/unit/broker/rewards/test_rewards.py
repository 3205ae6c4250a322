"""Rewards by name, and what their results mean."""

import hashlib
import itertools
import math
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import pytest

from slipstream.broker.config import RewardSection, RewardTable
from slipstream.broker.ledger.scores import clamped
from slipstream.broker.reward_worker.choice import RewardChoice
from slipstream.broker.rewards import exact_match
from slipstream.broker.rewards.loading import RewardFunction, load_function
from slipstream.broker.rewards.outcomes import (
    FunctionInfo,
    InvalidResultsError,
    all_or_none,
    by_sibling,
    failure,
    outcome_of,
    outcomes_of,
    score_of,
    unavailable,
)
from slipstream.broker.rewards.sdk import Unavailable
from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.broker import ScoringItem, SubmitScores
from slipstream.wire.messages.codec import encode
from slipstream.wire.messages.trajectory import (
    MAX_EXCERPT,
    MAX_PART_NAME,
    MAX_PARTS,
    MAX_REASON,
    Json,
    Prompt,
    Score,
    Transcript,
)

Load = Callable[..., RewardFunction]
ITEM = ScoringItem(group_id=3, sibling=1, lease_id=9)
FUNCTION = FunctionInfo(name="test:function", version="7")


def transcript(response: str, truth: Json = "122") -> Transcript:
    return Transcript(
        prompt=Prompt(prompt="61+61=", ground_truth=truth, data_source="add"),
        response=response,
        num_response_tokens=3,
        finish_reason="stop",
    )


# ---- built in ------------------------------------------------------------------


@pytest.mark.parametrize(("response", "value"), [(" 122\n", 1.0), ("121", 0.0), ("", 0.0)])
def test_exact_match_ignores_white_space_at_both_ends(response: str, value: float):
    function = load_function("slipstream.broker.rewards.exact_match:score", {})
    assert function.call([transcript(response)]) == value
    assert function.info.name == "slipstream.broker.rewards.exact_match:score"


def test_exact_match_compares_with_any_json_truth():
    for truth, response, value in [
        (122, "122", 1.0),
        (0.5, " 0.5", 1.0),
        (True, "true", 1.0),
        (["122", 122.5, " x "], "x", 1.0),
        (["122"], '["122"]', 0.0),
        ({"a": [1]}, '{"a": [1]}', 1.0),
    ]:
        assert exact_match.score(transcript(response, truth)) == value


@pytest.mark.parametrize("truth", ["", [], ["122", None], ["122", ""]])
def test_exact_match_has_no_score_for_a_row_without_a_truth(truth: object):
    with pytest.raises(ValueError, match="ground_truth holds no text to compare with"):
        exact_match.score(transcript("", truth))


# ---- results -------------------------------------------------------------------


class Scalar:
    """Behaves like a scalar of numpy or torch."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __float__(self) -> float:
        if not isinstance(self.value, float):
            raise TypeError("only one element tensors can be converted to scalars")
        return self.value

    def __repr__(self) -> str:
        return "tensor"


class Text(str):
    __slots__ = ()

    def __float__(self) -> float:
        return 1.0


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


class TextlessError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


def test_a_number_is_the_reward():
    for result, value in [
        (2, 2.0),
        (True, 1.0),
        (-0.5, -0.5),
        (0, 0.0),
        (Scalar(0.25), 0.25),
        (Decimal("0.5"), 0.5),
        ({"score": Scalar(0.75)}, 0.75),
    ]:
        outcome = outcome_of(result)
        assert (outcome.reward, outcome.unavailable) == (value, "")


def test_a_mapping_carries_its_parts_as_far_as_they_are_finite_numbers():
    outcome = outcome_of(
        {"score": 0.5, "format": 1, "note": "fine", "broken": math.nan, "big": math.inf, 3: 4.0}
        | {"t": Scalar(2.0), "x" * 101: 1.0, "\ud800": 1.0, "": 1.0}
    )
    assert outcome.reward == 0.5
    assert outcome.parts == {"score": 0.5, "format": 1.0, "t": 2.0}


def test_what_is_no_reward_is_unavailable_and_never_zero():
    for result, why in [
        (math.nan, "invalid: returned nan"),
        (-math.inf, "invalid: returned -inf"),
        (Scalar(math.nan), "invalid: returned tensor"),
        (Scalar([1.0, 2.0]), "invalid: returned tensor"),
        (10**400, "invalid: returned 1000"),
        (1e308, "invalid: the reward is 1e+308; it may be at most 1e+15"),
        (-(10**40), "invalid: the reward is -1e+40; it may be at most 1e+15"),
        ({"score": 2e15}, "invalid: the reward is 2e+15; it may be at most 1e+15"),
        ({"turn_rewards": [3.5e38]}, "invalid: the reward of turn 1 is 3.5e+38; it may be at"),
        (None, "invalid: returned None"),
        ("1.0", "invalid: returned '1.0'"),
        (Text("1.0"), "invalid: returned '1.0'"),
        (b"1", "invalid: returned b'1'"),
        (1 + 2j, "invalid: returned (1+2j)"),
        ({"format": 1.0}, "invalid: returned {'format': 1.0}"),
        ({"score": None}, "invalid: returned {'score': None}"),
        ([1.0], "invalid: returned [1.0]"),
        (Unprintable(), "invalid: returned a Unprintable"),
    ]:
        outcome = outcome_of(result)
        assert outcome.reward is None
        assert outcome.unavailable.startswith(why)
        assert len(outcome.unavailable) <= 500
        assert outcome.parts == {}


def test_turns_may_have_rewards_of_their_own():
    for result, reward, turns in [
        ({"turn_rewards": [0.5, Scalar(0.25)], "m": 1}, 0.75, (0.5, 0.25)),
        ({"turn_rewards": (1, True), "score": 0.5}, 0.5, (1.0, 1.0)),
        ({"turn_rewards": iter([0, -1])}, -1.0, (0.0, -1.0)),
        ({"score": 1.0}, 1.0, ()),
    ]:
        outcome = outcome_of(result, 2)
        assert (outcome.reward, outcome.turn_rewards, outcome.unavailable) == (reward, turns, "")
        assert "turn_rewards" not in outcome.parts
        score = score_of(ITEM, transcript("a"), outcome, FUNCTION)
        assert score.turn_rewards == turns
        assert clamped(score, 2) == score


def test_rewards_of_other_turns_are_no_reward_at_all():
    for given, why in [
        ([1.0], "turn_rewards has 1 numbers, the answer 2 turns"),
        ([], "turn_rewards has 0 numbers, the answer 2 turns"),
        (itertools.repeat(1.0), "turn_rewards has more than 2 numbers, the answer 2 turns"),
        ([1.0, math.nan], "turn_rewards is [1.0, nan], expected a list of numbers"),
        (["1", "2"], "turn_rewards is ['1', '2'], expected a list of numbers"),
        ("12", "turn_rewards is '12', expected a list of numbers"),
        (3.0, "turn_rewards is 3.0, expected a list of numbers"),
        (None, "turn_rewards is None, expected a list of numbers"),
    ]:
        outcome = outcome_of({"score": 1.0, "turn_rewards": given}, 2)
        assert (outcome.reward, outcome.unavailable) == (None, f"invalid: {why}")
        assert outcome.turn_rewards == ()


def test_a_batch_is_judged_by_the_turns_of_each_answer():
    results = [{"turn_rewards": [1.0, 2.0]}, {"turn_rewards": [1.0, 2.0]}]
    good, bad = outcomes_of(results, [2, 1])
    assert good.reward == 3.0
    assert bad.unavailable == "invalid: turn_rewards has more than 1 numbers, the answer 1 turns"


def test_of_too_many_parts_the_first_are_kept_and_the_reward_counts():
    outcome = outcome_of({"score": 1.0, "text": "x"} | {f"m{n}": n for n in range(MAX_PARTS + 5)})
    assert (outcome.reward, outcome.left_out) == (1.0, 6)
    assert list(outcome.parts) == ["score", *(f"m{n}" for n in range(MAX_PARTS - 1))]
    score = score_of(ITEM, transcript("a"), outcome, FUNCTION)
    assert clamped(score) == score, "the broker would keep less than a function may return"


def test_of_a_long_name_of_a_function_its_end_is_kept_and_of_a_long_version_its_beginning():
    """A function lies at the end of a path, and a version begins with what tells it from others."""
    function, version = "/" + MAX_REASON * "d" + "/mine.py:score", "7-" + MAX_PART_NAME * "0"
    score = clamped(
        Score(group_id=0, sibling=0, lease_id=0, reward=1.0, function=function, version=version)
    )
    assert (score.function, score.version) == (function[-MAX_REASON:], version[:MAX_PART_NAME])
    assert score.function.endswith("/mine.py:score")
    assert score.version.startswith("7-")


@pytest.mark.parametrize("results", [[1.0, math.nan], (1.0, None), iter([1, "1"])])
def test_results_of_a_batch_are_judged_separately(results: object):
    good, bad = outcomes_of(results, [1, 1])
    assert good.reward == 1.0
    assert bad.unavailable.startswith("invalid: returned ")


def for_ever():
    while True:
        yield 1.0


def test_a_batch_of_the_wrong_count_or_kind_is_invalid_as_a_whole():
    for results, why in [
        ([1.0], "invalid: returned 1 results for 2 answers"),
        ([], "invalid: returned 0 results for 2 answers"),
        ([1.0] * 3, "invalid: returned more than 2 results for 2 answers"),
        (for_ever(), "invalid: returned more than 2 results for 2 answers"),
        (1.0, "invalid: returned 1.0, expected a list of 2 results"),
        ("11", "invalid: returned '11', expected a list of 2 results"),
        ({0: 1.0, 1: 1.0}, "invalid: returned {0: 1.0, 1: 1.0}, expected a list of 2 results"),
        (None, "invalid: returned None, expected a list of 2 results"),
    ]:
        with pytest.raises(InvalidResultsError) as caught:
            outcomes_of(results, [1, 1])
        assert failure(caught.value).unavailable == why


def test_a_group_with_an_answer_that_has_no_reward_has_none_at_all():
    fine = [outcome_of(1.0), outcome_of(0.0)]
    assert all_or_none(fine) == fine
    mixed = all_or_none([outcome_of(1.0), outcome_of(math.nan), outcome_of(None)])
    assert [one.unavailable for one in mixed] == ["answer 2 of 3: invalid: returned nan"] * 3
    assert {one.reward for one in mixed} == {None}


def test_an_exception_is_unavailable_with_its_reason():
    for error, why in [
        (ValueError("no number"), "raised ValueError: no number"),
        (SystemExit(3), "raised SystemExit: 3"),
        (KeyboardInterrupt(), "raised KeyboardInterrupt: "),
        (Unavailable("the judge is busy"), "the judge is busy"),
        (Unavailable(), "the reward function gave no reason"),
        (TextlessError(), "raised TextlessError: "),
        (ValueError("\ud800"), "raised ValueError: \\ud800"),
    ]:
        outcome = failure(error)
        assert (outcome.reward, outcome.unavailable) == (None, why)


def test_reasons_and_excerpts_are_bounded_and_only_a_failed_answer_has_an_excerpt():
    long = score_of(ITEM, transcript("y" * 5000), unavailable("x" * 5000), FUNCTION)
    assert (long.unavailable, long.excerpt) == ("x" * MAX_REASON, "y" * MAX_EXCERPT)
    assert clamped(long) == long
    fine = score_of(ITEM, transcript("y" * 5000), outcome_of(1.0), FUNCTION)
    assert (fine.reward, fine.excerpt) == (1.0, "")
    assert (fine.group_id, fine.sibling, fine.lease_id) == (3, 1, 9)
    assert (fine.function, fine.version) == ("test:function", "7")
    assert encode(SubmitScores(scores=(long, fine)))


def test_siblings_of_a_group_come_together_and_in_order():
    order = [(7, 2), (5, 0), (7, 0), (5, 1)]
    work = [
        (ScoringItem(group_id=group, sibling=sibling, lease_id=0), transcript(""))
        for group, sibling in order
    ]
    assert by_sibling(work) == [[2, 0], [1, 3]]


# ---- names ---------------------------------------------------------------------

SOURCE = """
from slipstream.broker.rewards.sdk import reward
import friend

def verl(data_source, solution_str, ground_truth, extra_info):
    return [data_source, solution_str, ground_truth, extra_info]

def verl_options(data_source, solution_str, ground_truth, extra_info=None, *, bonus, scale=1):
    return bonus * scale

def verl_batch(data_sources, solution_strs, ground_truths, extra_infos, *, bonus=0):
    return [bonus + len(solution) for solution in solution_strs]

def verl_any(solution_str, **kwargs):
    return sorted(kwargs)

def positions(a, b, c, d):
    return [a, b, c, d]

def two(a, b):
    return 0

@reward(version="2")
def one(transcript, bonus=0):
    return transcript.response, bonus

@reward(takes="batch")
async def many(transcripts, **options):
    return len(transcripts)

class Made:
    def __init__(self, bonus=0):
        if bonus < 0:
            raise ValueError("below 0")
        self.bonus = bonus
        self.closed = False
    async def score(self, transcript):
        return self.bonus
    def close(self):
        self.closed = True

class Versioned:
    def __init__(self, model="a"):
        self.version = f"judge {model}"
    def score(self, transcript):
        return 0.0

@reward(version="9")
class Declared(Versioned):
    pass

class Scoreless:
    pass

number = 3
"""


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    (tmp_path / "friend.py").write_text("VALUE = 1\n")
    path = tmp_path / "source.py"
    path.write_text(SOURCE)

    def load_it(name: str, /, **options: object) -> RewardFunction:
        return load_function(f"{path}:{name}", options)

    return load_it


def test_verls_arguments_of_a_batch_are_lists_and_so_is_what_it_returns(load: Load):
    function = load("verl_batch", bonus=1)
    assert function.info.takes == "batch"
    assert function.call([transcript("12"), transcript("1")]) == [3, 2]
    with pytest.raises(ConfigError, match=r"reward\.options\.bonos: .* it takes bonus"):
        load("verl_batch", bonos=1)


def test_an_exception_says_where_in_a_file_of_ones_own_it_was_raised(tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import json\n\n"
        "def parse(data_source, solution_str, ground_truth, extra_info):\n"
        "    return json.loads(solution_str)\n"
    )
    parse = load_function(f"{file}:parse", {})
    with pytest.raises(ValueError, match="Expecting value") as raised:
        parse.call([transcript("no json")])
    outcome = failure(raised.value)
    assert outcome.unavailable.endswith("(mine.py, line 4)")
    assert outcome.unavailable.startswith("raised JSONDecodeError: Expecting value")


def test_verls_four_arguments_are_passed_by_keyword_or_where_names_differ_by_position(load: Load):
    asked = ["add", "122!", "122", {}]
    assert load("verl").call([transcript("122!")]) == asked
    assert load("positions").call([transcript("122!")]) == asked
    assert load("verl_any", bonus=1).call([transcript("")]) == [
        "bonus", "data_source", "extra_info", "ground_truth",
    ]  # fmt: skip
    assert load("verl_options", bonus=3, scale=2).call([transcript("")]) == 6


def test_decorator_sets_what_a_function_takes_and_its_version(load: Load, tmp_path: Path):
    one, many = load("one", bonus=5), load("many", anything=1)
    assert one.call([transcript("a")]) == ("a", 5)
    assert (one.info.takes, one.info.version, one.is_async) == ("answer", "2", False)
    digest = hashlib.sha256((tmp_path / "source.py").read_bytes()).hexdigest()[:12]
    assert (many.info.takes, many.info.version, many.is_async) == ("batch", digest, True)


def test_a_class_is_made_with_its_options_and_closed(load: Load):
    made = load("Made", bonus=4)
    assert (made.info.takes, made.is_async) == ("answer", True)
    made.close()


def test_instance_may_declare_a_version_where_its_class_does_not(load: Load):
    assert load("Versioned").info.version == "judge a"
    assert load("Versioned", model="b").info.version == "judge b"
    assert load("Declared").info.version == "9"
    assert len(load("Made").info.version) == 12


def test_an_offered_argument_goes_to_functions_that_name_it_and_options_win(
    load: Load, tmp_path: Path
):
    load("one")
    name = f"{tmp_path / 'source.py'}:one"
    offered = load_function(name, {}, offered={"bonus": 8, "sandbox": "none"})
    assert offered.call([transcript("a")]) == ("a", 8)
    asked = load_function(name, {"bonus": 9}, offered={"bonus": 8})
    assert asked.call([transcript("a")]) == ("a", 9)
    anything = load_function(f"{tmp_path / 'source.py'}:verl_any", {}, offered={"sandbox": "x"})
    assert "sandbox" not in anything.call([transcript("")])  # type: ignore[operator]  # a list


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("verl", {"bonus": 1}, r"reward\.options\.bonus: .*:verl has no such .*; it takes no opt"),
        ("one", {"bonsu": 1}, r"reward\.options\.bonsu: .*; it takes bonus$"),
        ("one", {"transcript": 1}, r"reward\.options\.transcript: .*; it takes bonus$"),
        ("Made", {"bonsu": 1}, r"reward\.options\.bonsu: .*; it takes bonus$"),
        ("Made", {"bonus": -1}, r"cannot be made with .*'bonus': -1.*ValueError: below 0"),
        ("verl_options", {}, r"takes \(data_source, .*, expected \(data_source, solution_str"),
        ("two", {}, r"takes \(a, b\), expected \(data_source, solution_str"),
        ("Scoreless", {}, "is a class without a method score"),
        ("number", {}, "is not callable"),
        ("grade", {}, "has no attribute 'grade'"),
    ],
)
def test_what_does_not_fit_is_named(load: Load, name: str, options: dict[str, object], why: str):
    with pytest.raises(ConfigError, match=why):
        load(name, **options)


def test_a_function_that_is_not_there_is_named():
    for name, why in [
        ("slipstream.broker.rewards.exact_match", "is not MODULE:FUNCTION"),
        ("no_such_module_at_all:score", "No module named"),
        ("no_such_file.py:score", "No such file"),
    ]:
        with pytest.raises(ConfigError, match=why) as caught:
            load_function(name, {}, setting="reward.sources.math")
        assert repr(name) in str(caught.value)
        assert "reward.sources.math.function" in str(caught.value)


@pytest.mark.parametrize("body", ["1 / 0", "raise SystemExit(3)", "def ("])
def test_a_file_that_fails_at_import_is_a_clear_error_and_can_be_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str
):
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / f"broken_{abs(hash(body))}.py"
    path.write_text(body + "\n")
    with pytest.raises(ConfigError, match=r"ZeroDivisionError|SystemExit|SyntaxError"):
        load_function(f"{path}:score", {})
    assert path.stem not in sys.modules


# ---- several rewards -----------------------------------------------------------


def test_a_data_source_has_its_own_reward_and_all_others_the_first():
    settings = RewardSection(
        function="a:b",
        options={"x": 1},
        sources={"code": RewardTable(function="c:d", options={"y": 2})},
    )
    choice = RewardChoice(settings)
    assert [(r.setting, r.function, r.options) for r in choice.rewards] == [
        ("reward", "a:b", {"x": 1}),
        ("reward.sources.code", "c:d", {"y": 2}),
    ]
    assert [choice.index_of(source) for source in ("code", "math", "")] == [1, 0, 0]


def test_a_function_that_is_asked_for_scores_every_data_source():
    settings = RewardSection(
        function="a:b", options={"x": 1}, sources={"code": RewardTable(function="c:d")}
    )
    choice = RewardChoice(settings, function="e:f")
    assert [(r.function, r.options) for r in choice.rewards] == [("e:f", {"x": 1})]
    assert [choice.index_of(source) for source in ("code", "math")] == [0, 0]


def test_a_data_source_without_a_function_is_refused():
    with pytest.raises(ConfigError, match=r"reward\.sources\.code\.function is not set"):
        RewardChoice(RewardSection(sources={"code": RewardTable()}))
