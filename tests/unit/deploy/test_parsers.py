"""Every command line explains itself: help of each argument, examples, version, what was meant."""

import argparse
import re
from collections.abc import Callable, Iterator

import pytest

from slipstream.broker import main as broker
from slipstream.broker.reward_worker import main as reward_worker
from slipstream.deploy import main as deploy
from slipstream.deploy.commands.completion import ROLES
from slipstream.generators import main as generator
from slipstream.generators.environments import main as environment
from slipstream.learner import main as learner

ROLE_PARSERS: dict[str, Callable[[], argparse.ArgumentParser]] = {
    "start-broker": broker.make_parser,
    "start-learner": learner.make_parser,
    "start-generator": generator.make_parser,
    "start-environment": environment.make_parser,
    "start-reward-worker": reward_worker.make_parser,
}
FEWEST_WORDS = 2  # of a help text


def commands() -> dict[str, argparse.ArgumentParser]:
    (found,) = (
        action
        for action in deploy.make_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    return dict(found.choices)


def parsers() -> dict[str, argparse.ArgumentParser]:
    named = {f"slipstream {name}": parser for name, parser in commands().items()}
    return named | {name: make() for name, make in ROLE_PARSERS.items()}


def arguments(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        if not isinstance(action, argparse._SubParsersAction):
            yield action


def exit_of(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", list(words))
    with pytest.raises(SystemExit) as end:
        deploy.main()
    return int(end.value.code or 0)


def test_the_roles_are_those_that_completion_knows():
    assert ROLE_PARSERS.keys() == ROLES.keys()


def test_each_argument_has_help():
    every = [(name, one) for name, parser in parsers().items() for one in arguments(parser)]
    for name, action in every:
        what = "/".join(action.option_strings) or action.dest
        assert action.help, f"{name}: {what}"
        assert len(action.help.split()) >= FEWEST_WORDS, f"{name}: {what}: {action.help}"
        assert not action.help.startswith(("or ", "of ", "default")), f"{name}: {action.help}"
        assert not action.help.endswith("."), f"{name}: {action.help}"


def test_each_command_has_examples_that_it_can_parse():
    for name, parser in parsers().items():
        assert parser.description
        examples = re.findall(rf"^  {name}\b.*", parser.epilog or "", re.MULTILINE)
        assert examples
        flags = {flag for action in arguments(parser) for flag in action.option_strings}
        for example in examples:
            used = re.findall(r"(?<!\S)--[a-z][a-z-]*", example.partition(" -- ")[0])
            assert set(used) <= flags, example


def test_every_command_answers_help_with_an_example(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for name in deploy.COMMANDS:
        assert exit_of(monkeypatch, "slipstream", name, "--help") == 0
        assert f"\n  slipstream {name}" in capsys.readouterr().out


def test_every_command_that_looks_at_a_run_takes_it_by_position_and_needs_none():
    looking = {
        *("dashboard", "dead-letters", "export", "ledger", "replay", "scale", "show"),
        *("top", "trace"),
    }
    for name in looking:
        positions = [one for one in arguments(commands()[name]) if not one.option_strings]
        taking = [one for one in positions if re.search(r"\bRUN\b(?!\.)", str(one.metavar))]
        assert len(taking) == 1, name
        assert taking[0].nargs in {"?", "*"}, name
        assert "default" in str(taking[0].help), name


@pytest.mark.parametrize("name", list(ROLE_PARSERS))
def test_roles_print_the_version(name: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="0"):
        ROLE_PARSERS[name]().parse_args(["--version"])
    assert re.fullmatch(rf"{name} \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_the_version_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert exit_of(monkeypatch, "slipstream", "--version") == 0
    assert re.fullmatch(r"slipstream \d+\.\d+\.\d+\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["metrisc"], "no command 'metrisc': did you mean metrics?"),
        (["dead-leters", "list"], "did you mean dead-letters?"),
        (["qqqq"], "no command 'qqqq': slipstream --help has all"),
        (["run", "--dry-rum"], "unrecognized arguments: --dry-rum: did you mean --dry-run?"),
        (["top", "runs/a", "runs/b"], "unrecognized arguments: runs/b"),
    ],
)
def test_a_wrong_word_is_answered_with_the_nearest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], told: str
):
    assert exit_of(monkeypatch, "slipstream", *words) == 2
    assert told in capsys.readouterr().err
