"""Which run and groups a command line names, and an ended run's letters; a live one: tests/e2e."""

import json
from pathlib import Path

import pytest

from slipstream.broker.report.run_files import write_letters
from slipstream.deploy.commands.dead_letters import split_words
from slipstream.wire.errors import ConfigError, PeerLostError
from slipstream.wire.files.run_folder import DEAD_LETTERS
from slipstream.wire.messages.broker import DeadLetters
from tests.support.commands import call_command
from tests.support.ledger_driver import with_a_dead_letter


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "resolved.toml").write_text("")
    return tmp_path


def write(folder: Path) -> int:
    ledger, group_id = with_a_dead_letter()
    letters = tuple(ledger.book.state.dead_letters.values())
    found = DeadLetters(letters=letters, total=1, forgotten=2)
    write_letters(folder, found)
    return group_id


def dead_letters(*words: str, folder: Path, as_json: bool = False) -> int:
    return call_command("dead-letters", *words, run=folder, json=as_json)


def test_they_are_listed_and_shown_from_the_folder(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    group_id = write(folder)
    assert dead_letters("list", folder=folder) == 0
    printed = capsys.readouterr().out
    assert f"g{group_id}" in printed
    assert "reward_unavailable" in printed
    assert "2 older ones were removed" in printed
    assert dead_letters("show", "all", folder=folder, as_json=True) == 0
    (letter,) = json.loads(capsys.readouterr().out)
    assert [one["by"] for one in letter["failures"]] == ["a@1", "b@1"]


def test_a_run_without_a_broker_can_try_none_again(folder: Path):
    write(folder)
    with pytest.raises(PeerLostError, match="no broker runs"):
        dead_letters("retry", "all", folder=folder)


def test_a_run_that_had_none_says_so(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert dead_letters("list", folder=folder) == 0
    assert "no dead letters" in capsys.readouterr().out


def test_a_damaged_file_is_named(folder: Path):
    write(folder)
    (folder / DEAD_LETTERS).write_text("{")
    with pytest.raises(ConfigError, match=r"dead_letters\.json cannot be read"):
        dead_letters("list", folder=folder)


def test_what_is_no_group_is_the_run():
    for words, run, groups, folder in [
        ([], None, [], None),
        (["g17", "18", "runs/demo"], None, ["g17", "18"], "runs/demo"),
        (["runs/all", "all"], None, ["all"], "runs/all"),
        (["all"], Path("runs/demo"), ["all"], "runs/demo"),
        (["demo"], None, [], "demo"),
    ]:
        assert split_words(words, run) == (groups, Path(folder) if folder else None)


def test_two_runs_are_refused():
    with pytest.raises(ConfigError, match="of one run, got runs/a, runs/b"):
        split_words(["runs/a", "g1"], Path("runs/b"))
