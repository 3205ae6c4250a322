"""History of a run: bounded, merged, kept over restarts."""

import math
from itertools import pairwise
from pathlib import Path
from typing import cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.broker.history.columns import (
    StoredState,
    claim_state,
    encode_json,
    read_state,
    trends_of,
    write_state,
)
from slipstream.broker.history.history import RunHistory, steady_time
from slipstream.broker.history.table import MAX_ROWS, Table
from slipstream.wire.messages.status import RunStatus, StepPoint
from tests.support.wire_samples import STATUS

DAY_S = 24 * 3600
BEGAN_S = 1_763_786_000.0


def status(**fields: object) -> RunStatus:
    return msgspec.structs.replace(STATUS, **fields)


def test_a_full_table_merges_rows_pairwise_means_of_gauges_and_the_later_of_counts():
    table = Table(max_rows=4)
    for row in range(5):
        table.add(row, {"busy:a": float(row), "trained": 10.0 * row})
    assert list(table.keys) == [1.0, 3.0, 4.0]
    assert table.columns() == {"busy:a": [0.5, 2.5, 4.0], "trained": [10.0, 30.0, 40.0]}


def test_of_rows_that_become_one_the_largest_of_maxima_counts_by_lag_too():
    table = Table(max_rows=4)
    highs = [3.0, 1.0, None, 7.0, 5.0]
    for row, high in enumerate(highs):
        table.add(row, {"policy/ratio_max": high, "policy/ratio_max@lag2": high})
    table.blend(5, {"policy/ratio_max": 4.0, "policy/ratio_max@lag2": 6.0}, share=0.5)
    assert table.columns() == {
        "policy/ratio_max": [3.0, 7.0, 5.0],
        "policy/ratio_max@lag2": [3.0, 7.0, 6.0],
    }


def test_a_name_that_comes_later_or_goes_has_gaps():
    table = Table(max_rows=4)
    table.add(0, {"a": 1.0})
    table.add(1, {"b": 2.0})
    table.add(2, {"a": 3.0, "b": None})
    assert table.columns() == {"a": [1.0, None, 3.0], "b": [None, 2.0, None]}
    assert table.row(-1) == {"a": 3.0, "b": None}


def test_names_that_there_is_no_room_for_are_counted():
    table = Table(max_series=2)
    table.add(0, {"a": 1.0, "b": 2.0, "c": 3.0})
    assert (set(table.series), table.num_left_out) == ({"a", "b"}, 1)


def test_figures_by_lag_leave_room_for_those_of_the_whole_step():
    table = Table(max_series=4, kept_free=2)
    table.add(0, {"clip@lag0": 1.0, "clip@lag1": 2.0, "clip@lag2": 3.0, "clip": 4.0})
    table.add(1, {"clip@lag1": 5.0, "loss": 6.0, "late": 7.0})
    assert list(table.series) == ["clip@lag0", "clip@lag1", "clip", "loss"]
    assert table.columns()["clip@lag1"] == [2.0, 5.0]
    assert table.num_left_out == 2


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.sampled_from([2, 4, 10, 64]))
def test_columns_stay_equally_long_and_in_order_whatever_comes(values: list[float], rows: int):
    table = Table(max_rows=rows)
    for key, value in enumerate(values):
        table.add(key, {"a": value} if key % 3 else {"b": value})
    assert 1 <= len(table) <= rows
    assert all(len(column) == len(table) for column in table.series.values())
    assert list(table.keys) == sorted(table.keys)
    assert table.keys[-1] == len(values) - 1


def test_a_process_that_begins_anew_is_not_counted_backwards():
    def role(age_s: float, work_s: float, wait_s: float, tokens: float) -> object:
        one = next(role for role in STATUS.roles if role.role == "generator")
        return msgspec.structs.replace(
            one,
            age_s=age_s,
            phase_seconds={"generate": work_s, "wait": wait_s},
            tokens_per_second=tokens / age_s,
        )

    history = RunHistory(began_s=BEGAN_S, every_s=1.0)
    shares = []
    for at, one in enumerate(
        [role(10, 5, 5, 1000), role(12, 7, 5, 1600), role(1, 0.5, 0.5, 40), role(2, 0.5, 1.5, 40)]
    ):
        history.sample(status(roles=[one], members=[]), BEGAN_S + at)
        point = history.newest_point()
        (name,) = (name for name in point if name.startswith("busy:"))
        shares.append((point[name], point["tokens:generator"]))
    assert shares == [
        (0.5, pytest.approx(100)),
        (1.0, pytest.approx(300)),
        (0.5, pytest.approx(40)),
        (0.0, pytest.approx(0)),
    ]


def test_a_day_of_samples_stays_small_and_covers_the_day():
    history = RunHistory(began_s=BEGAN_S)
    num_samples, first_every_s = 0, history.every_s
    for at in range(0, DAY_S, 2):
        num_samples += history.sample(STATUS, BEGAN_S + at)
        if at % 10 == 0:
            metrics = {f"policy/figure{i}": at / 7 + i for i in range(40)}
            history.step(StepPoint(step=at // 10, at_s=at, metrics=metrics), BEGAN_S + at)
    columns = history.columns()
    assert len(columns.time.at_s) <= MAX_ROWS
    assert len(columns.steps.step) <= MAX_ROWS
    assert columns.time.at_s[0] < 120
    assert columns.time.at_s[-1] > DAY_S - 120
    gaps = [b - a for a, b in zip(columns.time.at_s, columns.time.at_s[1:], strict=False)]
    assert max(gaps) <= 2 * columns.time.every_s
    assert history.num_bytes < 50e6
    assert len(msgspec.msgpack.encode(columns)) < 5e6
    # A row is taken half as often each time that half of them were given up.
    doublings = math.log2(history.every_s / first_every_s)
    assert doublings >= 2
    assert num_samples <= MAX_ROWS * (1 + doublings / 2)


def test_stored_history_is_continued(tmp_path: Path):
    history = RunHistory(began_s=BEGAN_S, every_s=2.0)
    for at in range(0, 100, 2):
        history.sample(STATUS, BEGAN_S + at)
        history.step(StepPoint(step=at, at_s=at, metrics={"policy/loss": at / 3}), BEGAN_S + at)
    path = tmp_path / "dashboard" / "state.msgpack"
    write_state(path, StoredState(at_s=BEGAN_S, status=STATUS, history=history.columns()))
    stored = read_state(path)
    assert stored is not None
    again = RunHistory.of(stored.history)
    assert again.columns() == history.columns()
    again.sample(STATUS, BEGAN_S + 200)
    assert again.columns().time.at_s[-2:] == [98.0, 200.0]


OLDER = {"revision": 1, "at_s": 1.0, "status": {}, "history": {}}


@pytest.mark.parametrize("data", [b"\x81\xa1a", msgspec.msgpack.encode(OLDER)])
def test_a_damaged_or_older_file_is_put_aside_and_a_new_history_begins(
    data: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    path = tmp_path / "state.msgpack"
    assert (claim_state(path), read_state(path), caplog.records) == (None, None, [])
    path.write_bytes(data)
    assert read_state(path) is None
    assert path.exists()  # reading changes nothing
    assert claim_state(path) is None
    assert "cannot be read" in caplog.text
    assert not path.exists()
    assert (tmp_path / "state.msgpack.unreadable").read_bytes() == data


def test_what_a_write_that_was_killed_left_is_removed_and_one_that_fails_leaves_nothing(
    tmp_path: Path,
):
    path = tmp_path / "state.msgpack"
    (tmp_path / ".state.msgpack.unfinished").touch()
    state = StoredState(at_s=1.0, status=STATUS, history=RunHistory(began_s=0.0).snapshot())
    write_state(path, state)
    assert [one.name for one in tmp_path.iterdir()] == ["state.msgpack"]
    path.unlink()
    path.mkdir()
    with pytest.raises(OSError, match="directory"):
        write_state(path, state)
    assert [one.name for one in tmp_path.iterdir()] == ["state.msgpack"]


def step_of(number: int) -> StepPoint:
    return StepPoint(step=number, at_s=0.0, metrics={"policy/loss": float(number)})


def with_steps(count: int, every_s: float = 1.0) -> RunHistory:
    history = RunHistory(began_s=0.0)
    for number in range(1, count + 1):
        history.step(step_of(number), every_s * number)
    return history


def test_rows_cover_equally_many_steps_before_and_after_a_merge():
    history = with_steps(2 * MAX_ROWS + 3, every_s=10.0)
    steps = history.columns().steps
    assert steps.every_steps == 4
    assert steps.step == [*(4.0 * n for n in range(1, MAX_ROWS // 2 + 1)), 2.0 * MAX_ROWS + 3]
    assert {b - a for a, b in pairwise(steps.step[:-1])} == {4.0}
    losses = steps.series["policy/loss"]
    assert losses[0] == 2.5
    assert losses[-2:] == pytest.approx([2 * MAX_ROWS - 1.5, 2 * MAX_ROWS + 2])
    assert steps.at_s == [10.0 * step for step in steps.step]  # a row is of when it was complete


def test_newest_step_is_sent_before_its_row_is_complete():
    history = with_steps(MAX_ROWS + 1)
    newest = float(MAX_ROWS + 1)
    assert history.columns().steps.every_steps == 2
    assert [row["step"] for row in history.steps_after(newest - 1)] == [newest]
    history.step(step_of(MAX_ROWS + 2), newest + 1)
    (row,) = history.steps_after(newest)
    assert (row["step"], row["policy/loss"]) == (newest + 1, newest + 0.5)
    history.went_back(MAX_ROWS + 1)
    assert history.columns().steps.step[-1] == MAX_ROWS
    history.step(step_of(MAX_ROWS + 1), newest + 2)
    assert history.columns().steps.step[-2:] == [MAX_ROWS, newest]


def test_the_resolution_of_steps_is_kept_over_a_restart():
    history = with_steps(MAX_ROWS + 1)
    again = RunHistory.of(history.columns())
    for one in (history, again):
        one.step(step_of(MAX_ROWS + 2), MAX_ROWS + 2.0)
    assert again.columns() == history.columns()


def test_a_clock_that_is_set_back_freezes_nothing_and_keeps_the_order():
    history = RunHistory(began_s=BEGAN_S)
    for at in (0.0, 2.0, 4.0):
        history.sample(STATUS, BEGAN_S + at)
    history = RunHistory.of(history.columns())  # over a restart as well
    for at in (2.0, 4.0, 6.0):
        history.take(STATUS, BEGAN_S - 1_000.0 + at)
    assert history.columns().time.at_s == [0.0, 2.0, 4.0, 6.0, 8.0]


def test_a_steady_clock_shows_unix_time_and_does_not_jump():
    unix, monotonic = 1_000.0, 5.0
    clock = steady_time(lambda: unix, lambda: monotonic)
    assert clock() == 1_000.0
    unix, monotonic = 0.0, 7.0
    assert clock() == 1_002.0


def test_a_snapshot_stays_as_it_is_and_reads_like_the_columns():
    history = RunHistory(began_s=0.0)
    history.sample(status(queue_age_s=None), 0.0)
    history.sample(status(queue_age_s=1.5), 2.0)
    history.step(step_of(1), 1.0)
    expected = history.columns()
    snapshot = history.snapshot()
    history.sample(STATUS, 4.0)
    history.step(step_of(2), 1.0)
    assert msgspec.json.decode(encode_json(snapshot)) == msgspec.to_builtins(expected)
    trends = trends_of(snapshot, high_water_bytes=0, fsync="")
    age = trends.series["queue_age_s"]
    found = (list(age), age[0], age[-1], age[0:], len(age))
    assert found == ([None, 1.5], None, 1.5, [None, 1.5], 2)


def test_a_state_with_gaps_is_read_as_it_was_written(tmp_path: Path):
    history = RunHistory(began_s=0.0)
    history.sample(status(queue_age_s=None), 0.0)
    path = tmp_path / "state.msgpack"
    write_state(path, StoredState(at_s=1.0, status=STATUS, history=history.snapshot()))
    stored = read_state(path)
    assert stored is not None
    assert stored.history == history.columns()
    assert stored.history.time.series["queue_age_s"] == [None]


def test_a_value_that_is_no_number_is_refused_before_anything_is_kept():
    table = Table()
    with pytest.raises((TypeError, ValueError)):
        table.add(0, {"a": 1.0, "b": cast("float", "x")})
    assert (len(table), table.series) == (0, {})


def test_what_is_no_number_is_shown_as_a_gap():
    table = Table()
    table.add(0, {"a": math.inf, "b": math.nan, "c": 1.0})
    assert table.columns() == {"a": [None], "b": [None], "c": [1.0]}


def test_filled_steps_are_spread_between_the_newest_row_and_now():
    history = with_steps(2, every_s=10.0)
    history.fill({n: {"policy/loss": n / 2} for n in (2, 3, 4, 5)}, 60.0)
    steps = history.columns().steps
    assert steps.step == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert steps.at_s == [10.0, 20.0, 30.0, 40.0, 50.0]
    assert steps.series["policy/loss"] == [1.0, 2.0, 1.5, 2.0, 2.5]
