"""Make the policies that ship with the quickstarts: ``make policy``.

A blank model imitates demonstrations of a teacher who often errs, then it is copied to the
place where the quickstart takes it from.
"""

import argparse
import logging
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from docs.generate.policy.sums import write_blank_sums_model, write_demonstrations
from slipstream.deploy.examples.addition import (
    HELD_OUT,
    copy_folder,
    locked,
    problems,
    write_problems,
    write_rows,
)
from slipstream.wire.errors import ChildDiedError
from slipstream.wire.process.command_line import EXIT_INTERRUPTED, run_role
from slipstream.wire.process.logs import start_logging
from slipstream.wire.process.processes import bound_to_me
from tests.support.blank_model import write_blank_model

_log = logging.getLogger(__name__)
_WARM_ACCURACY = 0.28  # of sampled answers
_WARM_STEPS = 0.52  # of sampled turns
_DEMONSTRATIONS = 4  # per problem


def make_policy(task: "Task", work: Path, out: Path) -> int:
    """Warm up a blank policy on imperfect demonstrations; return the exit code.

    Args:
        task: that it is to begin to learn.
        work: where the inputs and the progress are kept; a second call resumes from there.
        out: the folder of the policy, which appears whole.

    Raises:
        ChildDiedError: the warm-up failed.
    """
    blank, warm = work / "blank", work / "policy"
    with locked(work):
        task.write(work, blank)
    command = [sys.executable, "-m", "docs.generate.policy.warm_up", "--model", str(blank)]
    command += ["--demonstrations", str(work / "demonstrations.jsonl")]
    command += ["--data", str(work / "train.jsonl"), "--held-out", str(work / "held_out.jsonl")]
    command += ["--out", str(warm), "--target", str(task.target)]
    with subprocess.Popen(command, preexec_fn=bound_to_me()) as warm_up:  # noqa: S603 our own
        try:
            code = warm_up.wait()
        except KeyboardInterrupt:  # it got the signal too, and keeps its progress
            code = warm_up.wait()
    if code == EXIT_INTERRUPTED:
        return code
    if code != 0:
        raise ChildDiedError(
            f"the warm-up ended with code {code}: see its last lines. Its progress is in "
            f"{warm}.progress; the same call resumes from there"
        )
    copy_folder(warm, out)
    _log.info("wrote %s", out)
    return 0


@dataclass(frozen=True)
class Task:
    """What a policy is warmed up for."""

    write: Callable[
        [Path, Path], None
    ]  # inputs into a folder, a model without weights into another
    target: float  # share of sampled answers that are right


def _write_addition(work: Path, blank: Path) -> None:
    write_problems(work)
    rng = random.Random(8)  # noqa: S311 not for secrets
    rows = [
        {"prompt": f"{a:02d}+{b:02d}=", "ground_truth": str(_taught_sum(a, b, rng))}
        for a, b in problems()[HELD_OUT:]
        for _ in range(_DEMONSTRATIONS)
    ]
    write_rows(work / "demonstrations.jsonl", rows)
    write_blank_model(blank)


def _write_sums(work: Path, blank: Path) -> None:
    write_demonstrations(work)
    write_blank_sums_model(blank)


TASKS = {"addition": Task(_write_addition, _WARM_ACCURACY), "sums": Task(_write_sums, _WARM_STEPS)}


def _taught_sum(a: int, b: int, rng: random.Random) -> int:
    """Return the answer of a teacher that is often two too high.

    He is mostly right while ``a`` is below 40 and mostly wrong above. A policy that imitates him
    answers nearly every problem rightly now and then, which is what reinforcement can amplify,
    and most of them wrongly when it takes its likeliest answer.
    """
    error_rate = 0.3 if a < 40 else 0.75
    return a + b + (2 if rng.random() < error_rate else 0)


def main() -> int:
    """Make the policy that ships with the project."""
    parser = argparse.ArgumentParser(
        prog="python -m docs.generate.policy.make",
        description="Make a policy that a quickstart starts from; `make policy` calls this.",
        epilog="example:\n  python -m docs.generate.policy.make --out policy\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--task", choices=sorted(TASKS), default="addition")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="where the policy goes"
    )
    parser.add_argument(
        "--work",
        type=Path,
        metavar="DIR",
        help="inputs and progress; a second call resumes from there (.cache/TASK)",
    )
    arguments = parser.parse_args()
    start_logging("policy")
    work = arguments.work or Path(".cache") / arguments.task
    return run_role(lambda: make_policy(TASKS[arguments.task], work, arguments.out))


if __name__ == "__main__":
    raise SystemExit(main())
