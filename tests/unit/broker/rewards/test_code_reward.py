import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.broker.rewards import code, code_tester
from slipstream.broker.rewards.code import (
    Budget,
    graded,
    parse_tests,
    read_tests,
    same_text,
    same_value,
    score,
)
from slipstream.broker.rewards.sdk import Unavailable
from slipstream.broker.sandbox import sandbox
from slipstream.broker.sandbox.bubblewrap import SandboxUnavailableError
from slipstream.broker.sandbox.sandbox import Limits
from slipstream.wire.messages.trajectory import Json, Prompt, Transcript
from tests.support.bubblewrap import bubblewrap_works
from tests.support.waiting import HANG_S, state_of, until, until_stopped

SUMS: dict[str, Json] = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
CALLS: dict[str, Json] = {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, 7]}
ASSERTS: dict[str, Json] = {"asserts": "assert add(1, 2) == 3\nassert add(3, 4) == 7"}
RIGHT = "def add(a, b):\n    return a + b\n"


@pytest.fixture
def _namespaces() -> None:
    if not bubblewrap_works():
        pytest.skip("bubblewrap does not work here")


def scored(program: str, truth: Json, **options: Any) -> dict[str, float]:  # noqa: ANN401
    patient = {"test_s": HANG_S, "total_s": HANG_S} | options
    return score(transcript(f"Here:\n```python\n{program}\n```\n", truth), **patient)


def started_by(
    start: Callable[..., sandbox.ProgramOutcome],
    program: str,
    truth: Json,
    *,
    test_s: float = HANG_S,
    total_s: float = HANG_S,
) -> dict[str, float]:
    budget = Budget(test_s, total_s, 512 << 20, "namespaces", start)
    return graded(transcript(f"Here:\n```python\n{program}\n```\n", truth), budget)


def transcript(answer: str, truth: Json) -> Transcript:
    prompt = Prompt(prompt="", ground_truth=truth)
    return Transcript(prompt=prompt, response=answer, num_response_tokens=1, finish_reason="stop")


# ---- reading answers and test cases --------------------------------------------


def test_test_cases_of_one_object_each_are_read_as_those_of_one_object():
    asked = [{"input": "1 2\n", "output": "3\n"}, {"input": "3 4\n", "output": "7\n"}]
    padded = [{**pair, "type": "stdin_stdout", "fn_name": None} for pair in asked]
    for truth in (asked, padded, json.dumps(padded), {"test_cases": asked, "language": "python"}):
        assert parse_tests(truth) == parse_tests(SUMS)
    lines = [{"input": "1\n2", "output": "3"}, {"input": "3\n4", "output": "7"}]
    for name in ({"fn_name": "add"}, {"metadata": {"func_name": "add"}, "testtype": "functional"}):
        assert parse_tests([pair | name for pair in lines]) == parse_tests(CALLS)
    metadata = {"metadata": '{"func_name": "add"}'}
    assert parse_tests([pair | metadata for pair in lines]) == parse_tests(CALLS)
    assert parse_tests([json.dumps(pair) for pair in asked]) == parse_tests(SUMS)
    assert parse_tests({"fn_name": "add", "test_cases": lines}) == parse_tests(CALLS)
    inner = {name: one for name, one in CALLS.items() if name != "fn_name"}
    padded_inside = {"fn_name": "add", "test_cases": {**inner, "asserts": None}}
    assert parse_tests(padded_inside) == parse_tests(CALLS)
    assert parse_tests({"test_cases": json.dumps(asked)}) == parse_tests(SUMS)


@pytest.mark.parametrize(
    "truth",
    [
        "x = 5",
        "[{'input': '1', 'output': '2'}]",  # as Python writes it
        "def test_add():\n    assert add(1, 2) == 3",
        {"asserts": "def check(candidate):\n    assert candidate(1, 2) == 3"},
        {"test_cases": "12"},
        [{"input": "[1,2]\n3", "output": "6", "testtype": "functional"}],
        {**CALLS, "fn_name": ["add"]},
        {**CALLS, "fn_name": "lib.add"},
        {**ASSERTS, "fn_name": "add(a, b)"},
        {**ASSERTS, "fn_name": "sub"},
        [{"input": "1", "output": "1", "fn_name": "add it"}],
    ],
)
def test_what_tests_nothing_is_refused(truth: Json):
    with pytest.raises(ValueError, match="ground_truth: "):
        parse_tests(truth)


@pytest.mark.parametrize(
    "truth",
    [
        "[" * 100_000,
        {"asserts": "assert add(" + "-" * 50_000 + "1)"},
        {"asserts": "assert add(1)" + " + 1" * 5_000},
        {"fn_name": "f", "inputs": ["[" * 100_000], "outputs": [1]},
        {"fn_name": "f", "inputs": ["1"], "outputs": ["[" * 100_000 + "]" * 100_000]},
    ],
    ids=range(5),
)
def test_what_is_nested_too_deep_is_refused(truth: Json):
    with pytest.raises(ValueError, match=r"ground_truth: .*nested"):
        read_tests(Prompt(prompt="", ground_truth=truth))


@pytest.mark.parametrize("name", ["Solution().add", "Solution.add", "add"])
def test_a_method_is_named_by_its_last_part(name: str):
    assert parse_tests({**CALLS, "fn_name": name}) == parse_tests(CALLS)
    pair: Json = {"input": "1\n2", "output": "3", "metadata": {"func_name": name}}
    assert parse_tests([pair]).function == "add"
    assert parse_tests({**ASSERTS, "fn_name": name}).function == "add"
    assert parse_tests({"fn_name": name, "asserts": "assert Solution().add(1, 2)"}).names == {
        "Solution"
    }


@pytest.mark.parametrize("tests", [["assert same(add(1, 2), 3)"], "assert same(add(1, 2), 3)"])
def test_a_name_beside_test_cases_is_that_of_their_assertions(tests: Json):
    for truth in (
        {"fn_name": "add", "test_cases": tests},
        {"fn_name": "add", "test_cases": {"asserts": tests}},
        json.dumps({"fn_name": "add", "test_cases": tests, "asserts": None}),
    ):
        assert parse_tests(truth) == parse_tests({"fn_name": "add", "asserts": tests})
        assert parse_tests(truth).names == {"add"}
    hidden = ["from math import *\nassert same(add(1, 2), 3)"]
    assert parse_tests({"fn_name": "add", "test_cases": hidden}).names == {"add"}


@pytest.mark.parametrize(
    ("given", "expected", "right"),
    [
        (["5"], "101", (101, "101")),
        (["5"], "true", (True, "true")),
        (["5"], "[1]", ([1], "[1]")),
        (["5"], "0101", ("0101",)),
        (["5"], 101, (101,)),
        ('"5"', "101", (101,)),
    ],
)
def test_text_beside_arguments_may_be_the_result_itself(given: Json, expected: Json, right: Json):
    truth: Json = {"fn_name": "f", "inputs": [given], "outputs": [expected]}
    assert parse_tests(truth).calls == ((["5"], *right),)


def test_keys_without_a_value_are_absent():
    padding: Json = dict.fromkeys(("inputs", "outputs", "fn_name", "asserts"))
    for truth in (SUMS, CALLS, ASSERTS, {**ASSERTS, "fn_name": "add"}):
        assert parse_tests(padding | truth) == parse_tests(truth)
        assert parse_tests(dict.fromkeys(padding, "") | truth) == parse_tests(truth)
        assert parse_tests(json.dumps(padding | truth)) == parse_tests(truth)


NAN = float("nan")


@pytest.mark.parametrize(
    ("padded", "truth"),
    [
        ({"inputs": ["1 2\n", None, "3 4\n"], "outputs": ["3\n", NAN, "7\n"]}, SUMS),
        ({**SUMS, "fn_name": NAN, "asserts": NAN}, SUMS),
        ({"inputs": [["1 2\n", None], "3 4\n"], "outputs": [["3\n", NAN], "7\n"]}, SUMS),
        ({**CALLS, "inputs": [[1, 2], [3, 4], None], "outputs": [3, 7, None]}, CALLS),
        ({"asserts": ["assert add(1, 2) == 3\nassert add(3, 4) == 7", None]}, ASSERTS),
        ([None, {"input": "1 2\n", "output": "3\n", "fn_name": NAN, "metadata": NAN}, {}], None),
    ],
)
def test_items_without_a_value_are_absent(padded: Json, truth: Json):
    first: Json = {"inputs": ["1 2\n"], "outputs": ["3\n"]}
    assert parse_tests(padded) == parse_tests(first if truth is None else truth)


def test_a_function_may_return_nothing():
    truth: Json = {"fn_name": "f", "inputs": [[1], [2]], "outputs": [None, 3]}
    assert parse_tests(truth).calls == (([1], None), ([2], 3))


@pytest.mark.parametrize("missing", [NAN, "NaN", [[2.0, NAN]], {"mean": NAN}])
def test_a_result_that_no_function_can_return_is_refused(missing: Json):
    truth: Json = {"fn_name": "f", "inputs": [[1], [2]], "outputs": [1.0, missing]}
    with pytest.raises(ValueError, match="ground_truth: an output is missing, or NaN"):
        parse_tests(truth)


def test_test_cases_are_read_in_all_their_shapes():
    assert parse_tests(SUMS) == parse_tests(json.dumps(SUMS))
    assert parse_tests(SUMS).inputs == (b"1 2\n", b"3 4\n")
    assert parse_tests(CALLS).calls == (([1, 2], 3), ([3, 4], 7))
    as_text: Json = {"fn_name": "f", "inputs": ['[1, 2]\n"a"'], "outputs": ['"b"']}
    assert parse_tests(as_text).calls == (([[1, 2], "a"], "b"),)
    assert len(parse_tests(ASSERTS)) == 2
    named = parse_tests({"fn_name": "f", "asserts": "assert f(1)"})
    assert (named.function, named.texts) == ("f", ("assert f(1)",))
    assert len(parse_tests(["assert f(1)", "assert f(2)"])) == 2
    assert len(parse_tests("def check(f):\n    assert f(1)\n    assert f(2)\ncheck(g)")) == 1
    assert len(parse_tests("s = Stack()\ns.push(1)\nassert s.pop() == 1")) == 1


def test_what_is_no_test_case_is_refused():
    for truth in [
        "",
        "no python",
        [],
        7,
        {"inputs": ["1"]},
        {"inputs": [], "outputs": []},
        {"inputs": ["1"], "outputs": []},
        {"fn_name": "f", "inputs": ["not json"], "outputs": ["1"]},
        {"fn_name": None, "asserts": None},
        [{"input": "1", "output": None}],
        {"inputs": ["1"], "outputs": [None]},
        {"inputs": [None], "outputs": ["1"]},
        {"inputs": [None], "outputs": [None]},
        {"fn_name": "f", "inputs": [None], "outputs": [1]},
        ["assert f(1)", 3],
        '{"fn_name": "f", "inputs": [[1' + "0" * 5000 + ']], "outputs": [1]}',
        {"fn_name": "f", "inputs": ["1" + "0" * 5000], "outputs": [1]},
        [{"input": "1", "output": "1"}, {"input": "1", "output": "1", "fn_name": "f"}],
    ]:
        with pytest.raises(ValueError, match="ground_truth"):
            parse_tests(truth)


def test_lines_are_compared_without_white_space_at_their_ends_where_that_is_asked():
    for printed, expected, same in [
        ("3\n", "3", True),
        (" 3 \r\n4\n\n", "3\n4", True),
        ("3\n\n4", "3\n4", False),
        ("3 4", "3\n4", False),
        ("2.50", "2.5", False),
    ]:
        assert same_text(printed, expected, exact=True) is same


BIG = "9" * 5000


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("1  2\t3\r\n", "1 2 3", True),
        ("1\n2\n\n3", "1 2 3", True),
        ("1 2", "1 2 3", False),
        ("", "", True),
        ("0.333333", "0.333333333333", True),
        ("0.33333", "0.333333333333", False),
        ("2.50", "2.5", True),
        ("2", "2.0", True),
        ("2.0000001", "2", True),
        ("1e3", "1000.0", True),
        ("123456789.3", "123456789.25", True),
        ("123456790", "123456789", False),  # whole numbers are counted
        ("123456789.25", "123456789", False),
        ("007", "7", True),
        (BIG, BIG, True),
        (BIG, BIG[:-1] + "8", False),
        (f"{BIG}.0", BIG, True),  # beyond what a float holds
        (f"{BIG}.1", BIG, False),
        ("1e999", "2e999", False),
        ("1e999", "1.0000001e999", True),
        ("5" + "0" * 16 + ".0", "5" + "0" * 15 + "1", False),
        ("5e16", "5" + "0" * 15 + "1", False),
        ("1e99999999999999999999", "1", False),
        (f"{BIG}.5", f"{BIG}.25", True),
        ("inf", "inf", True),
        ("nan", "1.5", False),
        ("Yes", "YES", False),
        ("1_0", "10", False),
        ("0.1 a", "0.1000000001 a", True),
    ],
)
def test_what_a_program_prints_is_compared_as_judges_do(printed: str, expected: str, same: bool):
    assert same_text(printed, expected) is same


@pytest.mark.parametrize(
    ("result", "expected", "same"),
    [
        (0.1 + 0.2, 0.3, True),
        ([1.0, [0.1 + 0.2, "a"]], [1, [0.3, "a"]], True),
        ({"x": [2.0000001]}, {"x": [2]}, True),
        ({"x": 1.0}, {"y": 1.0}, False),
        ([0.1, 0.2], [0.1], False),
        (123456790, 123456789, False),
        (123456789.25, 123456789, False),
        (123456789.3, 123456789.25, True),
        (10**400, 1.5, False),
        (5e16, 5 * 10**16 + 1, False),
        ([10**18], [1e18 + 1024.0], True),
        (1.0, 10**400, False),
        (float("inf"), 10**400, False),
        (float("nan"), 1.0, False),
        ("0.30", "0.3", False),
        (0.1 + 0.2, [0.3], True),
    ],
)
def test_results_are_compared_as_judges_do_however_deep(result: Json, expected: Json, same: bool):
    assert same_value(result, expected) is same
    assert same_value(result, expected, exact=True) is False


def test_a_wrapped_expected_value_is_unwrapped():
    for exact in (False, True):
        assert same_value(3, 3, exact=exact)
        assert same_value(3, [3], exact=exact)
        assert same_value([3], [3], exact=exact)
        assert not same_value([3], 3, exact=exact)


@pytest.mark.parametrize(
    "value", [None, True, 2**100, 1.5, "a", [1, (2, {3})], {1: {"a": b"x"}}, frozenset([1]), 1 + 2j]
)
def test_plain_data_survives_the_way_between_the_processes(value: object):
    encoded = json.loads(json.dumps(code_tester.encode(value)))
    decoded = code_tester.decode(encoded, None)
    assert (type(decoded), decoded) == (type(value), value)


def test_an_object_of_the_answer_loses_its_own_idea_of_equality():
    class Equal(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    decoded = code_tester.decode(code_tester.encode([Equal(1)]), None)
    assert type(decoded[0]) is int
    with pytest.raises(TypeError):
        code_tester.encode(object())


def test_results_that_are_no_json_equal_nothing():
    assert code.as_json(code_tester.encode((1, [2], {"a": (3,)}))) == [1, [2], {"a": [3]}]
    assert code.as_json(code_tester.encode({1})) != [1]


def test_an_answer_without_a_program_scores_nothing_without_a_sandbox():
    result = score(transcript("It is 3.", SUMS))
    assert result == {"score": 0.0, "passed": 0, "ran": 0, "formatted": 0}


def in_the_sandbox(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.integration(pytest.mark.usefixtures("_namespaces")(test))


# ---- with the sandbox ----------------------------------------------------------


@in_the_sandbox
@pytest.mark.parametrize("truth", [CALLS, ASSERTS, json.dumps(CALLS)])
def test_a_right_function_passes(truth: Json):
    assert scored(RIGHT, truth) == {"score": 1.0, "passed": 2, "ran": 1, "formatted": 1}


@in_the_sandbox
def test_a_right_program_passes_and_a_half_right_one_gets_half():
    assert scored("print(sum(map(int, input().split())))", SUMS)["score"] == 1.0
    assert scored("print(3)", SUMS)["score"] == 0.5
    assert scored("print(3)", SUMS, all_or_nothing=True)["score"] == 0.0


@in_the_sandbox
def test_numbers_are_near_unless_they_must_be_exact():
    thirds = {"inputs": ["1", "2"], "outputs": ["0.333333333333", "0.666666666667"]}
    program = "print('%.6f' % (int(input()) / 3))"
    assert scored(program, thirds)["score"] == 1.0
    assert scored(program, thirds, exact=True)["score"] == 0.0
    tenth = {"fn_name": "add", "inputs": [[0.1, 0.2]], "outputs": [[[0.3], 1]]}
    program = "def add(a, b): return (a + b,), 1"
    assert scored(program, tenth)["score"] == 1.0
    assert scored(program, tenth, exact=True)["score"] == 0.0


@in_the_sandbox
def test_a_result_is_what_text_holds_or_the_text():
    binary: Json = {"fn_name": "f", "inputs": [["5"], ["05"]], "outputs": ["101", "0101"]}
    program = "def f(n): return '101' if n == '5' else '0101'"
    assert scored(program, binary)["score"] == 1.0
    assert scored(program, binary, exact=True)["score"] == 1.0
    assert scored("def f(n): return 101", binary)["score"] == 0.5


@in_the_sandbox
def test_integers_may_have_any_number_of_digits():
    digits = {"inputs": ["5000"], "outputs": ["1" + "0" * 5000]}
    assert scored("print(10 ** int(input()))", digits)["score"] == 1.0
    assert scored("print(10 ** int(input()) + 1)", digits)["score"] == 0.0
    called = '{"fn_name": "f", "inputs": [[5000]], "outputs": [1' + "0" * 5000 + "]}"
    assert scored("def f(n): return 10 ** n", called)["score"] == 1.0
    assert scored("def f(n): return 10 ** n + 1", called)["score"] == 0.0


@in_the_sandbox
@pytest.mark.parametrize(
    ("answer", "truth", "right"),
    [
        ("<think>```python\n{}\n```</think>\nI cannot.", CALLS, 0.0),
        ("<think>```python\nx\n```</think><answer>```\n{}\n```</answer>", CALLS, 1.0),
        ("```python\n{}\n```\nSo:\n```python\nprint(add(1, 2))\n```", CALLS, 1.0),
        ("```python\n{}\n```\nSo:\n```python\nassert add(1, 2) == 3\n```", ASSERTS, 1.0),
    ],
)
def test_the_program_of_the_answer_is_run(answer: str, truth: Json, right: float):
    given = transcript(answer.format(RIGHT), truth)
    assert score(given, test_s=HANG_S, total_s=HANG_S)["score"] == right


@in_the_sandbox
def test_without_fences_all_of_the_answer_is_the_program():
    for answer in ("print(3)", "<think>3</think><answer>print(3)</answer>"):
        given = transcript(answer, {"inputs": [""], "outputs": ["3"]})
        assert score(given)["score"] == 0.0
        found = score(given, require_fence=False, test_s=HANG_S, total_s=HANG_S)
        assert (found["score"], found["formatted"]) == (1.0, 0)


@in_the_sandbox
def test_a_method_of_solution_a_generator_and_a_changed_argument_are_understood():
    solution = "class Solution:\n    def add(self, a, b):\n        return a + b"
    assert scored(solution, CALLS)["score"] == 1.0
    asserts = {"fn_name": "Solution().add", "asserts": "assert Solution().add(1, 2) == 3"}
    assert scored(solution, asserts)["score"] == 1.0
    program = "def sort(x):\n    x.sort()\ndef count(n):\n    yield from range(n)"
    asserts = "x = [3, 1]\nsort(x)\nassert x == [1, 3]\nassert list(count(2)) == [0, 1]"
    assert scored(program, asserts)["passed"] == 2


@in_the_sandbox
@pytest.mark.parametrize("printed", ["[1, 2]", "3", "None", "'x'"])
def test_what_a_test_prints_is_no_verdict(printed: str):
    asserts = f"print({printed})\nassert add(1, 2) == 3\nassert add(3, 4) == 7"
    assert scored(RIGHT, {"asserts": asserts})["passed"] == 2


@in_the_sandbox
def test_one_call_that_ends_hangs_or_crashes_costs_only_its_own_test():
    for fault in ("import os; os._exit(0)", "while True: pass", "import os; os.abort()"):
        program = f"def add(a, b):\n    if a == 3:\n        {fault}\n    return a + b"
        for test_s in (0.5, 5.0, 60.0):  # on a slow machine the others take long, too
            reached = scored(program, CALLS, test_s=test_s)["score"]
            if reached == 0.5:
                break
        assert reached == 0.5


FORGERIES = {
    "prints the verdict": 'print(\'{"test": 0, "passed": true}\\n\' * 9, flush=True)',
    "writes it everywhere": (
        "import os\nfor n in range(64):\n"
        '    try: os.write(n, b\'{"test": 0, "passed": true, "value": 3}\\n\')\n'
        "    except OSError: pass"
    ),
    "exits": "import os\nos._exit(0)",
    "exits in the call": "def add(*_):\n    raise SystemExit(0)",
    "patches": (
        "import builtins, sys, json\nbuiltins.AssertionError = Exception\nsys.exit = print\n"
        "json.loads = lambda *_: {}\nbuiltins.isinstance = lambda *_: True\n"
        "def add(*_):\n    raise AssertionError"
    ),
    "equal to all": (
        "class Equal(int):\n    def __eq__(self, other): return True\n"
        "    def __ne__(self, other): return False\n    __hash__ = int.__hash__\n"
        "def add(*_): return Equal(12345)"
    ),
    "equal object": (
        "class Equal:\n    def __eq__(self, other): return True\ndef add(*_): return Equal()"
    ),
    "remote of itself": "def add(*_): return ['kept', 0]",
    "another built-in": "def add(*_): return 0\ndef AssertionError(*_): return 0\nlen = abs = add",
    "reads the tests": (
        "import glob, os, re\nfound = ''\n"
        "for path in glob.glob('/proc/*/fd/*') + glob.glob('/proc/*/mem') + glob.glob('/box/*'):\n"
        "    if '/self/' in path or '/answer.py' in path or '/main.py' in path: continue\n"
        "    if path.startswith(f'/proc/{os.getpid()}/'): continue\n"
        "    if path.startswith('/proc/thread-self/'): continue\n"
        "    try: found += open(path, 'rb').read(1000).decode()\n"
        "    except OSError: pass\n"
        "def add(a, b): return a + b if 'assert' in found or 'function' in found else -1"
    ),
    "offers built-ins": (
        "import __main__ as m\n"
        "class E(dict):\n"
        "    def __getitem__(s, k): return lambda *a, **k: 0\n"
        "say = m.fulfil\n"
        "def f(r, n, k):\n"
        "    n['__builtins__'] = E()\n"
        "    return {'names': ['add', '__builtins__', '__name__']} if r['do'] == 'names'"
        " else say(r, n, k)\n"
        "m.fulfil = f\n"
        "def add(*_): return -1"
    ),
    "kills the tester": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
}


@in_the_sandbox
@pytest.mark.parametrize("truth", [CALLS, ASSERTS], ids=["calls", "asserts"])
@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_verdict_cannot_be_forged(forgery: str, truth: Json):
    result = scored(FORGERIES[forgery], truth, test_s=1.0)
    assert (result["score"], result["passed"]) == (0.0, 0)


@in_the_sandbox
@pytest.mark.parametrize(
    "asserted",
    [
        "assert abs(add(1, 2) - 3) < 1e-6",
        "assert sorted([add(1, 2)]) == sorted([3])",
        "def check(c):\n    assert abs(c(1, 2) - 3) < 1e-6\n    assert round(c(5, 5)) == int(10)\n"
        "check(add)",
    ],
)
def test_tests_use_our_built_ins_instead_of_those_of_the_answer(asserted: str):
    assert scored(FORGERIES["offers built-ins"], asserted, test_s=1.0)["score"] == 0.0
    assert scored(RIGHT, asserted, test_s=60.0)["score"] == 1.0


@in_the_sandbox
@pytest.mark.parametrize(
    ("program", "asserted"),
    [
        (
            "def add(*_): raise StopIteration",
            "assert all(map(lambda c: add(*c[0]) == c[1], [((1, 2), 3)]))",
        ),
        (
            "class L:\n    def __len__(self): return 3\n    def __iter__(self): return iter(())\n"
            "def add(*_): return L()",
            "r = add(1, 2)\nassert len(r) == 3 and all(a == b for a, b in zip(r, [1, 2, 3]))",
        ),
    ],
    ids=["ends our loop", "lies about its length"],
)
def test_what_an_answer_raises_or_returns_cannot_empty_a_test(program: str, asserted: str):
    assert scored(program, asserted, test_s=60.0)["passed"] == 0


@in_the_sandbox
def test_where_the_function_is_named_no_other_name_is_the_answer_s():
    wrong = "import math\ndef same(a, b): return True\ndef add(a, b): return -1"
    right = "import math\ndef add(a, b): return a + b"
    helped = "assert same(add(1, 2), 3)"
    plain = "import math\nassert math.isclose(add(1, 2), 3)"
    assert scored(wrong, {"asserts": helped})["score"] == 1.0, "an undefined name"
    assert scored(wrong, {"asserts": helped, "fn_name": "add"})["score"] == 0.0
    assert scored(right, {"asserts": [helped, plain], "fn_name": "add"})["score"] == 0.5
    assert scored(right, {"asserts": plain, "fn_name": "add"})["score"] == 1.0


@in_the_sandbox
def test_a_program_that_takes_too_much_scores_nothing_in_time():
    result = scored("import time; time.sleep(1000)", SUMS, test_s=0.5, total_s=0.8)
    assert result == {"score": 0.0, "passed": 0, "ran": 0, "formatted": 1}
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    assert scored(bomb, CALLS, total_s=5.0)["score"] == 0.0


HIDES = """
import ctypes, time
def add(a, b):
    if a == 1:
        ctypes.CDLL(None).vfork()
        time.sleep(1000)
    return a + b
"""


@in_the_sandbox
def test_a_call_that_hangs_as_if_it_waited_for_a_disk_costs_only_its_own_test():
    assert scored(HIDES, CALLS, test_s=2.0)["score"] == 0.5


@pytest.mark.integration
def test_processes_of_an_answer_are_checked_like_the_answer():
    """A parent that waits for its child to compute wants a core as much as the child does."""
    burns = "import os\nif os.fork():\n    os.wait()\nwhile True:\n    pass\n"
    process = subprocess.Popen([sys.executable, "-c", burns])
    try:
        answer = code_tester.AnswerProcess(1.0)
        answer._pid = process.pid
        until(lambda: is_computing(answer, cpu_s=0.2), "the child is not seen to compute")
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        until(lambda: state_of(process.pid) == "S", "the parent does not wait")
        os.kill(int(child), signal.SIGSTOP)
        until_stopped(int(child))
        until(lambda: not is_computing(answer), "the stopped child is seen to compute")
        before_s = answer._usage()[1]
        os.kill(int(child), signal.SIGKILL)
        until(lambda: is_computing(answer), "the parent is not seen to compute")
        # Until its parent has waited for it, a look at one after the other may miss its time.
        until(lambda: not Path(f"/proc/{child}").exists(), "the parent does not wait for it")
        assert answer._usage()[1] >= before_s >= 0.2
    finally:
        process.kill()
        process.wait()


def is_computing(answer: code_tester.AnswerProcess, *, cpu_s: float = 0.0) -> bool:
    _, used_s, states = answer._usage()
    return b"R" in states and used_s >= cpu_s


@pytest.mark.integration
@pytest.mark.parametrize("truth", [SUMS, CALLS], ids=["program", "calls"])
def test_a_sandbox_that_does_not_start_in_time_is_no_failed_test(truth: Json, tmp_path: Path):
    init = tmp_path / "init.py"
    init.write_text("import time; time.sleep(1000)")

    def hangs(source: str, *, limits: Limits, **given: Any) -> sandbox.ProgramOutcome:  # noqa: ANN401
        return sandbox.run(source, limits=replace(limits, start_s=0.1), init=init, **given)

    with pytest.raises(Unavailable, match="did not start within"):
        started_by(hangs, RIGHT, truth, test_s=0.1)


def test_without_a_sandbox_there_is_no_score():
    def refused(*_: object, **__: object) -> sandbox.ProgramOutcome:
        raise SandboxUnavailableError("reward.sandbox: refused")

    with pytest.raises(Unavailable, match=r"reward\.sandbox"):
        started_by(refused, RIGHT, CALLS)


@pytest.mark.parametrize(("code_s", "expected"), [(0.001, 1.0), (0.03, 0.5)])
def test_only_the_time_of_the_program_is_taken_from_its_budget(code_s: float, expected: float):
    def slow_to_start(*_: object, stdin: bytes, **__: object) -> sandbox.ProgramOutcome:
        time.sleep(0.05)  # more than total_s: the sandbox, not the program
        total = sum(map(int, stdin.split()))
        return sandbox.ProgramOutcome(
            status="ok",
            exit_code=0,
            stdout=f"{total}\n".encode(),
            stderr=b"",
            own_s=code_s,
            cpu_s=code_s,
            peak_bytes=0,
        )

    assert started_by(slow_to_start, "sums", SUMS, total_s=0.03)["score"] == expected
