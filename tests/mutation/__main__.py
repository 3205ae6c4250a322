"""How much the hermetic tests notice: ``make mutants``, or ``python -m tests.mutation``.

Draws small mistakes (mutants) in product files and runs each against the hermetic tests that
execute the mutated line, package by package. What the tests beside the mutated files execute is
recorded before a package's first mutant, and kept under .cache/mutation; a mutant takes seconds,
one that survives up to some minutes.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.mutation.equivalent import judged
from tests.mutation.mutants import PACKAGES, Mutant, drawn, mutants_of
from tests.mutation.record import asked_files, hermetic, up_to_date
from tests.mutation.run import Outcome, Runner, Verdict
from tests.mutation.trees import copied_tree

ROOT = Path(__file__).parents[2]
_EXAMPLES = """\
examples:
  make mutants                                    60 mutants over all packages
  make mutants MUTANTS='--sample 200 --seed 3'    200 others
  python -m tests.mutation --only algos           60 of one package
  python -m tests.mutation --only broker/ledger/book.py --sample 0      all of one file
  python -m tests.mutation --only broker/ledger/book.py:212 --sample 0  all of one line
  python -m tests.mutation --only wire --list     what would be drawn, without running it

A survivor is a test that is missing, or a mutant that changes nothing: that is listed, with the
reason, in tests/mutation/equivalent.toml. Exit code 1: less than --least of what was executed and
is not equivalent was killed.
"""


def main(words: Sequence[str] | None = None) -> int:
    """Draw, run, print; return the exit code."""
    options = _parser().parse_args(words)
    began_s = time.monotonic()
    if options.list:
        for one in _chosen(ROOT, options):
            _show(f"{one.file}:{one.line} [{one.scope}] {one.mutation}\n    {one.statement}")
        return 0
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        outcomes = _run([Path(folder, str(n)) for n in range(options.workers)], options)
    for line in table(outcomes):
        _show(line)
    share = killed_share(outcomes)
    _show(
        f"{share:.1%} killed of the executed that are not equivalent (at least {options.least:.0%} "
        f"wanted); seed {options.seed}; {time.monotonic() - began_s:.0f} s"
    )
    return 0 if share >= options.least else 1


def _run(trees: list[Path], options: argparse.Namespace) -> list[Outcome]:
    for tree in trees:
        copied_tree(ROOT, tree)
    outcomes: list[Outcome] = []
    to_run: list[Mutant] = []
    known = judged()
    for mutant in _chosen(trees[0], options):
        if any(one.is_about(mutant) for one in known):
            outcomes.append(Outcome(mutant, Verdict.EQUIVALENT))
        else:
            to_run.append(mutant)
    for package in PACKAGES:
        of_package = [one for one in to_run if one.file.startswith(f"{package}/")]
        if of_package:
            outcomes += _run_package(package, of_package, trees, options)
    return outcomes


def _run_package(
    package: str, mutants: list[Mutant], trees: list[Path], options: argparse.Namespace
) -> list[Outcome]:
    began_s = time.monotonic()
    wanted = asked_files(trees[0], {one.file for one in mutants}, hermetic(ROOT)[1])
    _show(f"{package}: recording what {len(wanted)} test files execute, where files have changed")
    record, failed = up_to_date(ROOT, trees[0], ROOT / ".cache/mutation/reached.json", wanted)
    for name in failed:
        _show(f"fails without a mutant, so it is not used: {name}")
    _show(f"{package}: recorded in {time.monotonic() - began_s:.0f} s; {len(mutants)} mutants")
    outcomes: list[Outcome] = []

    def note(outcome: Outcome) -> None:
        outcomes.append(outcome)
        one = outcome.mutant
        if options.verbose or outcome.verdict is Verdict.SURVIVED:
            place = f"{one.file}:{one.line} {one.mutation} [{one.scope}]"
            _show(f"{outcome.verdict}: {place} {outcome.remark}".rstrip())

    runner = Runner(record, ROOT, trees, options.seconds)
    runner.check(mutants[:1])
    runner.run(mutants, note)
    _show(f"{package}: done in {time.monotonic() - began_s:.0f} s")
    return outcomes


def _chosen(tree: Path, options: argparse.Namespace) -> list[Mutant]:
    """Draw from the mutants of what is chosen: packages, folders, files or lines, if any."""
    places = [one.partition(":") for one in options.only]
    mutants: list[Mutant] = []
    for path in [path for package in PACKAGES for path in sorted((tree / package).rglob("*.py"))]:
        file = path.relative_to(tree).as_posix()
        lines = {
            line for place, _, line in places if f"{file}/".startswith(f"{place.rstrip('/')}/")
        }
        if lines or not places:
            every = not lines or "" in lines
            found = mutants_of(file, path.read_text())
            mutants += [one for one in found if every or str(one.line) in lines]
    return drawn(mutants, count=options.sample, seed=options.seed) if options.sample else mutants


def killed_share(outcomes: Sequence[Outcome]) -> float:
    """Return the killed of what was executed and is not equivalent; 1 of nothing."""
    count = Counter(one.verdict for one in outcomes)
    executed = count[Verdict.KILLED] + count[Verdict.SURVIVED]
    return count[Verdict.KILLED] / executed if executed else 1.0


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """Return a line for each package, and one for all."""
    lines = [" ".join([f"{'package':<12}", *(f"{verdict:>12}" for verdict in Verdict), "   share"])]
    for package in [*PACKAGES, "all"]:
        those = [one for one in outcomes if package in {"all", one.mutant.file.split("/")[0]}]
        if those:
            count = Counter(one.verdict for one in those)
            figures = [f"{count[verdict]:>12}" for verdict in Verdict]
            lines.append(" ".join([f"{package:<12}", *figures, f"{killed_share(those):>8.1%}"]))
    return lines


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutation",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--sample", type=int, default=60, help="how many mutants, 0 for all (60)")
    add("--seed", type=int, default=1, help="which (1)")
    add("--only", action="append", default=[], help="package, file or file:line; may be repeated")
    add("--seconds", type=float, default=90.0, help="of tests for each mutant, as recorded (90)")
    add("--workers", type=int, default=2, help="mutants at once (2)")
    add("--least", type=float, default=0.95, help="share killed below which the exit code is 1")
    add("--list", action="store_true", help="print what would be run")
    add("--verbose", action="store_true", help="each mutant, and the test that killed it")
    return parser


def _show(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
