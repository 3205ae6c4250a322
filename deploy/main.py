"""`slipstream`: run, check and look at runs."""

import argparse
import logging
from collections.abc import Callable
from pathlib import Path

from slipstream.wire.process.command_line import run_role

_EXAMPLES = """examples:
  slipstream quickstart                                  two-digit addition on this machine
  slipstream quickstart learner.lr=0                     the same without learning
  slipstream run --config run.toml generators.count=4    a run with every role on this host
  slipstream run --config run.toml --dry-run             check the settings, print the processes
  slipstream run --config run.toml --resume auto         go on from the newest checkpoint
  slipstream show runs/quickstart --eval --last 3        what it answered in the newest evaluation
  slipstream ledger runs/quickstart                      where every prompt went
  slipstream ledger trace 17                             the life of one prompt
  slipstream versions                                    which weights each engine holds
  slipstream dashboard runs/quickstart                   the page of a run, also when it has ended
  slipstream dead-letters list                           what nobody could answer or score
  slipstream reward test --reward my.py:score --data train.parquet    score rows without a run
  slipstream keys make judge-1 --role reward_worker      a key for a worker on another host
  slipstream top                                         watch the newest run, live
  slipstream status runs/quickstart --json               figures of a run that goes on
  slipstream trace runs/quickstart                       its time line, for ui.perfetto.dev
  slipstream export runs/quickstart --best --out DIR     a checkpoint as a Hugging Face folder
  slipstream data check train.parquet --model DIR        rows, lengths and problems of prompts
  slipstream replay runs/quickstart --config run.toml    train on recorded batches alone
"""
_LEDGER_EXAMPLES = """examples:
  slipstream ledger                        the newest run
  slipstream ledger runs/demo --items 30   and the 30 oldest items
  slipstream ledger trace 17 runs/demo     what became of the prompt at position 17
  slipstream ledger trace g203 --json      what became of group 203
  slipstream ledger trace "37+85="         of the newest item whose prompt holds this text
"""
_VERSIONS_EXAMPLES = """examples:
  slipstream versions                       of the newest run
  slipstream versions runs/demo --last 30   and its 30 newest publishes
  slipstream versions runs/demo --json      everything, for programs

An engine is current, behind (it runs an older version, or has none yet), receiving, or torn: it may
hold parts of two versions, and generates nothing until it holds a whole one.
"""
_TOP_EXAMPLES = """examples:
  slipstream top                           the newest run; q ends it
  slipstream top runs/demo --json          its figures and advisories once, for programs

It works over ssh on a terminal of 80x24 and shows more on a larger one. Every sentence at the top
is explained in docs/operations.md.
"""
_TRACE_EXAMPLES = """examples:
  slipstream trace runs/demo               writes runs/demo/trace.json
  slipstream trace --out /tmp/demo.json    of the newest run

Open the file at https://ui.perfetto.dev (nothing is sent anywhere) or in chrome://tracing.
"""
_DASHBOARD_EXAMPLES = """examples:
  slipstream dashboard                         of the newest run
  slipstream dashboard runs/demo --port 8080   at a port of your own

The page is served on this host alone and wants the token of its address. From elsewhere:
  ssh -L 8080:127.0.0.1:8080 HOST
"""
_LETTERS_EXAMPLES = """examples:
  slipstream dead-letters list                   of the newest run
  slipstream dead-letters show g17               its prompt, its answers and why they have no reward
  slipstream dead-letters retry all              issue the prompts again, as new items
  slipstream dead-letters drop g17 g21           forget them
"""
_KEYS_EXAMPLES = """examples:
  slipstream keys make desk --role operator --config run.toml
  slipstream keys make judge-1 judge-2 --role reward_worker --keys /srv/keys
  slipstream keys list --config run.toml
  slipstream keys revoke judge-1 --config run.toml     a broker that runs notices within a second
  slipstream keys revoke gpu7 --discard                what it answered is not to be trained
"""
_NEWEST = "a run folder, default the newest one"
_RESUME_HELP = "go on from the newest checkpoint of this run (auto), of a run folder, or from one"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slipstream",
        description="Disaggregated asynchronous reinforcement learning for language models.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="run every role of a run on this host")
    run.add_argument("--config", type=Path, required=True, metavar="RUN.toml")
    run.add_argument("--dry-run", action="store_true", help="check, print the processes, exit")
    run.add_argument("--resume", metavar="auto|FOLDER", help=_RESUME_HELP)
    run.add_argument("overrides", nargs="*", metavar="section.key=value")
    quickstart = commands.add_parser("quickstart", help="teach a tiny policy to add, in minutes")
    quickstart.add_argument("--config", type=Path, default=Path("configs/quickstart.toml"))
    quickstart.add_argument("--resume", metavar="auto|FOLDER", help=_RESUME_HELP)
    quickstart.add_argument("overrides", nargs="*", metavar="section.key=value")
    status = commands.add_parser("status", help="figures of a run that goes on")
    status.add_argument("folder", type=Path, nargs="?", metavar="RUN", help=_NEWEST)
    status.add_argument("--json", action="store_true", help="everything, for programs")
    _add_viewers(commands)
    _add_readers(commands)
    return parser


def _add_viewers(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add what shows a run over time."""
    top = commands.add_parser(
        "top",
        help="watch a run in this terminal",
        epilog=_TOP_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("folder", type=Path, nargs="?", metavar="RUN", help=_NEWEST)
    top.add_argument("--json", action="store_true", help="print the figures once, for programs")
    page = commands.add_parser(
        "dashboard",
        help="the page of a run: its address, or that of one that has ended, served until Ctrl-C",
        epilog=_DASHBOARD_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    page.add_argument("folder", type=Path, nargs="?", metavar="RUN", help=_NEWEST)
    page.add_argument("--port", type=int, default=0, help="0 lets the system choose")
    trace = commands.add_parser(
        "trace",
        help="write the time line of a run for Perfetto or Chrome",
        epilog=_TRACE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    trace.add_argument("folder", type=Path, nargs="?", metavar="RUN", help=_NEWEST)
    trace.add_argument("--out", type=Path, metavar="FILE", help="default: trace.json of the run")
    trace.add_argument(  # so many take about 50 MB; viewers become slow beyond it
        "--max-spans", type=int, default=200_000, metavar="N", help="the newest N (200000)"
    )


def _add_readers(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add what looks at runs, checkpoints and data."""
    show = commands.add_parser("show", help="read what the policy wrote")
    show.add_argument("folder", type=Path, metavar="runs/NAME")
    show.add_argument("--last", type=int, default=5, metavar="N", help="at most so many (5)")
    show.add_argument("--step", type=int, help="of this learner step or evaluation")
    show.add_argument("--group", type=int, help="of this group, or evaluation problem")
    show.add_argument("--eval", action="store_true", help="answers to held-out problems")
    ledger = commands.add_parser(
        "ledger",
        help="where every prompt went: the account of a run, or the life of one item",
        epilog=_LEDGER_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ledger.add_argument(
        "words",
        nargs="*",
        metavar="[trace PROMPT] [RUN]",
        help="PROMPT is a position in the data (17), a group (g17) or a piece of the prompt; "
        "RUN is a run folder, default the newest one",
    )
    ledger.add_argument("--items", type=int, default=10, metavar="N", help="oldest items (10)")
    ledger.add_argument("--json", action="store_true", help="everything, for programs")
    versions = commands.add_parser(
        "versions",
        help="which weights each engine holds since when, and how the publishes went",
        epilog=_VERSIONS_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    versions.add_argument("folder", type=Path, nargs="?", metavar="RUN", help=_NEWEST)
    versions.add_argument("--last", type=int, default=10, metavar="N", help="publishes (10)")
    versions.add_argument("--json", action="store_true", help="everything, for programs")
    export = commands.add_parser("export", help="write a checkpoint as a Hugging Face folder")
    export.add_argument(
        "target", type=Path, nargs="?", metavar="RUN|CHECKPOINT", help="default: the newest run"
    )
    export.add_argument("--out", type=Path, metavar="DIR", help="default: model/ of the run")
    export.add_argument("--best", action="store_true", help="the best checkpoint by eval.metric")
    replay = commands.add_parser("replay", help="train on recorded batches alone")
    replay.add_argument("target", type=Path, metavar="RUN|FILE")
    replay.add_argument("--config", type=Path, required=True, metavar="RUN.toml")
    replay.add_argument("--dry-run", action="store_true", help="check and print the settings")
    replay.add_argument("overrides", nargs="*", metavar="section.key=value")
    _add_dead_letters(commands)
    _add_keys(commands)
    data = commands.add_parser("data", help="look at prompts before a run")
    checks = data.add_subparsers(dest="action", required=True, metavar="check")
    check = checks.add_parser("check", help="rows, lengths and problems of prompt files")
    check.add_argument("overrides", nargs="*", metavar="FILE section.key=value")
    check.add_argument("--config", type=Path, metavar="RUN.toml", help="default: all defaults")
    check.add_argument("--model", type=Path, metavar="DIR", help="default: run.model")
    reward = commands.add_parser("reward", help="try a reward function without a run")
    trials = reward.add_subparsers(dest="action", required=True, metavar="test")
    test = trials.add_parser("test", help="score answers to rows of a file")
    test.add_argument("--reward", default="", metavar="MODULE:NAME", help="or FILE.py:NAME")
    test.add_argument("--data", required=True, metavar="FILE", help="or reasoning_gym:NAME")
    test.add_argument("--answers", type=Path, metavar="FILE", help="JSONL with the answers")
    test.add_argument("--n", type=int, default=20, metavar="N", help="rows to score (20)")
    test.add_argument("--config", type=Path, metavar="RUN.toml", help="for [reward] and [data]")
    test.add_argument("--json", action="store_true", help="everything, for programs")
    test.add_argument("overrides", nargs="*", metavar="section.key=value")


def _add_dead_letters(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    letters = commands.add_parser(
        "dead-letters",
        help="what nobody could answer or score: list, show, retry, drop",
        epilog=_LETTERS_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    letters.add_argument("action", choices=("list", "show", "retry", "drop"))
    letters.add_argument("words", nargs="*", metavar="GROUP", help="g17, or all")
    letters.add_argument("--run", type=Path, metavar="runs/NAME", help="default: the newest run")
    letters.add_argument("--json", action="store_true", help="everything, for programs")


def _add_keys(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    keys = commands.add_parser(
        "keys",
        help="keys for roles on other hosts: make, list, revoke",
        epilog=_KEYS_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    keys.add_argument("action", choices=("make", "list", "revoke"))
    keys.add_argument("names", nargs="*", metavar="NAME", help="one per host and role")
    keys.add_argument("--role", default="reward_worker", help="what a new key is for")
    keys.add_argument("--keys", type=Path, metavar="DIR", help="folder of the keys")
    keys.add_argument("--config", type=Path, metavar="RUN.toml", help="whose broker.keys to use")
    keys.add_argument(
        "--discard",
        action="store_true",
        help="revoke: also drop what was answered with the key and is not trained yet",
    )
    keys.add_argument("--json", action="store_true", help="for programs")


def main() -> int:
    """Parse and hand over to one subcommand."""
    parser = _parser()
    arguments, left = parser.parse_known_args()
    if left:  # argparse gives up on settings that come after an option
        if "overrides" not in arguments or any(word.startswith("-") for word in left):
            parser.error(f"unrecognized arguments: {' '.join(left)}")
        arguments.overrides += left
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    return run_role(lambda: _bodies()[arguments.command](arguments))


def _bodies() -> dict[str, Callable[[argparse.Namespace], int]]:
    """Return what each subcommand does; what that needs is imported here, after the parsing."""
    from slipstream.deploy.commands import bodies as do

    return {
        "run": lambda a: do.run(a.config, a.overrides, a.dry_run, a.resume),
        "quickstart": lambda a: do.quickstart(a.config, a.overrides, a.resume),
        "status": lambda a: do.status(a.folder, as_json=a.json),
        "top": lambda a: do.top(a.folder, as_json=a.json),
        "dashboard": lambda a: do.dashboard(a.folder, port=a.port),
        "trace": lambda a: do.trace(a.folder, a.out, max_spans=a.max_spans),
        "show": lambda a: do.show(
            a.folder, count=a.last, step=a.step, group=a.group, evaluation=a.eval
        ),
        "ledger": lambda a: do.ledger(a.words, num_items=a.items, as_json=a.json),
        "versions": lambda a: do.versions(a.folder, count=a.last, as_json=a.json),
        "export": lambda a: do.export(a.target, a.out, best=a.best),
        "replay": lambda a: do.replay(a.target, a.config, a.overrides, dry_run=a.dry_run),
        "dead-letters": lambda a: do.dead_letters(a.action, a.words, folder=a.run, as_json=a.json),
        "reward": lambda a: do.reward_test(
            a.overrides,
            reward=a.reward,
            data=a.data,
            count=a.n,
            answers=a.answers,
            config=a.config,
            as_json=a.json,
        ),
        "keys": lambda a: do.keys(
            a.action,
            a.names,
            role=a.role,
            folder=a.keys,
            config=a.config,
            as_json=a.json,
            discard=a.discard,
        ),
        "data": lambda a: do.data_check(a.overrides, a.config, a.model),
    }


if __name__ == "__main__":
    raise SystemExit(main())
