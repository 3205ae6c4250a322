"""The commands of the Makefile find every test: each searches some folders only."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
WITH_PROCESSES = re.compile(r"mark\.(integration|redis|e2e|slow|chaos)\b")


def places(variable: str) -> list[Path]:
    found = re.search(rf"^{variable} := ((?:.*\\\n)*.*)$", MAKEFILE, re.MULTILINE)
    assert found is not None, variable
    return [ROOT / word for word in found.group(1).replace("\\", " ").split()]


def is_in(path: Path, where: list[Path]) -> bool:
    return any(path.is_relative_to(place) for place in where)


def test_every_test_is_in_a_folder_of_a_command():
    hermetic, processes = places("HERMETIC_TESTS"), places("PROCESS_TESTS")
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    assert len(files) > 100
    for path in files:
        assert is_in(path, hermetic + processes), path
        marked = WITH_PROCESSES.search(path.read_text()) is not None
        if marked and path != Path(__file__):
            assert is_in(path, processes), f"{path} has tests that only `make unit` would find"


def test_what_is_in_no_hermetic_folder_is_marked_throughout():
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = path.read_text()
        for_all = re.search(r"^pytestmark = (\[.*?^\]|.*)$", text, re.MULTILINE | re.DOTALL)
        is_marked = for_all is not None and WITH_PROCESSES.search(for_all.group(1))
        if is_in(path, places("HERMETIC_TESTS")) or is_marked:
            continue
        for decorators, name in re.findall(
            r"((?:^@.*\n(?:^[ )].*\n)*)*)^(?:async )?def (test_\w+)", text, re.MULTILINE
        ):
            assert WITH_PROCESSES.search(decorators), f"no command runs {name} in {path}"
