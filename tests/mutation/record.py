"""Which tests reach a mutant: recorded once per state of the sources, kept under ``.cache``.

Where only tests changed since, those alone are recorded again.
"""

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.mutation.mutants import PACKAGES, Mutant
from tests.mutation.trees import environment


@dataclass(frozen=True, slots=True)
class Reached:
    """What one test executes."""

    cpu_s: float  # of the process, under coverage
    wall_s: float
    lines: Mapping[str, Sequence[int]]  # by product file

    @property
    def cost(self) -> float:
        """What to try early has little of: seconds times lines."""
        return (self.cpu_s + 0.01) * sum(map(len, self.lines.values()))


@dataclass(slots=True)
class Record:
    """What every hermetic test executes, and the files it was recorded with."""

    digests: dict[str, str] = field(default_factory=dict)  # of all files, by path
    tests: dict[str, Reached] = field(default_factory=dict)  # by node id
    _by_line: dict[tuple[str, int], list[str]] = field(default_factory=dict)

    def reaching(self, mutant: Mutant, tree: Path) -> list[str]:
        """Return the tests that execute the mutated text, the fastest first.

        Of a default these are the tests that call its function. Of what else is executed when a
        file is imported they are those that execute lines, or are in files, where the name is
        used; after them whatever executes anything of a file that uses it.
        """
        if not self._by_line:
            self._index()
        if mutant.body is not None:
            first, last = mutant.body
            wanted = self._at((mutant.file, line) for line in range(first, last + 1))
        elif mutant.is_declared:
            near, far = self._using(_names(mutant), tree)
            return self._ordered(near) + self._ordered(far - near)
        else:
            wanted = self._at([(mutant.file, mutant.line)])
            wanted = wanted or self._at([(mutant.file, mutant.first_line)])
        return self._ordered(wanted)

    def _ordered(self, names: Iterable[str]) -> list[str]:
        return in_order({name: self.tests[name].cost for name in names})

    def _at(self, places: Iterable[tuple[str, int]]) -> set[str]:
        return {name for place in places for name in self._by_line.get(place, ())}

    def _using(self, names: Sequence[str], tree: Path) -> tuple[set[str], set[str]]:
        """Return the tests that execute or are beside a use of names; and those of its files."""
        near: set[str] = set()
        far: set[str] = set()
        if not names:
            return near, far
        used = re.compile(rf"\b({'|'.join(map(re.escape, names))})\b")
        for file in sorted({file for file, _ in self._by_line}):
            at = [n for n, line in enumerate(_lines(tree / file), 1) if used.search(line)]
            near |= self._at((file, line) for line in at)
            if at:
                far |= {name for name, one in self.tests.items() if file in one.lines}
        for file in {name.partition("::")[0] for name in self.tests}:
            if used.search("\n".join(_lines(tree / file))):
                near |= {name for name in self.tests if name.partition("::")[0] == file}
        return near, far

    def _index(self) -> None:
        by_line: defaultdict[tuple[str, int], list[str]] = defaultdict(list)
        for name, reached in self.tests.items():
            for file, lines in reached.lines.items():
                for line in lines:
                    by_line[file, line].append(name)
        self._by_line = dict(by_line)


def in_order(costs: Mapping[str, float]) -> list[str]:
    """Order tests: one of each function first, the cheapest before others."""
    nth: defaultdict[str, int] = defaultdict(int)
    ranked: list[tuple[int, float, str]] = []
    for name in sorted(costs, key=lambda name: (costs[name], name)):
        function = name.partition("[")[0]
        ranked.append((nth[function], costs[name], name))
        nth[function] += 1
    return [name for _, _, name in sorted(ranked)]


def _names(mutant: Mutant) -> list[str]:
    """Return the names by which what a declaration declares is used: its own, its class's."""
    own = re.match(r"(\w+)\s*(?::|=)", mutant.statement)
    scope = mutant.scope.rpartition(".")[2]
    return [name for name in (own.group(1) if own else "", scope) if name and name != "self"]


def _lines(file: Path) -> list[str]:
    return file.read_text("utf-8").split("\n")


# ---- recording


def up_to_date(root: Path, tree: Path, cache: Path, show: Callable[[str], None]) -> Record:
    """Return the record for the files of a tree, a copy of ``root``; record what it lacks.

    Args:
        root: the repository, whose ``.cache`` holds coverage.
        tree: a copy of its files, in which tests run.
        cache: file of the record.
        show: called with what takes long.
    """
    now = digests(tree)
    record = _read(cache) if cache.exists() else Record()
    changed = {
        name for name in {*now, *record.digests} if now.get(name) != record.digests.get(name)
    }
    if record.tests and all(map(_is_test_file, changed)):
        stale = sorted(changed)
        kept = {n: r for n, r in record.tests.items() if n.partition("::")[0] not in changed}
    else:
        stale, kept = sorted(filter(_is_test_file, now)), {}
    record = Record(digests=now, tests=kept)
    folders = hermetic(root)[1]
    files = [name for name in stale if name in now and _is_in(name, folders)]
    if files:
        show(f"recording what the tests of {len(files)} files execute; minutes")
        with tempfile.TemporaryDirectory() as folder:
            failed = _record(root, tree, files, Path(folder), record)
        for name in failed:
            show(f"fails without a mutant, so it is not used: {name}")
    if changed:
        cache.parent.mkdir(parents=True, exist_ok=True)
        _write(record, cache)
    return record


def hermetic(root: Path) -> tuple[str, list[str]]:
    """Return the markers and the folders of the hermetic tests, as the Makefile has them."""
    text = (root / "Makefile").read_text()
    values = dict(re.findall(r"^(HERMETIC\w*) := (.*)$", text, re.MULTILINE))
    return values["HERMETIC"], values["HERMETIC_TESTS"].split()


def digests(tree: Path) -> dict[str, str]:
    """Return a digest of every file that tests may depend on, by path."""
    return {
        str(path.relative_to(tree)): hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for path in sorted(tree.rglob("*"))
        if path.is_file() and _matters(path.relative_to(tree))
    }


def _matters(path: Path) -> bool:
    is_code = path.suffix == ".py" and path.parts[0] in {*PACKAGES, "deploy", "benchmarks", "tests"}
    # Its own tests read the text of the product: they would notice every change of it.
    return is_code and path.parts[:2] != ("tests", "mutation") and path.name != "test_mutation.py"


def _is_test_file(name: str) -> bool:
    return name.startswith("tests/") and Path(name).name.startswith("test_")


def _is_in(name: str, folders: Sequence[str]) -> bool:
    return any(Path(name).is_relative_to(folder) for folder in folders)


def _record(root: Path, tree: Path, files: list[str], folder: Path, record: Record) -> list[str]:
    markers = hermetic(root)[0]
    words = ["-n", "2", "--dist", "loadfile"] if len(files) > 2 else []
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words),
            *("-p", "tests.mutation.recorder", "--record-to", str(folder)),
            *("-m", markers, *files),
        ],
        cwd=tree,
        env=environment(tree, root),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in {0, 1, 5}:  # 5: no test, as where all of a file need processes
        raise RuntimeError(f"tests cannot be recorded: {done.stdout[-3000:]}{done.stderr[-2000:]}")
    return _gather(folder, tree, record)


def _gather(folder: Path, tree: Path, record: Record) -> list[str]:
    """Add what the recorder's processes wrote; return the tests that failed, which are left out."""
    from coverage import CoverageData  # installed beside the product, by `make mutants`

    failed: set[str] = set()
    for times in sorted(folder.glob("tests.*.json")):
        written = json.loads(times.read_text())
        failed |= set(written["failed"])
        data = CoverageData(
            str(folder / times.name.replace("tests.", "lines.").removesuffix(".json"))
        )
        data.read()
        lines: defaultdict[str, dict[str, list[int]]] = defaultdict(dict)
        for file in sorted(data.measured_files()):
            name = str(Path(file).relative_to(tree))
            for line, contexts in data.contexts_by_lineno(file).items():
                for context in contexts:
                    lines[context].setdefault(name, []).append(line)
        for name, (cpu_s, wall_s) in written["seconds"].items():
            if name not in failed:
                record.tests[name] = Reached(cpu_s, wall_s, lines.get(name, {}))
    return sorted(failed)


def _read(cache: Path) -> Record:
    kept = json.loads(cache.read_text())
    return Record(kept["digests"], {name: Reached(*one) for name, one in kept["tests"].items()})


def _write(record: Record, cache: Path) -> None:
    tests = {name: [one.cpu_s, one.wall_s, one.lines] for name, one in record.tests.items()}
    new = cache.with_suffix(".new")
    new.write_text(json.dumps({"digests": record.digests, "tests": tests}))
    new.replace(cache)
