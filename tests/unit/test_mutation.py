"""The program that asks how much the tests notice: tests/mutation."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from tests.mutation.__main__ import is_chosen, killed_share, main, table
from tests.mutation.equivalent import Equivalent, judged
from tests.mutation.mutants import Mutant, drawn, mutants_of
from tests.mutation.record import Reached, Record, digests, hermetic
from tests.mutation.run import Outcome, Verdict

ROOT = Path(__file__).parents[2]
SMALL = '''"""A clip."""

import logging
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    from os import PathLike

_log = logging.getLogger(__name__)
LIMIT = 10


class Bounds(frozen=True):
    """Of a clip."""

    low: Annotated[float, Meta(ge=0)] = 0.5


def clipped(value: float | None, high: int = 3) -> float:
    """Return a value within bounds."""
    _log.info("asked for %d", 1 + 1)
    if value is None or value > high:
        raise ValueError(f"at most {high + 1}")
    self.calls += 1
    note(any(x > 0 for x in value if x))
    os.kill(pid, 9)
    return -value * 2
'''


def changes(source: str) -> dict[str, set[str]]:
    """Return the mutations of a source, by kind."""
    found: dict[str, set[str]] = {}
    for one in mutants_of("small.py", source):
        found.setdefault(one.kind, set()).add(one.mutation)
    return found


def test_a_small_source_has_these_mutants_and_no_others():
    assert changes(SMALL) == {
        "comparison changed": {
            "value is None -> value is not None",
            "value > high -> value >= high",
            "value > high -> value <= high",
            "x > 0 -> x >= 0",
            "x > 0 -> x <= 0",
        },
        "and / or swapped": {"value is None or value > high -> value is None and value > high"},
        "boolean inverted": {
            "value is None or value > high -> not (value is None or value > high)",
            "x -> not x",
        },
        "any / all, min / max swapped": {
            "any(x > 0 for x in value if x) -> all((x > 0 for x in value if x))"
        },
        "arithmetic changed": {
            "-value -> value",
            "-value * 2 -> -value / 2",
            "self.calls += 1 -> self.calls -= 1",
        },
        "constant changed": {"10 -> 11", "0 -> 1", "0.5 -> 1.0", "1 -> 2", "2 -> 3"},
        "default changed": {"3 -> 4"},
        "assignment deleted": {"self.calls += 1 -> pass"},
        "call deleted": {"note(any(x > 0 for x in value if x)) -> pass"},
        "statement deleted": {'raise ValueError(f"at most {high + 1}") -> pass'},
        "return value made None": {"-value * 2 -> None"},
    }


def test_a_mutant_changes_its_own_text_alone():
    source = 'TEXT = "ä"\ndef f(a, b):\n    return (a -\n            b) * 3  # ö\n'
    (mutant,) = [one for one in mutants_of("f.py", source) if one.kind == "constant changed"]
    assert mutant.apply(source.encode()).decode() == source.replace("* 3", "* 4")
    (minus,) = [one for one in mutants_of("f.py", source) if "a + b" in one.after]
    assert (minus.before, minus.line, minus.scope) == ("a - b", 3, "f")
    mutated = minus.apply(source.encode()).decode()
    assert ast.dump(ast.parse(mutated)) == ast.dump(ast.parse(source.replace("a -", "a +")))


def test_what_only_declares_is_executed_when_its_file_is_imported():
    found = {one.mutation: one for one in mutants_of("small.py", SMALL)}
    assert found["10 -> 11"].is_declared
    assert found["0.5 -> 1.0"].scope == "Bounds"
    assert found["3 -> 4"].body == (20, 27)
    assert not found["2 -> 3"].is_declared
    assert found["2 -> 3"].statement == "return -value * 2"
    assert found["value is None -> value is not None"].statement == (
        "if value is None or value > high:"
    )


def some(count: int, package: str) -> list[Mutant]:
    source = "".join(f"def f{n}(a):\n    return a < {n}\n" for n in range(count))
    return mutants_of(f"{package}/file.py", source)


def test_a_sample_is_spread_over_packages_and_statements_and_stays_as_it_is():
    mutants = [*some(200, "broker"), *some(20, "wire")]
    sample = drawn(mutants, count=30, seed=1)
    of_wire = [one for one in sample if one.file.startswith("wire/")]
    assert (len(sample), len(of_wire)) == (30, 9)  # half of a half, and a tenth of the other half
    assert len({(one.file, one.statement) for one in sample}) == 30
    assert drawn(mutants[::-1], count=30, seed=1) == sample
    assert drawn(mutants, count=30, seed=2) != sample
    fewer = [*some(200, "broker"), *some(19, "wire")]
    kept = drawn(fewer, count=30, seed=1)
    assert len(set(kept) & set(sample)) >= 27


@pytest.mark.parametrize(
    ("only", "chosen"),
    [
        ([], True),
        (["broker"], True),
        (["broker/"], True),
        (["brok"], False),
        (["wire", "broker/ledger/book.py"], True),
        (["broker/ledger/book.py:7"], True),
        (["broker/ledger/book.py:8"], False),
    ],
)
def test_packages_files_and_lines_are_chosen_by_name(only: list[str], chosen: bool):
    mutant = replace(some(1, "broker")[0], file="broker/ledger/book.py", line=7)
    assert is_chosen(mutant, only) is chosen


# ---- equivalents -------------------------------------------------------------


def test_equivalent_is_found_by_its_text_on_any_line():
    one = Equivalent(
        file="small.py", statement="return  -value\n * 2", mutation="2 -> 3", why="because"
    )
    moved = mutants_of("small.py", "\n\n# moved\n" + SMALL)
    assert [mutant.mutation for mutant in moved if one.is_about(mutant)] == ["2 -> 3"]
    elsewhere = Equivalent(
        file="small.py", statement="return -value * 2", mutation="2 -> 3", why="x", scope="other"
    )
    assert not any(elsewhere.is_about(mutant) for mutant in moved)


@pytest.mark.parametrize("one", judged(), ids=lambda one: f"{one.file} {one.mutation}"[:60])
def test_every_judgement_is_of_a_mutant_that_there_is_and_gives_a_reason(one: Equivalent):
    found = [m for m in mutants_of(one.file, (ROOT / one.file).read_text()) if one.is_about(m)]
    assert found, "the statement has changed: judge it anew, or take the entry out"
    assert len({mutant.scope for mutant in found}) == 1, "name the scope"
    assert len(one.why) > 20


# ---- which tests -------------------------------------------------------------

PRODUCT = """LIMIT = 3
def f(a, *, most=5):
    if a > LIMIT:
        return a
    return most
"""


def reached(file: str, *lines: int, cpu_s: float = 0.1) -> Reached:
    return Reached(cpu_s, cpu_s, {f"wire/{file}.py": lines})


RECORD = {
    "tests/test_f.py::test_long": reached("file", 3, 4, cpu_s=5.0),
    "tests/test_f.py::test_short[1]": reached("file", 3, 4),
    "tests/test_f.py::test_short[2]": reached("file", 3, 4, cpu_s=0.2),
    "tests/test_f.py::test_default": reached("file", 3, 5),
    "tests/test_limit.py::test_name": reached("other", 2),
    "tests/test_g.py::test_g": reached("other", 2),
}


@pytest.mark.parametrize(
    ("mutation", "reaching"),
    [
        ("a -> None", ["test_short[1]", "test_long", "test_short[2]"]),  # one of a function first
        ("most -> None", ["test_default"]),
        ("5 -> 6", ["test_default", "test_short[1]", "test_long", "test_short[2]"]),  # its callers
        # of a constant, what uses its name in the product or in a test
        ("3 -> 4", ["test_name", "test_default", "test_short[1]", "test_long", "test_short[2]"]),
    ],
)
def test_a_mutant_is_run_against_the_tests_that_reach_it_the_cheapest_first(
    mutation: str, reaching: list[str], tmp_path: Path
):
    for name, text in {
        "wire/file.py": PRODUCT,
        "wire/other.py": "def g():\n    return 1\n",
        "tests/test_f.py": "f(1)",
        "tests/test_limit.py": "LIMIT",
        "tests/test_g.py": "g()",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (mutant,) = [m for m in mutants_of("wire/file.py", PRODUCT) if m.mutation == mutation]
    found = Record(tests=dict(RECORD)).reaching(mutant, tmp_path)
    assert [name.partition("::")[2] for name in found] == reaching


def test_the_hermetic_tests_are_those_of_the_makefile():
    markers, folders = hermetic(ROOT)
    assert "not integration" in markers
    assert folders == ["tests/unit", "tests/property", "tests/contract"]


def test_a_record_is_of_the_code_and_not_of_documents_or_of_this_program(tmp_path: Path):
    own = ("tests/mutation/run.py", "tests/unit/test_mutation.py")
    for name in ("wire/a.py", "tests/unit/test_a.py", "docs/a.md", *own):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    assert digests(tmp_path).keys() == {"wire/a.py", "tests/unit/test_a.py"}


# ---- reports -----------------------------------------------------------------


def outcomes_of(**counts: int) -> list[Outcome]:
    (mutant, *_) = some(1, "broker")
    return [Outcome(mutant, Verdict[name]) for name, count in counts.items() for _ in range(count)]


def test_the_share_is_of_what_is_executed_and_not_equivalent():
    found = outcomes_of(KILLED=17, TIMED_OUT=1, SURVIVED=2, EQUIVALENT=5, UNREACHED=9)
    assert killed_share(found) == 0.9
    assert killed_share([]) == 1.0
    _, broker, everything = table(found)
    assert broker.split() == ["broker", "17", "1", "2", "5", "9", "90.0%"]
    assert everything.split()[1:] == broker.split()[1:]


def test_what_would_be_run_can_be_listed(capsys: pytest.CaptureFixture[str]):
    assert main(["--list", "--only", "wire/messages/versions.py", "--sample", "3"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == 6
    assert all(line.startswith("wire/messages/versions.py:") for line in listed[::2])
