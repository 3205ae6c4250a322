"""Which engine holds which version since when, and how the publishes went, as readable text."""

import io
from argparse import Namespace
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from slipstream.broker.report.summary import write_summary
from slipstream.deploy.commands.versions import main, print_versions
from slipstream.deploy.terminal.versions_view import VersionsView, render, view_of
from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import MemberState, PublishRecord
from tests.support.wire_samples import STATUS

NOW_S = 1_763_786_000.0


def v(step: int) -> PolicyVersion:
    return PolicyVersion(1, step)


def publish(step: int, **fields: object) -> PublishRecord:
    known = {
        "version": v(step),
        "at_s": NOW_S - 60,
        "adopted_by": {"generator-0": 0.25, "generator-1": 0.75},
        "num_in_flight": {"generator-0": 3, "generator-1": 2},
        "phase_seconds": {"commit": 0.002, "digest": 0.1, "transfer": 0.3},
        "digest": "0123456789abcdef" * 2,
        "num_bytes": 269_060_552,
        "transports": {"generator-0": "collective", "generator-1": "collective"},
    }
    return PublishRecord(**(known | fields))  # type: ignore[arg-type]


MEMBERS = [
    MemberState(
        name="generator-0", state="current", version=v(2), since_s=NOW_S - 4, transport="collective"
    ),
    MemberState(
        name="generator-1",
        state="torn",
        version=None,
        since_s=NOW_S - 125,
        transport="tcp",
        reason="LoadBucket 3: \x1b[31mgone[/x]",
    ),
]
VIEW = VersionsView(
    run_name="run",
    steps=2,
    as_of="",
    relay_silent_s=0.4,
    members=MEMBERS,
    publishes=[publish(1), publish(2)],
)


def shown(view: VersionsView, *, count: int = 10) -> str:
    console = Console(file=(written := io.StringIO()), width=100)
    for part in render(view, count=count, now=lambda: NOW_S):
        console.print(part)
    return written.getvalue()


def line(text: str, start: str) -> list[str]:
    """The words of the only line that begins so."""
    (found,) = (one for one in text.splitlines() if one.startswith(start))
    return found.split()


def changed(**fields: object) -> VersionsView:
    return msgspec.structs.replace(VIEW, **fields)


def test_each_engine_is_shown_with_state_version_and_duration():
    text = shown(VIEW)
    assert "as the relay reported 0.4 s ago" in text
    first = line(text, "generator-0  ")
    assert first[1:3] == ["current", "v1.2"]
    assert first[4:] == ["4", "s", "collective"]
    second = next(one.split() for one in text.splitlines() if " torn " in one)
    assert second[1:3] == ["torn", "none"]
    assert second[4:] == ["2", "min", "tcp"]


def test_a_failure_is_shown_whole_and_no_terminal_obeys_it():
    text = shown(VIEW)
    assert "generator-1  LoadBucket 3: \\x1b[31mgone[/x]" in text
    assert "\x1b" not in text


def test_engine_is_not_shown_as_alive_while_the_relay_is_silent():
    text = shown(changed(relay_silent_s=75.0))
    assert "before the relay went silent 75 s ago" in text
    assert line(text, "generator-0  ")[1:3] == ["was", "current"]
    assert "4 s" not in text


def test_without_a_relay_report_the_engines_are_unknown():
    text = shown(changed(relay_silent_s=None, members=[], publishes=[]))
    assert "not known: no relay has reported to this broker" in text
    assert "no version yet" in text


def test_an_engine_that_left_is_named_with_the_version_that_it_ran_last():
    late = publish(3, adopted_by={"generator-0": 0.1}, failed={"generator-1": "was silent"})
    text = shown(changed(members=MEMBERS[:1], publishes=[publish(1), publish(2), late]))
    assert "no longer there: generator-1 (v1.2)" in text


def test_publish_is_shown_with_size_transports_and_adoptions():
    mixed = publish(
        2,
        adopted_by={"generator-0": 0.25},
        failed={"generator-1": "no bytes"},
        transports={"generator-0": "collective", "generator-1": "tcp"},
    )
    text = shown(changed(publishes=[publish(1), mixed], members=[]))
    rows = [one.split() for one in text.splitlines() if " MB " in one]
    assert [" ".join(row[2:]) for row in rows] == [
        "01234567 269.1 MB 2 collective 2 of 2 5 0.75 s",
        "01234567 269.1 MB 1 collective, 1 tcp 1 of 2 5 0.25 s",
    ]


def test_bytes_that_agents_fetched_are_shown_if_any_did():
    assert "fetched" not in shown(VIEW)
    delta = publish(2, fetched_bytes={"generator-0": 900_000, "generator-1": 1_100_000})
    text = shown(changed(publishes=[publish(1), delta], members=[]))
    rows = [one.split() for one in text.splitlines() if " MB " in one]
    assert [row[3:7] for row in rows] == [["269.1", "MB", "-", "2"], ["269.1", "MB", "1.1", "MB"]]


def test_a_quarantined_engine_is_named_with_its_version_and_the_reason():
    why = "its logprobs of the probe differ by 0.5 nats on average"
    text = shown(changed(publishes=[publish(1), publish(2, quarantined={"generator-1": why})]))
    assert "these engines did not compute what the learner does" in text
    assert f"v1.2 generator-1  {why}" in text
    assert "quarantined" not in shown(changed(publishes=[publish(1)]))


def test_only_reported_phases_are_shown_in_their_order():
    late = publish(2, phase_seconds={"receive": 1.5, "digest": 0.1, "swim": 1.0})
    text = shown(changed(publishes=[publish(1), late], members=[]))
    head = next(one.split() for one in text.splitlines() if "swim" in one)
    assert head == ["version", "digest", "receive", "transfer", "commit", "swim"]
    rows = [one.split() for one in text.splitlines() if one.startswith("v1.") and " MB " not in one]
    assert rows == [
        ["v1.1", "0.100", "-", "0.300", "0.002", "-"],
        ["v1.2", "0.100", "1.500", "-", "-", "1.000"],
    ]


def test_engines_left_out_for_the_same_reason_share_a_line():
    failed = {f"generator-{i}": "another engine of its group failed" for i in range(5)}
    record = publish(2, adopted_by={}, failed=failed | {"generator-5": "did not answer Pause"})
    text = shown(changed(publishes=[record]))
    assert "v1.2 generator-0, generator-1 and 3 more  another engine of its group failed" in text
    assert line(text, "v1.2 generator-5")[2:] == ["did", "not", "answer", "Pause"]


def test_only_the_newest_publishes_are_shown_and_the_others_counted():
    many = changed(publishes=[publish(step) for step in range(1, 8)])
    text = shown(many, count=3)
    assert "the newest 3 of 7 publishes" in text
    assert [row.split()[0] for row in text.splitlines() if " MB " in row] == [
        "v1.5",
        "v1.6",
        "v1.7",
    ]
    assert " MB " not in shown(many, count=0)


def test_a_hundred_columns_are_enough():
    every = ["digest", "offer", "group", "receive", "pause", "transfer", "load", "verify", "commit"]
    transports = {f"generator-{i}": kind for i, kind in enumerate(["collective", "disk", "tcp"])}
    wide = publish(2, phase_seconds=dict.fromkeys(every, 12.3456), transports=transports)
    text = shown(changed(publishes=[wide]))
    assert max(map(len, text.splitlines())) <= 100
    assert len([one for one in text.splitlines() if one.startswith("v1.2")]) == 2
    assert "1 collective, 1 disk, 1 tcp" in text


def test_age_of_the_engine_states_is_that_of_the_last_relay_report():
    known = STATUS.roles[0]
    relay = msgspec.structs.replace(known, name="relay", role="relay", silent_s=1.5)
    status = msgspec.structs.replace(STATUS, roles=[*STATUS.roles, relay])
    assert view_of(status).relay_silent_s == 1.5
    assert view_of(STATUS).relay_silent_s is None


# ---- a run whose broker is gone -----------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "run"
    folder.mkdir(parents=True)
    settings = f'[run]\nname = "run"\ndir = "{folder.parent}"\nsocket_dir = "{tmp_path}/none"\n'
    (folder / "resolved.toml").write_text(settings)
    return folder


def finished(folder: Path, **fields: object) -> None:
    status = msgspec.structs.replace(
        STATUS, **({"members": MEMBERS, "publish_history": VIEW.publishes} | fields)
    )
    write_summary(folder / "summary.json", status)


def printed(folder: Path, *, count: int = 10) -> str:
    console = Console(file=(written := io.StringIO()), width=100)
    assert print_versions(folder, console, count=count, as_json=False) == 0
    return written.getvalue()


def test_a_run_that_ended_is_read_from_its_summary(run: Path):
    finished(run, outcome="finished", finished=True)
    text = printed(run)
    assert text.startswith("the run has ended\n")
    assert "held by each engine, as last reported by the relay" in text
    assert "was torn" in text
    assert "v1.2" in text


def test_whether_and_why_a_run_ended_is_shown(run: Path):
    for fields, line in [
        ({"steps": 5}, "as of step 5: no broker answers for"),
        ({"outcome": "ChildDiedError: code 1"}, "the run has ended: ChildDiedError: code 1\n"),
    ]:
        finished(run, **fields)
        assert printed(run).startswith(line)


def test_programs_get_what_a_person_gets(run: Path, capsys: pytest.CaptureFixture[str]):
    finished(run, outcome="finished", finished=True)
    assert print_versions(run, Console(), count=1, as_json=True) == 0
    got = msgspec.json.decode(capsys.readouterr().out, type=VersionsView)
    assert got.members == MEMBERS
    assert got.publishes == VIEW.publishes
    assert got.as_of == "the run has ended"


def test_a_run_without_a_broker_or_a_summary_is_named(run: Path):
    for summary, message in [
        (None, "no broker answers for .* cannot be read: No such file"),
        ('{"run_name": "run"', "summary.json is not a summary of this version"),
        ('{"outcome": "refused"}', "summary.json is not a summary of this version: .*run_name"),
    ]:
        if summary is not None:
            (run / "summary.json").write_text(summary)
        with pytest.raises(ConfigError, match=message):
            printed(run)


def test_what_is_no_run_folder_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="is not a run folder"):
        printed(tmp_path)


def test_without_a_name_it_is_the_newest_run(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    finished(run, outcome="finished", finished=True)
    monkeypatch.chdir(run.parents[1])
    assert main(Namespace(folder=None, last=1, json=False)) == 0
    assert "the newest 1 of 2 publishes" in capsys.readouterr().out
