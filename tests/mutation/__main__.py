"""How much the hermetic tests notice: ``make mutants``, or ``python -m tests.mutation``.

Draws small mistakes (mutants) in product files and runs each against the hermetic tests that
execute the mutated line. What those tests execute is recorded once, in minutes, and kept under
.cache/mutation; a mutant takes seconds, one that survives up to some minutes.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.mutation.equivalent import Equivalent, judged
from tests.mutation.mutants import PACKAGES, Mutant, drawn, mutants_of
from tests.mutation.record import up_to_date
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


def main(words: Sequence[str]) -> int:
    """Draw, run, print; return the exit code."""
    options = _parser().parse_args(words)
    began_s = time.monotonic()
    if options.list:
        for one in _chosen(ROOT, options):
            _show(f"{one.file}:{one.line} [{one.scope}] {one.mutation}\n    {one.statement}")
        return 0
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        tree = copied_tree(ROOT, Path(folder, "0"))
        mutants, known = _chosen(tree, options), judged()
        record = up_to_date(ROOT, tree, ROOT / ".cache/mutation/record.json", _show)
        trees = [
            tree,
            *(copied_tree(ROOT, Path(folder, str(n))) for n in range(1, options.workers)),
        ]
        outcomes = [Outcome(one, Verdict.EQUIVALENT) for one in mutants if _is_known(one, known)]
        to_run = [one for one in mutants if not _is_known(one, known)]

        def note(outcome: Outcome) -> None:
            outcomes.append(outcome)
            mutant = outcome.mutant
            if options.verbose or outcome.verdict is Verdict.SURVIVED:
                _show(
                    f"{outcome.verdict}: {mutant.file}:{mutant.line} {mutant.mutation} "
                    f"[{mutant.scope}] {outcome.remark}".rstrip()
                )

        runner = Runner(record, ROOT, trees, options.seconds)
        runner.check(list({one.file.split("/")[0]: one for one in to_run}.values()))
        runner.run(to_run, note)
    for line in table(outcomes):
        _show(line)
    share = killed_share(outcomes)
    _show(
        f"{share:.1%} killed of the executed that are not equivalent (at least {options.least:.0%} "
        f"wanted); seed {options.seed}; {time.monotonic() - began_s:.0f} s"
    )
    return 0 if share >= options.least else 1


def _chosen(tree: Path, options: argparse.Namespace) -> list[Mutant]:
    mutants = [one for one in all_mutants(tree) if is_chosen(one, options.only)]
    return drawn(mutants, count=options.sample, seed=options.seed) if options.sample else mutants


def all_mutants(tree: Path) -> list[Mutant]:
    """Return every mutant of the product."""
    files = [file for package in PACKAGES for file in sorted((tree / package).rglob("*.py"))]
    return [
        mutant
        for file in files
        for mutant in mutants_of(file.relative_to(tree).as_posix(), file.read_text())
    ]


def is_chosen(mutant: Mutant, only: Sequence[str]) -> bool:
    """Return whether a mutant is in one of these packages, folders, files or lines, if any."""
    for one in only:
        place, _, line = one.partition(":")
        is_there = mutant.file == place or mutant.file.startswith(place.rstrip("/") + "/")
        if is_there and (not line or int(line) == mutant.line):
            return True
    return not only


def killed_share(outcomes: Sequence[Outcome]) -> float:
    """Return the killed and timed out of what was executed and is not equivalent; 1 of nothing."""
    count = Counter(one.verdict for one in outcomes)
    killed = count[Verdict.KILLED] + count[Verdict.TIMED_OUT]
    executed = killed + count[Verdict.SURVIVED]
    return killed / executed if executed else 1.0


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


def _is_known(mutant: Mutant, known: Sequence[Equivalent]) -> bool:
    return any(one.is_about(mutant) for one in known)


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
    raise SystemExit(main(sys.argv[1:]))
