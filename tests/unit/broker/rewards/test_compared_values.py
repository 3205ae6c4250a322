"""Numbers and mathematics are compared by value."""

import contextlib
import sys
import threading
import time

import pytest

from slipstream.broker.rewards import math_answer, numeric
from slipstream.broker.rewards.loading import load_function
from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.trajectory import Json
from tests.support.judged import outcome, transcript
from tests.support.waiting import HANG_S

# ---- numeric -------------------------------------------------------------------


def test_a_number_is_right_however_it_is_written():
    for answer, truth in [
        ("It is 1,234.50 dollars", 1234.5),
        ("so $-1,000$", "-1000"),
        ("-$5", -5),
        ("5-3", 3),
        ("x = \N{MINUS SIGN}7.", -7),
        ("#### 72", "She sold 48 + 24.\n#### 72"),
        (r"\boxed{3} and then 99", 3),
        ("3 <think>7</think> 4", 4),
        (r"\boxed{3}" + " and we check it again" * 1_000, 3),
        ("maybe 3/4", 0.75),
        (r"$\dfrac{3}{4}$", "3/4"),
        (r"-\frac{1}{4}", -0.25),
        ("1.5e3", 1500),
        (".5", "1/2"),
        ("50%", 50),
        (r"50\%", 0.5),
        ("0.5", "50%"),
        ("12345678901234567890", 12345678901234567890),
    ]:
        assert numeric.score(transcript(answer, truth)) == {"score": 1.0, "parsed": 1.0}


def test_another_number_and_no_number_are_wrong():
    for answer, truth, parsed in [
        ("13", 12, 1.0),
        ("12345678901234567891", 12345678901234567890, 1.0),
        ("none", 12, 0.0),
        ("", 12, 0.0),
        ("1/0", 12, 0.0),
        ("9" * 10_000, 9, 0.0),
        ("50%", 500, 1.0),
        ("nan inf", 0, 0.0),
        (r"\boxed{12} is wrong, it is \boxed{1", 12, 0.0),
        ("<answer>12", 12, 0.0),
        ("<think>12", 12, 0.0),
    ]:
        assert numeric.score(transcript(answer, truth)) == {"score": 0.0, "parsed": parsed}


def test_tolerances_are_relative_and_absolute():
    assert numeric.score(transcript("101", 100), relative=0.01)["score"] == 1.0
    assert numeric.score(transcript("101.1", 100), relative=0.01)["score"] == 0.0
    assert numeric.score(transcript("0.05", 0), absolute=0.1)["score"] == 1.0
    assert numeric.score(transcript("0.05", 0))["score"] == 0.0


def test_a_percent_sign_can_be_ignored_or_obeyed():
    half = transcript("50%", 0.5)
    assert numeric.score(half, percent="ignored")["score"] == 0.0
    assert numeric.score(half, percent="hundredth")["score"] == 1.0
    assert numeric.score(transcript("50%", 50), percent="hundredth")["score"] == 0.0


def test_a_number_without_a_mark_is_none_where_marks_are_required():
    assert numeric.score(transcript("12", 12), require_mark=True)["parsed"] == 0.0
    assert numeric.score(transcript("#### 12", 12), require_mark=True)["score"] == 1.0


@pytest.mark.parametrize("truth", ["none", True, None, [1]])
def test_a_row_without_a_number_gets_no_reward(truth: Json):
    found = outcome("slipstream.broker.rewards.numeric:score", transcript("1", truth))
    assert found.reward is None
    assert "ground_truth" in found.unavailable


# ---- mathematics ---------------------------------------------------------------


def test_mathematics_is_compared_by_value():
    for answer, truth, score in [
        (r"Thus $x = \frac{2}{4}$.", "1/2", 1.0),
        (r"\boxed{(x+1)^2}", "$x^2 + 2x + 1$", 1.0),
        (r"\boxed{\{1, 2\}}", r"\{2, 1\}", 1.0),
        (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", 1.0),
        (r"\boxed{y^2 + x^2}", "x^2 + y^2", 1.0),
        (r"$e^{-x^2}$", "e^{-x^2}", 1.0),
        (r"$10^{100}$", "10^{100}", 1.0),
        (r"\boxed{0.00001}", 1e-05, 1.0),
        (r"\boxed{e-5}", 1e-05, 0.0),
        (r"\boxed{\frac{1}{20000}}", "5e-05", 1.0),
        (r"\boxed{10^{16}}", 1e16, 1.0),
        (r"\boxed{1000}", "1.0e3", 1.0),
        ("#### 72\n\n#### Explanation\nBecause 48/2=24", "72", 1.0),
        ("#### 72 ####", "72", 1.0),
        ("so\n####\n72", "72", 1.0),
        (r"$2^{2024}$", "2 * 2^{2023}", 1.0),
        (r"$3^{n+1}$", r"3 \cdot 3^n", 1.0),
        ("$120$", "5!", 1.0),
        ("42", 42, 1.0),
        (r"\boxed{3}", [2, 3], 1.0),
        (r"\boxed{41}", 42, 0.0),
        (r"\boxed{8 and 7}", 7, 0.0),
        ("<answer>72 apples or 71 apples</answer>", 71, 0.0),
        ("<answer>72 apples</answer>", 72, 1.0),
        ("#### Final answer\n\\(7\\)", 7, 1.0),
        ("no idea", 42, 0.0),
        (r"\boxed{\frac{1}{", 42, 0.0),
        (r"\boxed{2} hmm </think> \boxed{3}", 2, 0.0),
        (r"So **12** apples. $\boxed{12}$", 12, 1.0),
        ("The answer is **42**.", 42, 1.0),
        (r"**1.** do it. $\boxed{3}$", 3, 1.0),
        (r"**(1)** and \boxed{5}", 5, 1.0),
        ("**Total:**12345", 12345, 1.0),
        ("that is**12345**.", 12345, 1.0),
        ("***7***", 7, 1.0),
        (r"**So** \boxed{x**2}", "x^2", 1.0),
        (r"\boxed{2 ** 3}", 8, 1.0),
        (r"Far less than $10^{100000}$: \boxed{3}", 3, 1.0),
        ("Far less than $10^{100000}$, hence\n#### 3", 3, 1.0),
        ("<think>a</think>\n<answer>72</answer>", 72, 1.0),
        ("<answer> 72 </answer>", 72, 1.0),
        ("<answer>72.</answer>", 72, 1.0),
        ("<answer>72 dollars</answer>", 72, 1.0),
        ("<answer>The answer is $72$.</answer>", 72, 1.0),
        (r"<answer>2\sqrt{3}</answer>", r"\sqrt{12}", 1.0),
        (r"<answer>2\sqrt{3}</answer>", 2, 0.0),
        ("<answer>(1, 2)</answer>", "(1,2)", 1.0),
        ("<think>a</think>\n<answer>71</answer> but 72", 72, 0.0),
        ("#### 71\nand not 72", 72, 0.0),
        ("#### 72 clips", 72, 1.0),
        (r"\boxed{7} is wrong, it is \boxed{8}", 8, 1.0),
        (r"\boxed{7} is wrong, it is \boxed{8}", 7, 0.0),
        (r"\boxed{7} is wrong, it is \boxed{8", 7, 0.0),
        (r"<think>\boxed{7}", 7, 0.0),
        (r"\boxed{9}" + "\nWe check it again." * 500, 9, 1.0),
        (r"\boxed{" + "9 + " * 1_000 + "0}", 9_000, 0.0),
        (r"\boxed{\varnothing}", r"\emptyset", 1.0),
        (r"It costs \$5.", 5, 1.0),
        (r"It is \$1,234.50, not \$7,000 less.", 7000, 1.0),
        (r"\boxed{12}", "12 dollars", 1.0),
        (r"\boxed{12 dollars}", "12 dollars", 1.0),
        (r"\boxed{13}", "12 dollars", 0.0),
        (r"\boxed{12}", r"\text{12 dollars}", 1.0),
        (r"\boxed{\textbf{about 12 dollars}}", "12", 1.0),
        ("<answer>7</answer>", "7 people", 1.0),
        ("The answer is 7.", "She has 7 apples.", 1.0),
        ("12000", "12,000 people", 1.0),
        (r"\boxed{\$12}", "12 dollars", 1.0),
        (r"\boxed{1/2}", "1/2 cup", 1.0),
        (r"\boxed{1/2 cup}", 0.5, 1.0),
        (r"\boxed{1}", "1/2 cup", 0.0),
        ("<answer>5 miles/hour</answer>", 5, 1.0),
        ("<answer>Total = 72 dollars</answer>", 72, 1.0),
        ("<answer>5 m long</answer>", 5, 1.0),
        (r"\boxed{5}", "5 cents of 12 dollars", 0.0),
        (r"\boxed{3}", "3 + x apples", 0.0),
        (r"\boxed{3}", "x - 3 years", 0.0),
        (r"\boxed{2}", r"2\pi radians", 0.0),
        (r"\boxed{2\sqrt{x} apples}", 2, 0.0),
        (r"\boxed{5}", r"\log 5 apples", 0.0),
        (r"\boxed{2}", "2x dollars", 0.0),
        ("<answer>John has 72 apples left</answer>", 72, 1.0),
        (r"\boxed{-5}", "-5 degrees", 1.0),
        (r"\boxed{5}", "-5 degrees", 0.0),
        (r"\boxed{.5}", "It is about .5 cups.", 1.0),
        (r"\boxed{72}", r"72\text{ square feet}", 1.0),
        (r"\boxed{720}", "6! ways", 1.0),
        (r"\boxed{6}", "6! ways", 0.0),
        (r"\boxed{(5, \infty)}", "(5, infinity)", 1.0),
    ]:
        assert math_answer.score(transcript(answer, truth), limit_s=HANG_S)["score"] == score


@pytest.mark.parametrize(
    "words",
    [
        "negative 5",
        "minus 5 degrees",
        "5 below zero",
        "5 million",
        "5 million dollars",
        r"5\text{ million}",
        r"5\text{ dozen}",
        "5 dozen",
        "5 hundred",
        "5 thirds of a cup",
        "5 and a half",
        "5 squared",
        "5 times the radius",
        "5 - x apples",
        "square root of 5",
        "half of 5",
        "half of it is 5",
        "pi over 5",
        "5 over pi",
        "all real numbers except 5",
        r"\text{all real numbers except } 5",
        "undefined at x = 5",
        "x is greater than 5",
        "at most 5",
        "5 at least",
        "5 or more",
        "not 5",
        "it isn't exactly 5",
        "she doesn't have 5",
        r"5\text{ apples and }x",
        "Team 5",
    ],
)
def test_words_that_may_make_another_number_are_no_number(words: str):
    found = math_answer.score(transcript(f"<answer>{words}</answer>", 5), limit_s=HANG_S)
    assert found["score"] == found["parsed"] == 0.0
    with pytest.raises(ValueError, match="ground_truth holds no mathematics, or a number in other"):
        math_answer.score(transcript(r"\boxed{5}", words))


def test_truths_are_read_as_math_verify_reads_them():
    for truth, answer in [
        (r"\$32", "32"),
        (r"\$18.90", r"\$18.90"),
        (r"\$32,\!348", "32348"),
        (r"\$1{,}234", r"\$1,234"),
        (r"5\$", "5"),
        ("$18", "18"),
        (r"$\$32$", r"\$32"),
        (r"\$\frac{1}{2}", "0.5"),
        (r"10\text{ cm}", "10"),
        (r"90^\circ", "90"),
        (r"50\%", "50%"),
        (r"\frac12", r"\frac{1}{2}"),
        (r"\text{Monday}", r"\text{Monday}"),
        ("[1,2)", "[1,2)"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
        ("72.", "72"),
        ("16 - 3 - 4 = 9 eggs, 9 * 2 = $18.\n#### 18", "18"),
        (r"So it is $x = 5$, that is \boxed{5}.", "5"),
    ]:
        right = transcript(f"\\boxed{{{answer}}}", truth)
        assert math_answer.score(right, limit_s=HANG_S)["score"] == 1.0, truth
        wrong = transcript(r"\boxed{31}", truth)
        assert math_answer.score(wrong, limit_s=HANG_S)["score"] == 0.0, truth


@pytest.mark.parametrize("truth", ["", "\\text{}", r"9^{9^{9}}", [], ["7", ""]])
def test_a_row_without_mathematics_gets_no_reward(truth: Json):
    with pytest.raises(ValueError, match="ground_truth holds no mathematics"):
        math_answer.score(transcript("7", truth))


# The alarm may ring in a callback of the garbage collector, which swallows it; it rings again.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "answer",
    [
        r"\boxed{9^{9^{9^9}}}",
        r"\boxed{9**9**9}",
        r"**So** \boxed{**9** 9 ** 9 ** 9}",
        r"\boxed{9**99999}",
        r"$9^{9^9}$ and \boxed{9^{9^9}}",
        r"\boxed{10^{999999999}}",
        r"\boxed{10^{9999 \cdot 9999}}",
        r"\boxed{10^{\frac{9999}{1} \cdot 9999}}",
        r"\boxed{(10^{9999})^{9999}}",
        r"\boxed{\sum_{i=1}^{9999} \sqrt{i}}",
        r"\boxed{x^{97} + x^{13} + 1 = 0}",
        r"\boxed{(99999999)!}",
        r"\boxed{9!!!!!!}",
        r"\boxed{" + "9" * 1500 + "}",
        r"\boxed{" + "(" * 1500 + "1" + ")" * 1500 + "}",
        "{" * 100_000,
        r"\frac" * 10_000,
        "$" * 5_000,
        "1," * 5_000,
    ],
)
def test_hostile_mathematics_is_wrong_and_soon_done(answer: str):
    assert math_answer.score(transcript(answer, "42"), limit_s=0.3)["score"] == 0.0


def test_an_evaluation_that_takes_too_long_is_wrong(monkeypatch: pytest.MonkeyPatch):
    def never(*_: object, **__: object) -> bool:
        while True:
            with contextlib.suppress(Exception):  # as sympy does
                sum(range(1000))

    monkeypatch.setattr(math_answer.math_verify, "verify", never)
    for limit_s in (0.02, 0.5, 5.0):
        found = math_answer.score(transcript("42", "42"), limit_s=limit_s)
        if found["parsed"]:  # else the machine was too slow for that
            break
    assert found == {"score": 0.0, "parsed": 1.0, "timed_out": 1.0}


def test_waiting_for_a_core_makes_no_right_answer_wrong(monkeypatch: pytest.MonkeyPatch):
    def starved(*_: object, **__: object) -> bool:
        time.sleep(1.5)  # no CPU was to be had
        return True

    assert math_answer.score(transcript("42", "42"))["score"] == 1.0  # all is loaded
    monkeypatch.setattr(math_answer.math_verify, "verify", starved)
    assert math_answer.score(transcript("42", "42"), limit_s=1.0)["score"] == 1.0


async def test_mathematics_works_on_other_threads_and_in_event_loops():
    found: list[float] = []

    def score() -> None:
        found.append(math_answer.score(transcript("42", "42"), limit_s=HANG_S)["score"])

    thread = threading.Thread(target=score)
    thread.start()
    thread.join()
    score()
    assert found == [1.0, 1.0]


def test_missing_math_verify_names_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    monkeypatch.delitem(sys.modules, "slipstream.broker.rewards.math_answer")
    with pytest.raises(ConfigError, match=r"pip install 'slipstream\[rewards\]'"):
        load_function("slipstream.broker.rewards.math_answer:score", {})


# ---- the judge -----------------------------------------------------------------


def test_an_exponent_ends_where_its_bracket_or_its_word_does():
    for text, is_big in [
        ("2^3 12345678", False),
        ("2^3, 12345678", False),
        ("2^{3} + 12345678", False),
        ("(2^3) 12345678", False),
        ("2^12345", True),
        ("2^{12345}", True),
        ("2^{(12345)}", True),
        ("2^{3}^{4}", True),  # a power of a power
        ("2^{3} 4^x", False),
    ]:
        assert math_answer.is_too_big(text) is is_big
