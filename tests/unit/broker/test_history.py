"""History of a run: bounded, merged, kept over restarts."""

import math
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.dashboard.history import (
    MAX_ROWS,
    History,
    StoredState,
    Table,
    read_state,
    write_state,
)
from tests.wire_samples import STATUS
from wire.status import RunStatus, StepPoint

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


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.sampled_from([2, 4, 10, 64]))
def test_columns_stay_equally_long_and_in_order_whatever_comes(values: list[float], rows: int):
    table = Table(max_rows=rows)
    for key, value in enumerate(values):
        table.add(key, {"a": value} if key % 3 else {"b": value})
    assert 1 <= len(table) <= rows
    assert all(len(column) == len(table) for column in table.series.values())
    assert list(table.keys) == sorted(table.keys)
    assert table.keys[-1] == len(values) - 1


def test_steps_that_did_not_happen_are_forgotten():
    history = History(began_s=BEGAN_S)
    for step in range(1, 6):
        history.step(StepPoint(step=step, at_s=0.0, metrics={"policy/loss": step / 10}), BEGAN_S)
    history.went_back(3)
    history.step(StepPoint(step=4, at_s=0.0, metrics={"policy/loss": 9.0}), BEGAN_S)
    columns = history.columns().steps
    assert columns.step == [1.0, 2.0, 3.0, 4.0]
    assert columns.series["policy/loss"] == [0.1, 0.2, 0.3, 9.0]
    assert [row["step"] for row in history.steps_after(2)] == [3.0, 4.0]


def test_a_process_that_begins_anew_is_not_counted_backwards():
    def role(age_s: float, work_s: float, wait_s: float, tokens: float) -> object:
        one = next(role for role in STATUS.roles if role.role == "generator")
        return msgspec.structs.replace(
            one,
            age_s=age_s,
            phase_seconds={"generate": work_s, "wait": wait_s},
            tokens_per_second=tokens / age_s,
        )

    history = History(began_s=BEGAN_S, every_s=1.0)
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
    history = History(began_s=BEGAN_S)
    began_cpu_s, looks = time.process_time(), 0
    for at in range(0, DAY_S, 2):
        looks += history.sample(STATUS, BEGAN_S + at)
        if at % 10 == 0:
            metrics = {f"policy/figure{i}": at / 7 + i for i in range(40)}
            history.step(StepPoint(step=at // 10, at_s=at, metrics=metrics), BEGAN_S + at)
    cpu_s = time.process_time() - began_cpu_s
    columns = history.columns()
    assert len(columns.time.at_s) <= MAX_ROWS
    assert len(columns.steps.step) <= MAX_ROWS
    assert columns.time.at_s[0] < 120
    assert columns.time.at_s[-1] > DAY_S - 120
    gaps = [b - a for a, b in zip(columns.time.at_s, columns.time.at_s[1:], strict=False)]
    assert max(gaps) <= 2 * columns.time.every_s
    assert history.num_bytes < 50e6
    assert len(msgspec.msgpack.encode(columns)) < 5e6
    assert cpu_s < 0.02 * DAY_S  # of the run's seconds


def test_what_was_written_goes_on(tmp_path: Path):
    history = History(began_s=BEGAN_S, every_s=2.0)
    for at in range(0, 100, 2):
        history.sample(STATUS, BEGAN_S + at)
        history.step(StepPoint(step=at, at_s=at, metrics={"policy/loss": at / 3}), BEGAN_S + at)
    path = tmp_path / "dashboard" / "state.msgpack"
    write_state(path, StoredState(at_s=BEGAN_S, status=STATUS, history=history.columns()))
    stored = read_state(path)
    assert stored is not None
    again = History.of(stored.history)
    assert again.columns() == history.columns()
    again.sample(STATUS, BEGAN_S + 200)
    assert again.columns().time.at_s[-2:] == [98.0, 200.0]


def test_a_damaged_or_missing_file_begins_a_new_history(tmp_path: Path):
    path = tmp_path / "state.msgpack"
    assert read_state(path) is None
    path.write_bytes(b"\x81\xa1a")
    assert read_state(path) is None


def test_what_is_no_number_is_shown_as_a_gap():
    table = Table()
    table.add(0, {"a": math.inf, "b": math.nan, "c": 1.0})
    assert table.columns() == {"a": [None], "b": [None], "c": [1.0]}
