"""Runs the program in an answer against test cases, in the sandbox.

    [reward]
    function = "slipstream.broker.rewards.code:score"

``ground_truth`` of a row is one of these, or its JSON as text:

    {"inputs": ["1 2", ...], "outputs": ["3", ...]}            stdin and stdout
    [{"input": "1 2", "output": "3"}, ...]                     the same
    {"fn_name": "add", "inputs": [[1, 2], ...], "outputs": [3, ...]}     calls of its function
    {"asserts": "assert add(1, 2) == 3"}, or a list of such texts        assertions
    {"fn_name": "add", "asserts": ...}                   that take nothing but add of the answer

Expected values are compared here, outside of the sandbox; assertions are checked in the sandbox by
a process that the answer cannot reach (``code_tester.py``).
"""

import ast
import contextlib
import decimal
import json
import operator
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, TypeAlias

from slipstream.broker.rewards import code_tester
from slipstream.broker.rewards.final_answer import (
    after_thought,
    find_program,
    free_names,
    marked_answer,
)
from slipstream.broker.rewards.sdk import Prompt, Transcript, Unavailable, reads, reward, truth_of
from slipstream.broker.sandbox import sandbox as sandboxes
from slipstream.broker.sandbox.bubblewrap import SandboxUnavailableError
from slipstream.wire.messages.trajectory import Json

_WHOLE = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_MOST_DIGITS = 4300  # digits of an integer; Python's default limit
_TOLERANCE = Decimal("1e-6")
_NO_LIMITS = decimal.Context(Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN, traps=[])
_CLASS = "Solution"
_METHOD = re.compile(rf"{_CLASS}(?:\(\))?\.(?=\w+$)")  # before its name
_MAX_PROCESSES = 16
_MIB = 1024 * 1024
_Number: TypeAlias = str | int | float | Decimal


@dataclass(frozen=True)
class Tests:
    """Test cases of one row; exactly one kind is there."""

    inputs: tuple[bytes, ...] = ()
    outputs: tuple[str, ...] = ()
    function: str = ""  # function to call, or the only name for assertions; "" is any name
    calls: tuple[tuple[list[Json], *tuple[Json, ...]], ...] = ()  # arguments, right results
    texts: tuple[str, ...] = ()  # texts of assertions

    def __len__(self) -> int:
        """Return the number of test cases."""
        statements = sum(is_test for text in self.texts for _, is_test in code_tester.split(text))
        return len(self.inputs) + len(self.calls) + statements

    @property
    def names(self) -> set[str]:
        """Names that the tests take of the answer."""
        if self.function:
            return {self.function}
        used = set[str]().union(*(free_names(ast.parse(text)) for text in self.texts))
        return used - sys.stdlib_module_names


@dataclass
class Budget:
    """Time left for one answer. The start of sandboxes does not count."""

    test_s: float
    left_s: float
    memory_bytes: int
    mode: sandboxes.Mode
    start: Callable[..., sandboxes.ProgramOutcome] = sandboxes.run

    def run(
        self,
        source: str,
        *,
        stdin: bytes,
        num_tests: int = 1,
        files: Mapping[str, bytes] = sandboxes.NO_FILES,
    ) -> sandboxes.ProgramOutcome | None:
        """Run a program within the remaining time and deduct its own; None when none is left."""
        if self.left_s <= 0:
            return None
        own_s = min(self.left_s, self.test_s * num_tests)
        limits = sandboxes.Limits(
            own_s=own_s, cpu_s=own_s, memory_bytes=self.memory_bytes, max_processes=_MAX_PROCESSES
        )
        outcome = self.start(source, stdin=stdin, files=files, limits=limits, mode=self.mode)
        self.left_s -= max(outcome.own_s, outcome.cpu_s)
        return outcome


# ---- test cases ----------------------------------------------------------------


def read_tests(prompt: Prompt) -> Tests:
    """Read the test cases of a row.

    Raises:
        ValueError: there are none, or we do not understand them.
    """
    try:
        return parse_tests(truth_of(prompt))
    except (RecursionError, MemoryError) as error:  # raised by ast, too
        raise ValueError("ground_truth: it is nested too deep") from error


def parse_tests(ground_truth: Json) -> Tests:
    """Read test cases. Keys and items whose value is null or NaN are absent, as files pad them.

    Raises:
        ValueError: there are none, or we do not understand them.
    """
    found = _one_object(_read(ground_truth))
    truth: Any = found.get("asserts", found)
    if isinstance(truth, str):
        truth = [truth]
    if isinstance(truth, list):
        truth = _given(truth)
    if isinstance(truth, Mapping):
        tests = _parse_pairs(truth)
    elif isinstance(truth, Sequence) and all(isinstance(item, str) for item in truth):
        try:
            tests = Tests(texts=tuple(truth))
            tests = replace(tests, function=_used(found.get("fn_name", ""), tests.names))
            untested = [text for text in truth if not code_tester.has_test(text)]
        except SyntaxError as error:
            raise ValueError(f"ground_truth: the assertions are no Python: {error}") from error
        if untested:
            raise ValueError(f"ground_truth: nothing is tested by {_shortened(untested[0])}")
    else:
        raise ValueError(f"ground_truth: expected test cases, got {_shortened(truth)}")
    if not len(tests):
        raise ValueError(f"ground_truth: expected at least one test case, got {_shortened(truth)}")
    return tests


def _used(function: str, names: set[str]) -> str:
    """Return what assertions take of the answer: the function, or the class that it is in."""
    if not (function and names) or function in names:
        return function
    if _CLASS in names:
        return _CLASS
    raise ValueError(f"ground_truth: fn_name is {function}, the assertions use {sorted(names)}")


def _one_object(truth: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return test cases, or assertions, as one object."""
    named: dict[str, Any] = {}
    if isinstance(truth, Mapping) and "test_cases" in _present(truth):
        named = {key: value for key, value in _present(truth).items() if key == "fn_name"}
        truth = _read(truth["test_cases"])
    if isinstance(truth, list):
        read = [_read(item) for item in _given(truth)]
        if read and all(isinstance(item, Mapping) for item in read):
            truth = _gathered([pair for pair in read if _present(pair)])
    found = named | (_present(truth) if isinstance(truth, Mapping) else {"asserts": truth})
    if "fn_name" in found:
        found["fn_name"] = _METHOD.sub("", str(found["fn_name"]), count=1)
        if found["fn_name"] and not found["fn_name"].isidentifier():
            raise ValueError(f"ground_truth: fn_name is no name: {_shortened(found['fn_name'])}")
    return found


def _read(value: Any) -> Any:  # noqa: ANN401
    """Return what JSON as text holds; other text and values as they are."""
    with contextlib.suppress(ValueError):
        return json.loads(value, parse_int=_integer) if isinstance(value, str) else value
    return value


def _is_absent(value: Any) -> bool:  # noqa: ANN401
    return value is None or value != value  # NaN, with which pandas pads


def _given(items: Sequence[Any]) -> list[Any]:
    return [item for item in items if not _is_absent(item)]


def _present(truth: Mapping[str, Any]) -> dict[str, Any]:
    return {k: value for k, value in truth.items() if not (_is_absent(value) or value in ("", []))}


def _gathered(pairs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return test cases of an object each, as of DeepCoder and LiveCodeBench, as one object."""
    functions = {_function(pair) for pair in pairs} or {""}
    columns = {f"{key}s": [pair.get(key) for pair in pairs] for key in ("input", "output")}
    if len(functions) > 1 or any(map(_is_absent, columns["inputs"] + columns["outputs"])):
        raise ValueError(
            "ground_truth: expected input and output in every test case, and one fn_name, got "
            f"{_shortened(pairs)}"
        )
    if functions == {""} and any(pair.get("testtype") == "functional" for pair in pairs):
        raise ValueError(f"ground_truth: tests of a function without fn_name: {_shortened(pairs)}")
    return columns | {"fn_name": functions.pop()}


def _function(pair: Mapping[str, Any]) -> str:
    metadata = _read(pair.get("metadata"))
    named = {"fn_name": metadata.get("func_name")} if isinstance(metadata, Mapping) else {}
    return str((_present(named) | _present(pair)).get("fn_name", ""))


def _parse_pairs(truth: Mapping[str, Any]) -> Tests:
    """Read inputs and outputs of a program, or of a function."""
    inputs, outputs, function = (truth.get(name) for name in ("inputs", "outputs", "fn_name"))
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise ValueError(  # noqa: TRY004 a value of a data file
            f"ground_truth: expected lists inputs and outputs, got {_shortened(truth)}"
        )
    if len(inputs) != len(outputs):
        raise ValueError(
            "ground_truth: expected as many outputs as inputs, "
            f"got {len(outputs)} and {len(inputs)}"
        )
    pairs = [pair for pair in zip(inputs, outputs, strict=True) if _given(pair)]
    inputs, outputs = [input_ for input_, _ in pairs], [expected for _, expected in pairs]
    if any(map(_is_absent, inputs if function else inputs + outputs)):
        raise ValueError(f"ground_truth: an input or output is missing: {_shortened(truth)}")
    if not function:
        given = tuple(_lines(item).encode(errors="replace") for item in inputs)
        return Tests(inputs=given, outputs=tuple(map(_lines, outputs)))
    calls = [(_arguments(item), *_results(item, expected)) for item, expected in pairs]
    if _holds([results for _, *results in calls], lambda value: value != value):
        raise ValueError(f"ground_truth: an output is missing, or NaN: {_shortened(truth)}")
    return Tests(function=str(function), calls=tuple(calls))


def _results(given: Any, expected: Any) -> tuple[Json, ...]:  # noqa: ANN401
    """Return the right results: the value that JSON as text holds, and the text itself.

    Where the arguments are text the value alone is right: all of the test case is JSON as text.
    """
    read = _read(expected)
    return (read,) if isinstance(given, str) or read is expected else (read, expected)


def _integer(digits: str) -> int | Decimal:
    """Return an integer of any size; Python makes none of very many digits in a short time."""
    return int(digits) if len(digits) <= _MOST_DIGITS else Decimal(digits)


def _lines(item: Any) -> str:  # noqa: ANN401
    """Return text; a list is its lines."""
    return "\n".join(map(str, _given(item))) if isinstance(item, list) else str(item)


def _arguments(item: Any) -> list[Json]:  # noqa: ANN401
    """Return a call's arguments: a list, or text with one JSON value a line."""
    if isinstance(item, str):
        lines = [line for line in item.splitlines() if line.strip()]
        try:
            item = [json.loads(line, parse_int=_integer) for line in lines]
        except ValueError as error:
            raise ValueError(f"ground_truth: expected JSON in inputs: {error}") from error
    if _holds(item, lambda value: isinstance(value, Decimal)):
        raise ValueError(f"ground_truth: an argument has more than {_MOST_DIGITS:,} digits")
    return item if isinstance(item, list) else [item]


def _holds(value: Any, what: Callable[[Any], bool]) -> bool:  # noqa: ANN401
    """Return whether a value of JSON, or one inside it, is such."""
    if isinstance(value, list | dict):
        inner = value.values() if isinstance(value, dict) else value
        return any(_holds(item, what) for item in inner)
    return what(value)


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."


# ---- scoring -------------------------------------------------------------------


@reads(read_tests)
@reward(version="2")
def score(
    transcript: Transcript,
    *,
    require_fence: bool = True,
    all_or_nothing: bool = False,
    exact: bool = False,
    test_s: float = 5.0,
    total_s: float = 30.0,
    memory_mb: int = 512,
    sandbox: Literal["namespaces", "none"] = "namespaces",
) -> dict[str, float]:
    """Return the fraction of the test cases that the answer's program passes.

    Args:
        transcript: the answer; ``prompt.ground_truth`` holds the test cases.
        require_fence: without a fence of three backticks there is no program; else the whole
            answer is one.
        all_or_nothing: 1.0 if every test passes, else 0.0.
        exact: what is printed must be the expected lines, and a result equal; by default tokens are
            compared, and numbers with a fraction within 1e-6.
        test_s: limit of one test, in seconds in which the program has a core or wants none:
            a busy machine makes no answer wrong.
        total_s: limit of all, in the same; tests that there was no time for have failed. Keep
            it well under reward.timeout_s, which is of the clock and leaves the answer unscored.
        memory_mb: memory of one run.
        sandbox: reward.sandbox; ``none`` runs the program unprotected.

    Raises:
        Unavailable: there is no sandbox on this machine, or it did not start in time.
        ValueError: ``ground_truth`` holds no test cases.
    """
    budget = Budget(test_s, total_s, memory_mb * _MIB, sandbox)
    return graded(
        transcript, budget, require_fence=require_fence, all_or_nothing=all_or_nothing, exact=exact
    )


def graded(
    transcript: Transcript,
    budget: Budget,
    *,
    require_fence: bool = True,
    all_or_nothing: bool = False,
    exact: bool = False,
) -> dict[str, float]:
    """Return what ``score`` does, within a budget that also says how a sandbox is started."""
    tests = read_tests(transcript.prompt)
    answer = after_thought(transcript.response)
    fenced = find_program(answer, tests.names, reads_input=any(map(bytes.strip, tests.inputs)))
    program = (marked_answer(answer, hashes=False) or answer) if fenced is None else fenced
    if not program or (fenced is None and require_fence):
        return {"score": 0.0, "passed": 0, "ran": 0, "formatted": 0}
    try:
        if tests.inputs:
            passed, ran = _run_programs(
                program, tests, budget, stop_early=all_or_nothing, exact=exact
            )
        else:
            passed, ran = _run_tester(program, tests, budget, exact=exact)
    except SandboxUnavailableError as error:
        raise Unavailable(str(error)) from error
    fraction = passed / len(tests)
    return {
        "score": float(fraction == 1.0) if all_or_nothing else fraction,
        "passed": passed,
        "ran": int(ran),
        "formatted": int(fenced is not None),
    }


# ---- running -------------------------------------------------------------------


def _run_programs(
    program: str, tests: Tests, budget: Budget, *, stop_early: bool, exact: bool
) -> tuple[int, bool]:
    """Run the program once for each input; return how often it was right, and if it ever ended."""
    passed, ran = 0, False
    for stdin, expected in zip(tests.inputs, tests.outputs, strict=True):
        outcome = budget.run(program, stdin=stdin)
        if outcome is None:
            break
        ran = ran or outcome.status == "ok"
        if outcome.status == "ok" and same_text(outcome.text, expected, exact=exact):
            passed += 1
        elif stop_early:
            break
    return passed, ran


def _run_tester(program: str, tests: Tests, budget: Budget, *, exact: bool) -> tuple[int, bool]:
    """Run calls or assertions in one sandbox; return how many passed, and if any came to an end."""
    request: dict[str, Any] = {"test_s": budget.test_s}
    if tests.calls:
        request |= {
            "function": tests.function,
            "calls": [arguments for arguments, *_ in tests.calls],
        }
    else:
        request |= {"texts": tests.texts, "function": tests.function}
    outcome = budget.run(
        Path(code_tester.__file__).read_text(),
        stdin=json.dumps(request).encode(),
        num_tests=len(tests) + 1,
        files={"answer.py": program.encode(errors="replace")},
    )
    passed, ran = 0, False
    if outcome is None:
        return passed, ran
    for line in outcome.text.rpartition("\n")[0].splitlines():
        try:
            message = json.loads(line, parse_int=_integer)
            if not isinstance(message, dict):
                continue  # a test printed it
            if "value" in message and tests.calls:
                _, *right = tests.calls[message["test"]]
                result = as_json(message["value"])
                passed += any(same_value(result, expected, exact=exact) for expected in right)
        except (ValueError, RecursionError):  # cut short by a limit, or too deep
            continue
        passed += "passed" in message
        ran = ran or "error" not in message
    return passed, ran


def as_json(encoded: Any) -> Any:  # noqa: ANN401
    """Return a result of the tester as JSON would hold it: tuples are lists, keys are text."""
    if not isinstance(encoded, list):
        return encoded
    tag, content = encoded
    if tag in ("list", "tuple"):
        return [as_json(item) for item in content]
    if tag == "dict":
        return {
            key if isinstance(key, str) else json.dumps(key): as_json(value)
            for key, value in content
        }
    return encoded  # a set, bytes: equal to nothing in JSON


# ---- comparing -------------------------------------------------------------------


def same_text(printed: str, expected: str, *, exact: bool = False) -> bool:
    """Compare what a program printed as judges do: by tokens, which white space separates.

    Args:
        printed: Output of the program.
        expected: Text of the test case.
        exact: Compare lines instead, without white space at either end of a line or of the text.
    """
    if exact:
        ours, theirs = ([line.strip() for line in text.split("\n")] for text in (printed, expected))
        return "\n".join(ours).strip() == "\n".join(theirs).strip()
    ours, theirs = printed.split(), expected.split()
    return len(ours) == len(theirs) and all(map(_same_token, ours, theirs))


def _same_token(printed: str, expected: str) -> bool:
    if printed == expected:
        return True
    if not (_NUMBER.fullmatch(printed) and _NUMBER.fullmatch(expected)):
        return False
    return _is_near(printed, expected, is_whole=bool(_WHOLE.fullmatch(expected)))


def same_value(result: Any, expected: Any, *, exact: bool = False) -> bool:  # noqa: ANN401
    """Compare a result; some data sets wrap the expected value into a list of one.

    With ``exact`` numbers with a fraction must be equal, too.
    """
    same = operator.eq if exact else _same_inside
    wrapped = isinstance(expected, list) and len(expected) == 1
    return bool(same(result, expected) or (wrapped and same(result, expected[0])))


def _same_inside(result: Any, expected: Any) -> bool:  # noqa: ANN401
    if result == expected:
        return True
    match result, expected:
        case (list(), list()):
            return len(result) == len(expected) and all(map(_same_inside, result, expected))
        case (dict(), dict()):
            return result.keys() == expected.keys() and all(
                _same_inside(result[key], expected[key]) for key in expected
            )
        case (float(), int() | float() | Decimal()) | (int() | Decimal(), float()):
            return _is_near(result, expected, is_whole=not isinstance(expected, float))
    return False


def _is_near(given: _Number, expected: _Number, *, is_whole: bool) -> bool:
    """Compare within 1e-6, absolute or relative; absolute alone with a whole number."""
    with decimal.localcontext(_NO_LIMITS):
        ours, theirs = Decimal(given), Decimal(expected)
        allowed = _TOLERANCE if is_whole else _TOLERANCE * max(Decimal(1), abs(theirs))
        return theirs.is_finite() and abs(ours - theirs) <= allowed
