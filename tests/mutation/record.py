"""Which tests reach a mutant: recorded once per state of the sources, kept under ``.cache``.

Where only tests changed since, those alone are recorded again. This is a plugin of pytest too,
loaded with ``-p tests.mutation.record --record-to FOLDER``, alone or in every process of xdist.
"""

import ast
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.mutation.mutants import PACKAGES, Mutant
from tests.mutation.trees import environment


@dataclass(frozen=True, slots=True)
class Reached:
    """What one test executes."""

    seconds: float  # under coverage
    lines: Mapping[str, Sequence[int]]  # by product file

    @property
    def cost(self) -> float:
        """What to try early has little of: seconds times lines."""
        return (self.seconds + 0.01) * sum(map(len, self.lines.values()))


@dataclass(slots=True)
class Record:
    """What every hermetic test executes, and the files it was recorded with."""

    digests: dict[str, str] = field(default_factory=dict)  # of all files, by path
    tests: dict[str, Reached] = field(default_factory=dict)  # by node id

    def reaching(self, mutant: Mutant, tree: Path) -> list[str]:
        """Return the tests that execute the mutated text, one of each function first, cheap first.

        Of a default these are the tests that call its function. Of what else is executed when a
        file is imported they are those that execute lines, or are in files, where the name is
        used; after them whatever executes anything of a file that uses it.
        """
        if mutant.body is not None:
            first, last = mutant.body
            return self._ordered(self._at(mutant.file, range(first, last + 1)))
        if mutant.is_declared:
            near, far = self._using(_names(mutant), tree)
            return self._ordered(near) + self._ordered(far - near)
        wanted = self._at(mutant.file, [mutant.line])
        return self._ordered(wanted or self._at(mutant.file, [mutant.first_line]))

    def _at(self, file: str, lines: Iterable[int]) -> set[str]:
        wanted = set(lines)
        return {name for name, one in self.tests.items() if wanted & {*one.lines.get(file, ())}}

    def _using(self, names: Sequence[str], tree: Path) -> tuple[set[str], set[str]]:
        """Return the tests that execute or are beside a use of names; and those of its files."""
        used = re.compile(rf"\b({'|'.join(map(re.escape, names))})\b")
        near: set[str] = set()
        far: set[str] = set()
        for file in sorted({file for one in self.tests.values() for file in one.lines}):
            lines = (tree / file).read_text("utf-8").split("\n")
            at = [n for n, line in enumerate(lines, 1) if used.search(line)]
            if names and at:
                near |= self._at(file, at)
                far |= {name for name, one in self.tests.items() if file in one.lines}
        for file in {name.partition("::")[0] for name in self.tests}:
            if names and used.search((tree / file).read_text("utf-8")):
                near |= {name for name in self.tests if name.partition("::")[0] == file}
        return near, far

    def _ordered(self, names: Iterable[str]) -> list[str]:
        nth: defaultdict[str, int] = defaultdict(int)
        ranked: list[tuple[int, float, str]] = []
        for cost, name in sorted((self.tests[name].cost, name) for name in names):
            function = name.partition("[")[0]
            ranked.append((nth[function], cost, name))
            nth[function] += 1
        return [name for _, _, name in sorted(ranked)]


def _names(mutant: Mutant) -> list[str]:
    """Return the names by which what a declaration declares is used: its own, its class's."""
    own = re.match(r"(\w+)\s*(?::|=)", mutant.statement)
    scope = mutant.scope.rpartition(".")[2]
    return [name for name in (own.group(1) if own else "", scope) if name]


# ---- recording ---------------------------------------------------------------


def up_to_date(
    root: Path, tree: Path, cache: Path, wanted: Collection[str]
) -> tuple[Record, list[str]]:
    """Record what the record lacks of some test files; return it, and the tests that failed.

    What failed is left out of the record.

    Args:
        root: the repository, whose ``.cache`` holds coverage.
        tree: a copy of its files, in which tests run.
        cache: file of the record.
        wanted: test files, by path.
    """
    kept = json.loads(cache.read_text()) if cache.exists() else {}
    now, before = digests(tree), kept.get("digests", {})
    changed = {name for name in {*now, *before} if now.get(name) != before.get(name)}
    recorded = set(kept.get("files", ())) - changed
    if not all(map(_is_test_file, changed)):
        recorded = set()
    tests = {
        name: one
        for name, one in kept.get("tests", {}).items()
        if name.partition("::")[0] in recorded
    }
    missing = sorted(set(wanted) - recorded)
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        if missing:
            _run_recorded(missing, hermetic(root)[0], root, tree, folder)
        for part in Path(folder).iterdir():
            written = json.loads(part.read_text())
            tests |= written["tests"]
            failed += written["failed"]
    cache.parent.mkdir(parents=True, exist_ok=True)
    files = sorted({*recorded, *missing})
    cache.write_text(json.dumps({"digests": now, "files": files, "tests": tests}))
    return Record(now, {name: Reached(*one) for name, one in tests.items()}), sorted(failed)


def asked_files(tree: Path, products: Collection[str], folders: Sequence[str]) -> list[str]:
    """Return the test files that import one of some product files, or mirror its folder.

    A module of tests that imports one counts like the product file.

    Args:
        tree: a copy of the repository.
        products: product files, by path.
        folders: where the hermetic tests are.
    """
    imported = {_dotted(path, tree): _imported(path) for path in (tree / "tests").rglob("*.py")}
    asked = {f"slipstream.{_dotted(tree / file, tree)}" for file in products}
    before = 0
    while before < len(asked):
        before = len(asked)
        asked |= {module for module, names in imported.items() if names & asked}
    mirrors = {tree / "tests" / "unit" / Path(file).parent for file in products}
    return [
        str(path.relative_to(tree))
        for folder in folders
        for path in sorted((tree / folder).rglob("test_*.py"))
        if path.parent in mirrors or _dotted(path, tree) in asked
    ]


def _dotted(path: Path, tree: Path) -> str:
    parts = path.relative_to(tree).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


@cache
def _imported(path: Path) -> set[str]:
    """Return the dotted names that a source imports, modules or what is in them."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def hermetic(root: Path) -> tuple[str, list[str]]:
    """Return the markers and the folders of the hermetic tests, as the Makefile has them."""
    text = (root / "Makefile").read_text()
    values = dict(re.findall(r"^(HERMETIC\w*) := (.*)$", text, re.MULTILINE))
    return values["HERMETIC"], values["HERMETIC_TESTS"].split()


def digests(tree: Path) -> dict[str, str]:
    """Return a digest of every file that tests may depend on, by path."""
    return {
        str(path.relative_to(tree)): hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for path in sorted(tree.rglob("*.py"))
        if _matters(path.relative_to(tree))
    }


def _matters(path: Path) -> bool:
    # Its own tests read the text of the product: they would notice every change of it.
    is_own = path.parts[:2] == ("tests", "mutation") or path.name == "test_mutation.py"
    return path.parts[0] in {*PACKAGES, "deploy", "benchmarks", "tests"} and not is_own


def _is_test_file(name: str) -> bool:
    return name.startswith("tests/") and Path(name).name.startswith("test_")


def _run_recorded(files: list[str], markers: str, root: Path, tree: Path, folder: str) -> None:
    workers = ["-n", "2", "--dist", "loadfile"] if len(files) > 2 else []
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *workers),
            *("-p", "tests.mutation.record", "--record-to", folder, "-m", markers, *files),
        ],
        cwd=tree,
        env=environment(tree, root),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in {0, 1, 5}:  # 5: no test, as where all of a file need processes
        raise RuntimeError(f"tests cannot be recorded: {done.stdout[-3000:]}{done.stderr[-2000:]}")


# ---- the plugin --------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--record-to``."""
    parser.addoption("--record-to", type=Path, required=True, help="folder for the record")


def pytest_configure(config: pytest.Config) -> None:
    """Begin where tests run: not in the process that only hands them out."""
    worker = getattr(config, "workerinput", {}).get("workerid", "main")
    if worker != "main" or not config.getoption("numprocesses", None):
        file = config.getoption("record_to") / f"{worker}.json"
        config.pluginmanager.register(_Recorder(file, config.rootpath), "mutation-recorder")


class _Recorder:
    """Writes what each test executes. What is first imported in a test belongs to none."""

    def __init__(self, file: Path, root: Path) -> None:
        from coverage import Coverage  # installed beside the product, by `make mutants`

        self._file, self._root = file, root
        self._seconds: dict[str, float] = {}
        self._failed: set[str] = set()
        include = [f"{root}/{package}/*" for package in (*PACKAGES, "deploy")]
        self._coverage = Coverage(
            data_file=None, config_file=False, include=include, messages=False
        )
        self._coverage.start()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self._coverage.switch_context(item.nodeid)
        began_s = time.monotonic()
        try:
            return (yield)
        finally:
            self._seconds[item.nodeid] = round(time.monotonic() - began_s, 4)
            self._coverage.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid)  # could kill anything

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        lines: defaultdict[str, dict[str, list[int]]] = defaultdict(dict)
        data = self._coverage.get_data()
        for file in sorted(data.measured_files()):
            name = str(Path(file).relative_to(self._root))
            for line, contexts in data.contexts_by_lineno(file).items():
                for context in contexts:
                    lines[context].setdefault(name, []).append(line)
        tests = {n: [s, lines[n]] for n, s in self._seconds.items() if n not in self._failed}
        self._file.write_text(json.dumps({"tests": tests, "failed": sorted(self._failed)}))
