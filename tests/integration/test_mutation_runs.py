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


def test_mutants_are_killed_end_in_time_or_survive_and_the_repository_stays_as_it_is(
    repository: Path, tmp_path: Path
):
    tree = copied_tree(repository, tmp_path / "copy")
    lines = {
        "tests/test_limits.py::test_limited": [2, 3, 4],
        "tests/test_limits.py::test_spin": [8, 9, 10],
    }
    record = Record(
        tests={name: Reached(0.0, 0.0, {"wire/limits.py": at}) for name, at in lines.items()}
    )
    expected = {
        "value > most -> value >= most": Verdict.SURVIVED,  # is the same
        "value > most -> value <= most": Verdict.KILLED,
        "n -= 1 -> n += 1": Verdict.TIMED_OUT,  # does not end
        "n > 0 -> n >= 0": Verdict.KILLED,
    }
    mutants = [one for one in mutants_of("wire/limits.py", TESTED) if one.mutation in expected]
    unreached = replace(mutants[0], line=99, first_line=99)
    runner = Runner(record, repository, [tree], 10.0, start_s=4.0)
    runner.check(mutants[:1])
    outcomes: list[Outcome] = []
    runner.run([*mutants, unreached], outcomes.append)
    assert [one.mutant for one in outcomes if one.verdict is Verdict.UNREACHED] == [unreached]
    ran = [one for one in outcomes if one.verdict is not Verdict.UNREACHED]
    assert {one.mutant.mutation: one.verdict for one in ran} == expected
    killed = {one.mutant.mutation: one.remark for one in ran if one.verdict is Verdict.KILLED}
    assert killed["value > most -> value <= most"] == "tests/test_limits.py::test_limited"
    assert (repository / "wire" / "limits.py").read_text() == TESTED
    assert (tree / "wire" / "limits.py").read_text() == TESTED


def test_tests_that_fail_without_a_mutant_end_the_program(repository: Path, tmp_path: Path):
    tree = copied_tree(repository, tmp_path / "copy")
    (tree / "tests" / "test_limits.py").write_text("def test_limited():\n    assert False\n")
    name = "tests/test_limits.py::test_limited"
    record = Record(tests={name: Reached(0.0, 0.0, {"wire/limits.py": [2]})})
    (mutant, *_) = [one for one in mutants_of("wire/limits.py", TESTED) if one.line == 2]
    with pytest.raises(RuntimeError, match=r"tests of wire/limits\.py:2 fail without a mutant"):
        Runner(record, repository, [tree], 10.0).check([mutant])
