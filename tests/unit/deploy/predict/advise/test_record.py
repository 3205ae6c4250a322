"""What is read from the state that a broker writes, odd ones included."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from slipstream.broker.history.columns import (
    HistoryColumns,
    StepColumns,
    StoredState,
    TimeColumns,
    write_state,
)
from slipstream.deploy.predict.advise.record import Record, record_of, record_of_state
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.run_folder import PAGE_STATE
from slipstream.wire.messages.status import Pace, RoleStatus
from tests.support.wire_samples import RECORD, STATUS

PACE = Pace(tokens=100.0, sequences=400.0, squares=2000.0, seconds=5.0, sequence_seconds=22.0)
SETTINGS: dict[str, Any] = {
    "run": {"name": "run", "model": "m", "group_size": 2, "groups_per_step": 2},
    "data": {"file": "train.jsonl"},
    "reward": {"function": "a.py:score"},
}


def settings(**sections: dict[str, Any]) -> dict[str, Any]:
    names = (*SETTINGS, *sections)
    return {name: {**SETTINGS.get(name, {}), **sections.get(name, {})} for name in names}


def generator(name: str = "generator-0", **changes: object) -> RoleStatus:
    role = next(one for one in STATUS.roles if one.role == "generator")
    return msgspec.structs.replace(role, name=name, age_s=100.0, silent_s=0.1, pace=PACE, **changes)


def a_state(
    *,
    steps: int = 12,
    roles: tuple[RoleStatus, ...] = (generator(),),
    every_steps: int = 1,
    columns: dict[str, list[float | None]] | None = None,
    time: TimeColumns | None = None,
    **changes: object,
) -> StoredState:
    number = [float(step * every_steps) for step in range(1, steps + 1)]
    series = {
        "time/phase/wait": [1.0] * steps,
        "time/phase/train": [3.0] * steps,
        "time/phase/export": [0.5] * steps,
        "throughput/tokens_per_s": [100.0] * steps,
        "response/tokens": [100.0] * steps,
        **(columns or {}),
    }
    status = msgspec.structs.replace(
        STATUS,
        steps=int(number[-1]) if number else 0,
        elapsed_s=100.0,
        roles=list(roles),
        **changes,
    )
    history = HistoryColumns(
        began_s=0.0,
        time=time or TimeColumns(every_s=2.0, at_s=[], series={}),
        steps=StepColumns(
            step=number, every_steps=every_steps, at_s=[2.0 * n for n in number], series=series
        ),
    )
    return StoredState(at_s=0.0, status=status, history=history)


def read(state: StoredState, **sections: dict[str, Any]) -> Record:
    return record_of_state(settings(**sections), state)


def test_a_step_is_its_phases_and_a_batch_its_tokens():
    record = read(a_state())
    assert record.wait_s == [1.0] * 9  # of 12, the first 3 filled the run
    assert record.active_s == [3.5] * 9
    assert record.stall_s == 0.5
    assert record.step_s == 4.5
    assert record.tokens == [450.0] * 9
    assert record.prompt_tokens == 450.0 / 4 - 100.0
    assert (record.engines, record.pace, record.max_sequences) == (1, PACE, 8)
    assert record.useless_share == pytest.approx(1 / 3)


def test_rows_that_lack_a_figure_do_not_count():
    gaps: list[float | None] = [100.0] * 12
    gaps[5] = gaps[6] = None
    assert len(read(a_state(columns={"response/tokens": gaps})).wait_s) == 7


def test_rows_of_several_steps_are_their_means():
    record = read(a_state(steps=20, every_steps=4))
    assert record.every_steps == 4
    assert record.step_s == 4.5


def test_too_little_is_refused_with_its_reason():
    for state, message in [
        (a_state(steps=0), "has 0 learner steps: expected at least 4 after the first 3"),
        (a_state(steps=6), "has 6 learner steps"),
        (a_state(roles=()), "no generator of run has reported how fast its engine is"),
        (
            a_state(roles=(msgspec.structs.replace(generator(), pace=None),)),
            "no generator of run has reported how fast its engine is",
        ),
    ]:
        with pytest.raises(ConfigError, match=message):
            read(state)


def test_environments_are_refused_by_their_setting():
    environment = {"function": "slipstream.deploy.examples.sums:Sums"}
    with pytest.raises(ConfigError, match=r"environment\.function"):
        read(a_state(), environment=environment, generators={"siblings_together": False})


def test_generators_that_have_left_or_gone_do_not_count_while_the_run_goes_on():
    roles = (
        generator(),
        generator("generator-1"),
        generator("generator-2", has_left=True),
        msgspec.structs.replace(generator("generator-3"), silent_s=60.0),
    )
    record = read(a_state(roles=roles))
    assert record.engines == 2
    assert record.pace.tokens == 200.0
    left = tuple(msgspec.structs.replace(one, has_left=True) for one in roles[:3])
    assert read(a_state(roles=left, outcome="finished")).engines == 3


def test_steps_of_another_number_of_generators_do_not_count():
    young = msgspec.structs.replace(generator("generator-1"), age_s=85.0)  # began at 15 s
    record = read(a_state(roles=(generator(), young)))
    assert len(record.wait_s) == 5  # of the steps at 16 s and later
    newborn = msgspec.structs.replace(generator("generator-1"), age_s=77.0)
    record = read(a_state(roles=(generator(), newborn)))
    assert len(record.wait_s) == 9
    assert any("a generator began 77 s ago" in note for note in record.notes)


def test_a_pause_is_no_part_of_the_transfer():
    publishes = [
        msgspec.structs.replace(
            RECORD,
            adopted_by={"generator-0": 3.0, "generator-1": seconds},
            phase_seconds={"receive": 2.0, "pause": 0.25, "load": 0.5, "commit": 0.25},
        )
        for seconds in (4.0, 5.0, 60.0)
    ]
    record = read(a_state(publish_history=publishes))
    assert (record.pause_s, record.transfer_s) == (1.0, 4.0)
    assert read(a_state(publish_history=[])).pause_s == 0.0


def test_the_time_to_a_reward_survives_a_restart_of_a_generator_and_gaps():
    waiting: list[float | None] = [4.0] * 6
    time = TimeColumns(
        every_s=2.0,
        at_s=[0.0, 2.0, 4.0, 6.0, 8.0, 10.0],
        series={
            "answers": [0.0, 4.0, 8.0, 1.0, None, 9.0],  # two known intervals of 4 answers
            "queue:waiting_for_reward": waiting,
            "queue:being_scored": [0.0] * 6,
        },
    )
    assert read(a_state(time=time)).score_s == 2.0
    assert read(a_state()).score_s == 0.0


def test_what_is_not_simulated_is_noted():
    target = {"staleness_target": {"mismatch_kl": 0.01}, "max_staleness_steps": 2}
    notes = " ".join(read(a_state(), run={**SETTINGS["run"], **target}).notes)
    assert "run.staleness_target.mismatch_kl" in notes
    held = {"staleness_target": {"p95_lag": 1}, "max_staleness_steps": 2}
    record = read(a_state(), run={**SETTINGS["run"], **held})
    assert (record.p95_lag, record.notes) == (1, [])


def test_a_run_of_another_host_is_read(tmp_path: Path):
    lines = [
        '[run]\nname = "run"\nmodel = "m"\ngroup_size = 2\ngroups_per_step = 2',
        '[data]\nfile = "train.jsonl"',
        '[reward]\nfunction = "a.py:score"',
        "[deploy.cores]\nlearner = [4000]",
    ]
    (tmp_path / "resolved.toml").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match="the broker writes it every few seconds"):
        record_of(tmp_path)
    write_state(tmp_path / PAGE_STATE, a_state())
    assert record_of(tmp_path).step_s == 4.5
    (tmp_path / PAGE_STATE).write_bytes(b"half")
    with pytest.raises(ConfigError, match="that can be read"):
        record_of(tmp_path)
