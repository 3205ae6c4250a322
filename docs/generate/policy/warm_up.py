"""Supervised warm-up: a policy that was never trained learns just enough to be reinforced.

Reinforcement needs groups in which some answers are right and some are wrong. From random
weights no answer is ever right, so the policy first imitates demonstrations, with the learner's
own model, until a given share of its sampled answers is right. How long that takes is counted in
optimizer updates, never in seconds: a slow machine makes the same policy.
"""

import argparse
import logging
import signal
from pathlib import Path

from slipstream.wire.errors import ConfigError
from slipstream.wire.process.command_line import EXIT_INTERRUPTED, refuse_settings, run_role
from slipstream.wire.process.logs import start_logging

_log = logging.getLogger(__name__)
_MAX_UPDATES = 20_000
_EPILOG = """example:
  python -m docs.generate.policy.warm_up --model blank --demonstrations demos.jsonl \\
      --data train.jsonl --out warm --target 0.2

Progress is kept in OUT.progress, also on Ctrl-C and SIGTERM. The same call resumes from there;
one with another model or other demonstrations or data starts over.
"""


class _Stop:
    """Whether a signal asked this process to stop. The first one only sets the flag."""

    def __init__(self) -> None:
        self.requested = False
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._on_signal)

    def _on_signal(self, signum: int, _frame: object) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        _log.info("%s: keeping the progress, again ends at once", signal.Signals(signum).name)


def main() -> int:
    """Parse, check, run."""
    arguments = _parser().parse_args()
    if not 0 < arguments.target <= 1:
        return refuse_settings(
            ConfigError(f"--target is a share above 0 and at most 1, got {arguments.target:g}")
        )
    if arguments.max_updates < 1:
        return refuse_settings(
            ConfigError(f"--max-updates must be at least 1, got {arguments.max_updates}")
        )
    start_logging("warm-up")

    def body() -> int:
        stop = _Stop()
        from docs.generate.policy.imitation import WarmUp, warm_up

        job = WarmUp(
            model=arguments.model,
            demonstrations=arguments.demonstrations,
            data=arguments.data,
            held_out=arguments.held_out,
            out=arguments.out,
            target=arguments.target,
            max_updates=arguments.max_updates,
            dtype=arguments.dtype,
        )
        is_written = warm_up(job, is_stopped=lambda: stop.requested)
        return 0 if is_written else EXIT_INTERRUPTED

    return run_role(body)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m docs.generate.policy.warm_up",
        description="Let a small policy imitate demonstrations until it can be reinforced.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder with config and tokenizer, with or without weights",
    )
    parser.add_argument(
        "--demonstrations",
        type=Path,
        required=True,
        metavar="FILE",
        help="JSONL prompts with answers to imitate",
    )
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="FILE",
        help="JSONL prompts with the right answers, which decide when the target is reached",
    )
    parser.add_argument(
        "--held-out", type=Path, metavar="FILE", help="more of these, measured at the end"
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="where the warm policy goes"
    )
    parser.add_argument(
        "--target",
        type=float,
        default=0.2,
        metavar="SHARE",
        help="of sampled answers that are right, to stop at (0.2)",
    )
    parser.add_argument(
        "--max-updates",
        type=int,
        default=_MAX_UPDATES,
        metavar="N",
        help=f"optimizer updates without reaching it are a failure ({_MAX_UPDATES})",
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="of the weights that are written (bfloat16); training is in float32",
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
