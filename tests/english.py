"""Counts of habits in names, comments and docstrings, which may only fall.

python -m tests.english          fails where a count is higher than in tests/english.json
python -m tests.english --write  writes lower counts there
python -m tests.english --show comments generators/   lists what is counted
"""

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
COUNTS = Path(__file__).with_name("english.json")
PACKAGES = ("wire", "algos", "broker", "weightbus", "generators", "learner", "deploy")
NO_BEGINNING = re.compile(r"(of|that|which|by|to|as|for|where|with|whose)\b", re.IGNORECASE)
NO_NAMES = {"one", "found", "given", "several", "why", "words", "most", "own"}
PHRASES = re.compile(
    r"\b(said|told|who|nobody|goes on|stands|whoever|is none|beside|of which)\b", re.IGNORECASE
)
ENTRY = re.compile(r"^ {4,8}(\w+): (\S.*)$")


class Habit(NamedTuple):
    """A place where a rule of CONTRIBUTING.md is broken."""

    kind: str
    place: str
    text: str


def habits_of(path: Path) -> Iterator[Habit]:
    """Yield the habits in a module, and its public classes."""
    source, name = path.read_text("utf-8"), path.relative_to(ROOT).as_posix()
    before = 0  # line of the comment before: a comment of several lines begins once
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        text, line = token.string.lstrip("#!: "), token.start[0]
        stands_alone = not token.line[: token.start[1]].strip()
        if not (stands_alone and before == line - 1) and NO_BEGINNING.match(text):
            yield Habit("comments", f"{name}:{line}", text)
        before = line if stands_alone else 0
        yield from (
            Habit("phrases", f"{name}:{line}", found[0]) for found in PHRASES.finditer(text)
        )
    tree = ast.parse(source)
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield Habit("classes", f"{name}:{node.lineno}", node.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            for target in ast.walk(node.target):
                if isinstance(target, ast.Name) and target.id in NO_NAMES:
                    yield Habit("loops", f"{name}:{target.lineno}", target.id)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            place = f"{name}:{getattr(node, 'lineno', 1)}"
            yield from (Habit("phrases", place, found[0]) for found in PHRASES.finditer(text))
            entries = text.partition("\nArgs:\n")[2].split("\n\n")[0].splitlines()
            for entry in filter(None, map(ENTRY.match, entries)):
                if NO_BEGINNING.match(entry[2]):
                    yield Habit("arguments", place, entry[0].strip())


def habits() -> list[Habit]:
    """Return those of the product; of public classes, those whose name another module uses too."""
    found = [
        habit
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for habit in habits_of(path)
    ]
    times = Counter(habit.text for habit in found if habit.kind == "classes")
    return [habit for habit in found if habit.kind != "classes" or times[habit.text] > 1]


def main() -> int:
    """Compare the counts with those that are kept."""
    parser = argparse.ArgumentParser(description="counts of habits in names and comments")
    parser.add_argument("--write", action="store_true", help="keep the counts of now")
    parser.add_argument("--show", nargs=2, metavar=("KIND", "PATH"), help="list what is counted")
    arguments = parser.parse_args()
    all_of_them = habits()
    if arguments.show is not None:
        kind, start = arguments.show
        for habit in all_of_them:
            if habit.kind == kind and habit.place.startswith(start):
                sys.stdout.write(f"{habit.place}: {habit.text}\n")
        return 0
    counts = dict(sorted(Counter(habit.kind for habit in all_of_them).items()))
    if arguments.write:
        COUNTS.write_text(json.dumps(counts, indent=1) + "\n")
    kept: dict[str, int] = json.loads(COUNTS.read_text())
    more = [kind for kind, count in counts.items() if count > kept.get(kind, 0)]
    for kind in more:
        sys.stdout.write(
            f"{kind}: {counts[kind]}, and at most {kept.get(kind, 0)} are kept (CONTRIBUTING.md, "
            f"English): python -m tests.english --show {kind} PATH\n"
        )
    return 1 if more else 0


if __name__ == "__main__":
    sys.exit(main())
