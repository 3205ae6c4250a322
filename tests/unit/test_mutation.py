"""The program that asks how much the tests notice: tests/mutation."""

import ast
from pathlib import Path

import pytest

from tests.mutation.__main__ import killed_share, main, table
from tests.mutation.equivalent import judged
from tests.mutation.mutants import Mutant, drawn, mutants_of
from tests.mutation.record import Reached, Record, asked_files, hermetic
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


def test_a_small_source_has_these_mutants_and_no_others():
    assert {one.mutation for one in mutants_of("small.py", SMALL)} == {
        "value is None -> value is not None",
        "value > high -> value >= high",
        "value > high -> value <= high",
        "x > 0 -> x >= 0",
        "x > 0 -> x <= 0",
        "value is None or value > high -> value is None and value > high",
        "value is None or value > high -> not (value is None or value > high)",
        "x -> not x",
        "any(x > 0 for x in value if x) -> all((x > 0 for x in value if x))",
        "-value -> value",
        "-value * 2 -> -value / 2",
        *("10 -> 11", "0 -> 1", "0.5 -> 1.0", "1 -> 2", "2 -> 3", "3 -> 4"),
        *("self.calls += 1 -> self.calls -= 1", "self.calls += 1 -> pass"),
        "note(any(x > 0 for x in value if x)) -> pass",
        'raise ValueError(f"at most {high + 1}") -> pass',
        "-value * 2 -> None",
    }


def test_a_mutant_changes_its_own_text_alone():
    source = 'TEXT = "ä"\ndef f(a, b):\n    return (a -\n            b) * 3  # ö\n'
    (mutant,) = [one for one in mutants_of("f.py", source) if one.mutation == "3 -> 4"]
    assert mutant.apply(source.encode()).decode() == source.replace("* 3", "* 4")
    (minus,) = [one for one in mutants_of("f.py", source) if "a + b" in one.after]
    assert (minus.before, minus.line, minus.scope) == ("a - b", 3, "f")
    mutated = minus.apply(source.encode()).decode()
    assert ast.dump(ast.parse(mutated)) == ast.dump(ast.parse(source.replace("a -", "a +")))


def some(count: int, package: str) -> list[Mutant]:
    source = "".join(f"def f{n}(a):\n    return a < {n}\n" for n in range(count))
    return mutants_of(f"{package}/file.py", source)


def test_a_sample_is_spread_over_packages_and_statements_and_stays_as_it_is():
    sample = drawn([*some(200, "broker"), *some(20, "wire")], count=30, seed=1)
    of_wire = [one for one in sample if one.file.startswith("wire/")]
    assert (len(sample), len(of_wire)) == (30, 9)  # half of a half, and a tenth of the other half
    assert len({(one.file, one.statement) for one in sample}) == 30
    kept = drawn([*some(200, "broker"), *some(19, "wire")], count=30, seed=1)
    assert len(set(kept) & set(sample)) >= 27


def test_every_judgement_is_of_a_mutant_that_there_is_and_gives_a_reason():
    for one in judged():
        moved = "\n\n# moved\n" + (ROOT / one.file).read_text()
        found = [mutant for mutant in mutants_of(one.file, moved) if one.is_about(mutant)]
        assert found, f"the statement has changed: judge it anew, or take the entry out: {one}"
        assert len({mutant.scope for mutant in found}) == 1, f"name the scope: {one}"
        assert len(one.why) > 20


PRODUCT = """LIMIT = 3
def f(a, *, most=5):
    if a > LIMIT:
        return a
    return most
"""


def test_a_mutant_is_run_against_the_tests_that_reach_it_the_cheapest_first(tmp_path: Path):
    for name, text in {
        "wire/file.py": PRODUCT,
        "wire/other.py": "def g():\n    return 1\n",
        "tests/test_f.py": "f(1)",
        "tests/test_limit.py": "LIMIT",
        "tests/test_g.py": "g()",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    record = Record(
        tests={
            f"tests/test_{name}": Reached(seconds, {f"wire/{file}.py": lines})
            for name, seconds, file, lines in [
                ("f.py::long", 5.0, "file", [3, 4]),
                ("f.py::short[1]", 0.1, "file", [3, 4]),
                ("f.py::short[2]", 0.2, "file", [3, 4]),
                ("f.py::default", 0.1, "file", [3, 5]),
                ("limit.py::name", 0.1, "other", [2]),
                ("g.py::g", 0.1, "other", [2]),
            ]
        }
    )
    found = {
        one.mutation: [n.partition("::")[2] for n in record.reaching(one, tmp_path)]
        for one in mutants_of("wire/file.py", PRODUCT)
    }
    assert found["a -> None"] == ["short[1]", "long", "short[2]"]  # one of a function first
    assert found["most -> None"] == ["default"]
    assert found["5 -> 6"] == ["default", "short[1]", "long", "short[2]"]  # callers of f
    # Of a constant, what uses its name in the product or in a test.
    assert found["3 -> 4"] == ["name", "default", "short[1]", "long", "short[2]"]


def test_those_tests_are_recorded_that_stand_beside_a_product_or_import_it(tmp_path: Path):
    for name, text in {
        "tests/unit/wire/files/test_beside.py": "",
        "tests/unit/wire/test_other.py": "from slipstream.wire import files",
        "tests/unit/test_of_a_name.py": "from slipstream.wire.files.file import f",
        "tests/property/test_of_a_module.py": "if 1:\n    from slipstream.wire.files import file",
        "tests/support/tool.py": "import slipstream.wire.files.file",
        "tests/unit/broker/test_with_tool.py": "from tests.support import tool",
        "tests/integration/test_of_processes.py": "import slipstream.wire.files.file",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text)
    assert asked_files(tmp_path, {"wire/files/file.py"}, ["tests/unit", "tests/property"]) == [
        "tests/unit/broker/test_with_tool.py",
        "tests/unit/test_of_a_name.py",
        "tests/unit/wire/files/test_beside.py",
        "tests/property/test_of_a_module.py",
    ]


def test_the_hermetic_tests_are_those_of_the_makefile():
    markers, folders = hermetic(ROOT)
    assert "not integration" in markers
    assert folders == ["tests/unit", "tests/property", "tests/contract"]


def test_the_share_is_of_what_is_executed_and_not_equivalent():
    (mutant, *_) = some(1, "broker")
    counts = {"KILLED": 18, "SURVIVED": 2, "EQUIVALENT": 5, "UNREACHED": 9}
    found = [Outcome(mutant, Verdict[name]) for name, count in counts.items() for _ in range(count)]
    assert killed_share([]) == 1.0
    _, broker, everything = table(found)
    assert broker.split() == ["broker", "18", "2", "5", "9", "90.0%"]
    assert everything.split()[1:] == broker.split()[1:]


def test_what_would_be_run_of_some_files_or_lines_can_be_listed(capsys: pytest.CaptureFixture[str]):
    file = "wire/messages/versions.py"

    def listed(*words: str) -> list[str]:
        assert main(["--list", *words]) == 0
        return [line.split(" ")[0] for line in capsys.readouterr().out.splitlines()[::2]]

    (place, *_) = sample = listed("--only", file, "--sample", "3")
    assert len(sample) == 3
    assert place.startswith(f"{file}:")
    assert set(listed("--only", "learner/nope", "--only", place, "--sample", "0")) == {place}
    assert listed("--only", "wire/mess", "--sample", "0") == []
    assert place in listed("--only", "wire/messages/", "--sample", "0")
