"""Mutants of a small repository, each in a process of its own."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.mutation.mutants import mutants_of
from tests.mutation.record import Reached, Record
from tests.mutation.run import Outcome, Runner, Verdict
from tests.mutation.trees import copied_tree

pytestmark = [pytest.mark.integration]
TESTED = """def limited(value, most=10):
    if value > most:
        return most
    return value


def spin(n):
    while n > 0:
        n -= 1
    return n
"""
TESTS = """from wire.limits import limited, spin


def test_limited():
    assert limited(12) == 10
    assert limited(9) == 9


def test_spin():
    assert spin(3) == 0
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "repository"
    for name, text in {
        "wire/__init__.py": "",
        "wire/limits.py": TESTED,
        "tests/test_limits.py": TESTS,
        "pyproject.toml": '[tool.pytest.ini_options]\npythonpath = ["."]\n',
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    return root


@pytest.fixture
def tree(repository: Path, tmp_path: Path) -> Path:
    return copied_tree(repository, tmp_path / "copy")


LINES = {"limited": [2, 3, 4], "spin": [8, 9, 10]}
RECORD = Record(
    tests={
        f"tests/test_limits.py::test_{name}": Reached(0.0, {"wire/limits.py": lines})
        for name, lines in LINES.items()
    }
)
MUTANTS = mutants_of("wire/limits.py", TESTED)


def test_mutants_are_killed_or_survive_and_the_repository_stays_as_it_is(
    repository: Path, tree: Path
):
    limited, spin = (f"tests/test_limits.py::test_{name}" for name in LINES)
    expected = {
        "value > most -> value >= most": (Verdict.SURVIVED, ""),  # is the same
        "value > most -> value <= most": (Verdict.KILLED, limited),
        "n -= 1 -> n += 1": (Verdict.KILLED, spin),  # does not end
        "n > 0 -> n >= 0": (Verdict.KILLED, spin),
        "un -> reached": (Verdict.UNREACHED, ""),
    }
    mutants = [one for one in MUTANTS if one.mutation in expected]
    runner = Runner(RECORD, repository, [tree], 10.0, hangs_s=8.0)
    runner.check(mutants[:1])
    outcomes: list[Outcome] = []
    unreached = replace(mutants[0], line=99, first_line=99, before="un", after="reached")
    runner.run([*mutants, unreached], outcomes.append)
    found = {one.mutant.mutation: (one.verdict, one.remark) for one in outcomes}
    assert found == expected
    assert (repository / "wire" / "limits.py").read_text() == TESTED
    assert (tree / "wire" / "limits.py").read_text() == TESTED


def test_tests_that_fail_without_a_mutant_end_the_program(repository: Path, tree: Path):
    (tree / "tests" / "test_limits.py").write_text("def test_limited():\n    assert False\n")
    with pytest.raises(RuntimeError, match=r"tests of wire/limits\.py:2 fail without a mutant"):
        Runner(RECORD, repository, [tree], 10.0).check([one for one in MUTANTS if one.line == 2])
