"""The file is in the trace event format, and the spans of a lane nest."""

import io
import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from slipstream.broker.history.columns import StoredState, write_state
from slipstream.broker.history.history import RunHistory
from slipstream.broker.ledger.commands import Ledger
from slipstream.broker.ledger.events import encode_event
from slipstream.broker.report.summary import write_summary
from slipstream.broker.store.event_log import FolderTrail
from slipstream.deploy.terminal.timeline import phase_spans, publish_spans
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.run_folder import PAGE_STATE, TRAIL
from slipstream.wire.messages.trajectory import Turn
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import PublishRecord
from slipstream.wire.process.phases import PHASE_TIME
from tests.support.commands import call_command
from tests.support.ledger_driver import (
    generate,
    header,
    lease,
    make_ledger,
    make_ready,
    make_rules,
    submit,
)
from tests.support.wire_samples import RECORD, STATUS

BEGAN_S = 1.7e9
EVENT_S = 0.25  # between two moments that events are written
MAX_BYTES = 1 << 20
PHASE_S = {"train": 0.1, "wait": 0.05, "checkpoint": 0.02, "dream": 0.01, "pack": 0.005}
PHASES = {"commit": 0.05, "pause": 0.1, "load": 0.25, "receive": 0.5}  # in no order


class Recorded:
    """A run of the real ledger whose events go into a trail, moment by moment."""

    def __init__(self, folder: Path) -> None:
        self.ledger: Ledger = make_ledger(make_rules(total_steps=9, max_staleness_steps=2))
        self.now_s = BEGAN_S
        self.trail = FolderTrail(folder / TRAIL, MAX_BYTES)
        self._count = 0

    def write(self) -> None:
        events = [encode_event(event) for event in self.ledger.drain()[0]]
        self.trail.append(self._count, self.now_s, events)
        self._count += len(events)
        self.now_s += EVENT_S


def record(folder: Path) -> None:
    """Two steps by two generators; one group is handed back, one is still being answered."""
    run = Recorded(folder)
    ledger = run.ledger
    phase_times = {f"{PHASE_TIME}{name}": seconds for name, seconds in PHASE_S.items()}
    ledger.training.take_over(0)
    run.write()
    for step in range(2):
        mine = lease(ledger, "generator-0@a", max_sequences=4)
        others = lease(ledger, "generator-1@b", max_sequences=2)
        run.write()
        if not step:
            ledger.release("generator-1@b", others[0].lease_id, "failed")
            run.write()
        make_ready(ledger, mine)
        run.write()
        version = ledger.book.version
        ledger.training.deliver(version)
        run.write()
        if not step:  # the next batch is there before this one is trained
            make_ready(ledger, lease(ledger, "generator-0@a", max_sequences=4))
            ledger.training.deliver(version, step=version.step + 1)
            run.write()
        ledger.training.commit(version.next(), {**phase_times, "reward/mean": 0.5})
        run.write()
    lease(ledger, "generator-1@b", max_sequences=2)
    ledger.training.seal(ledger.book.version, 2, oldest_kept=2)
    run.write()
    run.trail.close()
    status = replace(
        STATUS, publishes=9, publish_history=[publish(1, 0.5), publish(2, 1.0), publish(3, 9.0)]
    )
    write_summary(folder / "summary.json", status)


def publish(step: int, after_s: float, **fields: Any) -> PublishRecord:  # noqa: ANN401 of a record
    known = {
        "version": PolicyVersion(1, step),
        "at_s": BEGAN_S + after_s,
        "adopted_by": {"generator-0": 0.9, "generator-1": 0.7},
        "phase_seconds": PHASES,
    }
    return replace(RECORD, **known | fields)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    record(tmp_path)
    return tmp_path


def trace(folder: Path, *, max_spans: int = 1_000, **options: object) -> int:
    return call_command("trace", folder, **{"max-spans": max_spans, **options})


def read(folder: Path, *, max_spans: int = 1_000) -> tuple[list[dict[str, Any]], str]:
    out = folder / "out.json"
    with redirect_stdout(io.StringIO()) as written:
        trace(folder, out=out, max_spans=max_spans)
    return json.loads(out.read_text())["traceEvents"], written.getvalue()


def lanes(events: list[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Complete events by (process, lane)."""
    processes, threads = {}, {}
    for event in events:
        if event["name"] == "process_name":
            processes[event["pid"]] = event["args"]["name"]
        if event["name"] == "thread_name":
            threads[event["pid"], event["tid"]] = event["args"]["name"]
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            key = processes[event["pid"]], threads[event["pid"], event["tid"]]
            found[key].append(event)
    return found


def test_every_event_has_what_the_format_asks_for(folder: Path):
    events, _ = read(folder)
    needed = {
        "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
        "M": {"name", "pid", "tid", "args"},
        "C": {"name", "pid", "tid", "ts", "args"},
        "i": {"name", "pid", "tid", "ts", "s"},
    }
    assert {event["ph"] for event in events} == set(needed)
    for event in events:
        assert set(event) == needed[event["ph"]] | {"ph"}
        assert all(type(event[name]) is int for name in ("pid", "tid"))
        if event["ph"] in "XC":
            assert type(event["ts"]) is int
            assert event["ts"] >= 0
            assert event.get("dur", 0) >= 0


def test_spans_of_a_lane_nest(folder: Path):
    events, _ = read(folder)
    for spans in lanes(events).values():
        open_until: list[int] = []
        for span in sorted(spans, key=lambda one: (one["ts"], -one["dur"])):
            while open_until and open_until[-1] <= span["ts"]:
                open_until.pop()
            end = span["ts"] + span["dur"]
            assert not open_until or end <= open_until[-1], span
            open_until.append(end)


def test_each_lease_is_in_the_process_that_held_it(folder: Path):
    events, _ = read(folder)
    leases = {
        (process, span["name"]): span["args"]["ended"]
        for (process, lane), spans in lanes(events).items()
        if lane.startswith("lease")
        for span in spans
    }
    ended = list(leases.values())
    assert {process for process, _ in leases} == {"generator-0", "generator-1"}
    assert ended.count("failed") == 1
    assert ended.count("complete") == 6
    assert "still held" in ended


def test_the_learner_has_a_lane_of_steps_and_one_per_phase(folder: Path):
    events, _ = read(folder)
    by_lane = lanes(events)
    steps = by_lane["learner", "step"]
    assert [step["name"] for step in steps] == ["step 0", "step 1"]
    assert steps[0]["args"]["reward/mean"] == 0.5
    assert steps[0]["ts"] + steps[0]["dur"] == steps[1]["ts"], "it is always in some step"
    phases = [lane for process, lane in by_lane if process == "learner" and lane != "step"]
    assert phases == ["checkpoint", "wait", "pack", "train", "dream"], "an unknown one comes last"
    for step in steps:
        at = step["ts"]
        for name in phases:
            spans = [one for one in by_lane["learner", name] if one["ts"] == at]
            assert [one["dur"] for one in spans] == [round(PHASE_S[name] * 1e6)]
            at += spans[0]["dur"]
        assert at <= step["ts"] + step["dur"]
    marks = [event["name"] for event in events if event["ph"] == "i"]
    assert marks == ["took over as v1.0", "a checkpoint holds step 2"]


def test_phases_end_with_their_step():
    phase_times = {"time/phase/wait": 3.0, "time/phase/train": 9.0, "time/phase/pack": 0.0}
    spans = list(phase_spans(10.0, 15.0, phase_times))
    assert [(span.name, span.start_s, span.end_s) for span in spans] == [
        ("wait", 10.0, 13.0),
        ("train", 13.0, 15.0),
    ]


def test_missing_publishes_are_reported(folder: Path):
    _, printed = read(folder)
    assert "6 older publishes were left out" in printed
    (folder / "summary.json").write_text('{"newest_publishes": 3')
    events, printed = read(folder)
    assert "summary.json cannot be read" in printed
    assert ("weight bus", "publish 0") not in lanes(events)
    assert ("learner", "step") in lanes(events)


def test_a_publish_holds_its_phases_in_their_order_and_overlapping_ones_lie_side_by_side():
    spans = list(publish_spans([publish(2, 0.5), publish(1, 0.0), publish(3, 5.0)]))
    bus = [span for span in spans if span.process == "weight bus"]
    assert [span.name for span in bus[:5]] == ["v1.1", "receive", "pause", "load", "commit"]
    whole = [(span.name, span.lane) for span in bus if span.name.startswith("v")]
    assert whole == [("v1.1", "publish 0"), ("v1.2", "publish 1"), ("v1.3", "publish 0")]
    got = [span for span in spans if span.process == "generator-1"]
    assert [(span.name, round(span.end_s - span.start_s, 3)) for span in got] == [
        ("v1.1", 0.7),
        ("v1.2", 0.7),
        ("v1.3", 0.7),
    ]


def test_how_busy_each_process_was_is_a_curve(folder: Path):
    history = RunHistory(began_s=BEGAN_S)
    for waited_s, worked_s in ((4.0, 1.0), (6.0, 3.0)):
        phases = {"wait": waited_s, "generate": worked_s}
        role = replace(STATUS.roles[0], age_s=waited_s + worked_s, phase_seconds=phases)
        history.sample(replace(STATUS, roles=[role]), BEGAN_S + worked_s)
    state = StoredState(at_s=BEGAN_S, status=STATUS, history=history.columns())
    write_state(folder / PAGE_STATE, state)
    events, _ = read(folder)
    curve = [event for event in events if event["ph"] == "C" and event["name"] == "busy"]
    assert [event["args"]["generator-0"] for event in curve] == [0.2, 0.5]


def test_a_trajectory_of_several_turns_has_a_span_within_its_lease(tmp_path: Path):
    run = Recorded(tmp_path)
    run.ledger.training.take_over(0)
    (group, *_) = lease(run.ledger)
    run.write()
    for sibling in group.siblings:
        plain = header(group.group_id, sibling, run.ledger.book.version, lease_id=group.lease_id)
        turns = (Turn(2, 1), Turn(4, 3), Turn(9, 1))
        submit(run.ledger, replace(plain, num_tokens=10, turns=turns, branches=(7,)))
        run.write()
    run.trail.close()
    events, _ = read(tmp_path)
    held, *_ = (spans for (process, _), spans in lanes(events).items() if process == "generator-0")
    whole = next(span for span in held if span["name"] == f"g{group.group_id}")
    assert whole["args"]["turns"] == 3 * len(group.siblings)
    assert {span["ts"] for span in held} == {whole["ts"]}
    assert max(span["dur"] for span in held) == whole["dur"]
    names = [f"g{group.group_id}/{sibling}: 3 turns" for sibling in reversed(group.siblings)]
    drawn = [span for span in held if "branches" in span["args"]]
    assert sorted(span["name"] for span in drawn) == sorted(names)
    args = drawn[0]["args"]
    assert (args["branches"], args["tokens_by_turn"], args["context_tokens"]) == (2, [1, 3, 1], 5)


def test_what_environments_answer_is_a_curve(folder: Path):
    history = RunHistory(began_s=BEGAN_S)
    for acted_s, worked_s in ((1.0, 3.0), (4.0, 4.0)):
        role = replace(
            next(one for one in STATUS.roles if one.role == "generator"),
            age_s=acted_s + worked_s,
            phase_seconds={"generate": worked_s, "act": acted_s},
            acting=7,
        )
        history.sample(replace(STATUS, roles=[role]), BEGAN_S + 5 * worked_s)
    write_state(
        folder / PAGE_STATE, StoredState(at_s=BEGAN_S, status=STATUS, history=history.columns())
    )
    events, _ = read(folder)

    def curve(name: str) -> list[float]:
        found = [event for event in events if event["ph"] == "C" and event["name"] == name]
        return [value for event in found for value in event["args"].values()]

    assert curve("environments answer, engine idle") == [0.25, 0.75]
    assert curve("in environments") == [7, 7]


def test_oldest_spans_beyond_the_limit_are_cut_and_reported(folder: Path):
    _, printed = read(folder)
    assert "spans were left out" not in printed
    events, printed = read(folder, max_spans=3)
    assert "older spans were left out: 3 is the limit (--max-spans)" in printed
    trail = [e for e in events if e["ph"] == "X" and e["cat"] not in {"publish", "weights"}]
    assert len(trail) == 3


def test_a_clock_that_was_set_back_makes_no_span_of_negative_length(tmp_path: Path):
    run = Recorded(tmp_path)
    run.ledger.training.take_over(0)
    groups = lease(run.ledger)
    run.write()
    run.now_s -= 3600
    for group in groups:
        generate(run.ledger, group)
    run.write()
    run.trail.close()
    events, _ = read(tmp_path)
    assert {event["dur"] for event in events if event["ph"] == "X"} == {0}


def test_run_without_a_trail_names_the_setting_for_one(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"broker\.max_trail_bytes"):
        trace(tmp_path, max_spans=1)
    (tmp_path / TRAIL).mkdir()
    with pytest.raises(ConfigError, match="has just started"):
        trace(tmp_path, max_spans=1)
    with pytest.raises(ConfigError, match="at least 1"):
        trace(tmp_path, max_spans=0)


def test_the_file_is_in_the_run_folder_unless_another_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    assert trace(folder, max_spans=1_000) == 0
    assert json.loads((folder / "trace.json").read_text())["otherData"] == {"run": folder.name}
    assert "ui.perfetto.dev" in capsys.readouterr().out
    assert not list(_unfinished(folder))


def _unfinished(folder: Path) -> Iterator[Path]:
    return folder.glob(".trace*")


def test_a_file_that_cannot_be_written_is_refused_by_its_option(folder: Path):
    out = folder / "nowhere" / "trace.json"
    with pytest.raises(ConfigError, match=r"trace\.json cannot be written: .* \(--out\)"):
        trace(folder, out=out)
