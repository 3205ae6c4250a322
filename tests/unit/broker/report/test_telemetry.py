import json
import math
from pathlib import Path

import msgspec
import pytest

from slipstream.broker.ledger.commands import Ledger
from slipstream.broker.ledger.scoring_queue import ScoringQueue
from slipstream.broker.report import publishes
from slipstream.broker.report.summary import summary_of, write_summary
from slipstream.broker.report.telemetry import Telemetry
from slipstream.deploy.terminal.figures import one_line
from slipstream.wire.messages.broker import Hello, RoleReport
from slipstream.wire.messages.status import RunStatus
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import MemberState, PublishRecord
from slipstream.wire.settings.sections import RunSection
from tests.support.clock import Clock
from tests.support.ledger_driver import (
    generate,
    lease,
    make_ledger,
    make_ready,
    make_rules,
    reward,
    train_step,
)


@pytest.fixture
def time() -> Clock:
    return Clock(50.0)


@pytest.fixture
def telemetry(time: Clock) -> Telemetry:
    return Telemetry(RunSection(name="run"), now=time)


@pytest.fixture
def ledger() -> Ledger:
    """One step trained, one group dropped, one generated, two leased."""
    ledger = make_ledger()
    ledger.training.take_over(0)
    make_ready(ledger, lease(ledger, max_sequences=4))
    train_step(ledger)
    first, second, *_ = lease(ledger)
    generate(ledger, first)
    reward(ledger, first.group_id, [1.0, 1.0])
    generate(ledger, second)
    return ledger


def status_of(telemetry: Telemetry, ledger: Ledger) -> RunStatus:
    return telemetry.status(ledger.book, ScoringQueue(lease_s=1.0))


def report(telemetry: Telemetry, name: str, tokens: float, **phases: float) -> None:
    telemetry.report(name, RoleReport(phase_seconds=phases, counters={"tokens": tokens}))


def record(version: PolicyVersion, in_flight: int = 0, *, adopted: bool = True) -> PublishRecord:
    return PublishRecord(
        version=version,
        at_s=0.0,
        adopted_by={"generator-0": 0.1} if adopted else {},
        num_in_flight={"generator-0": in_flight},
    )


def test_the_equation_of_groups_and_trajectories_adds_up(telemetry: Telemetry, ledger: Ledger):
    status = status_of(telemetry, ledger)
    assert (status.steps, status.issued, status.trained) == (1, 6, 2)
    assert status.dropped == {"zero_variance": 1}
    assert {state: n for state, n in status.in_flight.items() if n} == {"leased": 2, "generated": 1}
    assert status.unaccounted == 0
    assert status.trajectories == {"issued": 12, "trained": 4, "dropped": 2, "in_flight": 6}
    assert status.staleness_histogram == {"0": 16}


def test_queues_count_what_waits_for_a_reward(telemetry: Telemetry, ledger: Ledger):
    scoring = ScoringQueue(lease_s=1.0)
    for sibling in range(3):
        scoring.add((9, sibling))
    scoring.lease("reward-worker-0", 1, now_s=0.0)
    telemetry.rejected["malformed"] += 2
    queue = telemetry.status(ledger.book, scoring).queue
    assert (queue["waiting_for_reward"], queue["being_scored"]) == (2, 1)
    assert (queue["leased_groups"], queue["rejected_messages"]) == (2, 2)


def test_a_store_that_acknowledges_nothing_is_what_a_run_waits_for(
    telemetry: Telemetry, ledger: Ledger
):
    telemetry.waiting_for = "groups 35 (leased, held by generator-0)"
    telemetry.store_trouble = lambda: "room on the disk of runs/full"
    status = status_of(telemetry, ledger)
    assert one_line(status).endswith(", learner waits for room on the disk of runs/full")
    telemetry.store_trouble = lambda: ""
    assert status_of(telemetry, ledger).waiting_for == telemetry.waiting_for


def test_throughput_counts_from_the_first_take_over_and_over_all_incarnations(
    telemetry: Telemetry, time: Clock, ledger: Ledger
):
    hello = Hello(role="generator", name="generator-0")
    telemetry.hello(hello)
    time.passes(100.0)
    telemetry.training_began()
    report(telemetry, "generator-0", 300.0)
    time.passes(5.0)
    telemetry.hello(hello)
    telemetry.training_began()
    report(telemetry, "generator-0", 200.0)
    time.passes(5.0)
    status = status_of(telemetry, ledger)
    assert status.tokens_per_second == {"generator": 50.0}
    assert status.elapsed_s == 110.0


def test_a_role_shows_its_own_figures(telemetry: Telemetry, time: Clock, ledger: Ledger):
    telemetry.hello(Hello(role="generator", name="generator-0", packages={"sglang": "0.5"}))
    time.passes(10.0)
    report(telemetry, "generator-0", 40.0, wait=2.0, generate=6.0)
    telemetry.received_from("generator-0")
    time.passes(10.0)
    status = status_of(telemetry, ledger)
    _, role = status.roles
    assert (role.age_s, role.silent_s, role.busy) == (20.0, 10.0, 0.75)
    assert (role.tokens_per_second, role.leases) == (2.0, 2)
    assert status.busy["generator"] == 0.75
    assert status.versions == {"sglang": "0.5"}


def test_an_observer_is_no_role(telemetry: Telemetry, ledger: Ledger):
    telemetry.hello(Hello(role="observer", name="observer"))
    telemetry.received_from("observer")
    report(telemetry, "observer", 1.0)
    roles = status_of(telemetry, ledger).roles
    assert [role.name for role in roles] == ["broker"]


def test_a_version_counts_as_published_once_somebody_adopted_it(
    telemetry: Telemetry, ledger: Ledger
):
    telemetry.published(record(PolicyVersion(1, 0)))
    telemetry.published(record(PolicyVersion(1, 1), in_flight=3))
    telemetry.published(record(PolicyVersion(1, 1), in_flight=3))
    telemetry.published(record(PolicyVersion(1, 2), in_flight=3, adopted=False))
    status = status_of(telemetry, ledger)
    assert (status.publishes, status.publishes_while_generating) == (2, 1)
    assert [r.version.step for r in status.publish_history] == [0, 1, 2]


def test_the_summary_holds_the_equation_and_the_means_of_the_steps(
    telemetry: Telemetry, time: Clock, ledger: Ledger, tmp_path: Path
):
    time.passes(3.0)
    point = telemetry.step(1, {"policy/loss": 1.0, "reward/mean": 0.5})
    assert (point.step, point.at_s) == (1, 3.0)
    telemetry.step(2, {"policy/loss": 2.0})
    status = status_of(telemetry, ledger)
    summary = summary_of(status)
    equation = ("issued", "trained", "dropped", "in_flight", "unaccounted")
    assert summary["equation"] == dict(zip(equation, (6, 2, 1, 3, 0), strict=True))
    assert summary["mean_metrics"] == {"policy/loss": 1.5, "reward/mean": 0.5}
    assert summary["last_step_metrics"] == {"policy/loss": 2.0}
    path = tmp_path / "summary.json"
    path.write_text("half a")
    write_summary(path, status)
    assert json.loads(path.read_text()) == summary
    assert list(tmp_path.iterdir()) == [path]


def test_a_run_without_steps_has_a_summary(telemetry: Telemetry):
    summary = summary_of(telemetry.status(make_ledger().book, ScoringQueue(lease_s=1.0)))
    assert (summary["last_step_metrics"], summary["mean_metrics"]) == ({}, {})
    assert summary["equation"]["issued"] == 0


def test_the_broker_is_busy_for_the_time_it_is_on_a_core(ledger: Ledger):
    seconds = {"clock": 0.0, "cpu": 5.0}
    own = Telemetry(RunSection(), now=lambda: seconds["clock"], cpu_seconds=lambda: seconds["cpu"])
    seconds.update(clock=10.0, cpu=7.5)
    (broker,) = own.status(ledger.book, ScoringQueue(lease_s=1.0)).roles
    assert broker.phase_seconds == {"serve": 2.5, "wait": 7.5}
    assert broker.busy == pytest.approx(0.25)


def test_members_are_those_of_the_newest_relay_report_and_bounded(
    telemetry: Telemetry, ledger: Ledger
):
    one = MemberState(
        name="n" * 999, state="torn", version=None, since_s=5.0, transport="tcp", reason="r" * 999
    )
    telemetry.members([one, msgspec.structs.replace(one, name="generator-1")])
    telemetry.members([one])
    (member,) = status_of(telemetry, ledger).members
    assert (member.state, member.since_s, member.transport) == ("torn", 5.0, "tcp")
    hostile = [
        msgspec.structs.replace(one, since_s=since_s)
        for since_s in (math.nan, -math.inf, 1e300, -1.0) * 2_000
    ]
    telemetry.members(hostile)
    members = status_of(telemetry, ledger).members
    assert len(members) == publishes.MAX_MEMBERS
    assert {member.since_s for member in members} == {0.0}
    assert {(len(member.name), len(member.reason)) for member in members} == {(100, 500)}


def test_the_summary_keeps_the_newest_publishes_and_no_digests_of_old_ones(
    telemetry: Telemetry, ledger: Ledger
):
    for step in range(60):
        published = record(PolicyVersion(1, step))
        telemetry.published(msgspec.structs.replace(published, engine_digests={"g": "00ff"}))
    summary = summary_of(status_of(telemetry, ledger))
    kept = msgspec.convert(summary["newest_publishes"], list[PublishRecord])
    assert [one.version.step for one in kept] == list(range(10, 60))
    assert not any(one.engine_digests for one in kept)
    assert summary["last_publish"]["engine_digests"] == {"g": "00ff"}


def test_the_summary_of_a_large_fleet_stays_small(telemetry: Telemetry, ledger: Ledger):
    for step in range(60):
        published = record(PolicyVersion(1, step))
        fleet = dict.fromkeys((f"generator-{i}" for i in range(300)), 0.5)
        telemetry.published(msgspec.structs.replace(published, adopted_by=fleet))
    summary = summary_of(status_of(telemetry, ledger))
    assert [one["version"] for one in summary["newest_publishes"]] == [[1, 57], [1, 58], [1, 59]]


def test_waiting_groups_are_counted_by_lag_with_the_age_of_the_oldest(
    telemetry: Telemetry, time: Clock, ledger: Ledger
):
    scoring = ScoringQueue(lease_s=1.0)
    before = telemetry.status(ledger.book, scoring)
    assert (before.queue_age_s, before.lags_in_queue) == (None, {})
    assert before.lags_in_flight == {"0": 3}
    generated = next(group for group in ledger.book.groups.values() if group.state == "generated")
    reward(ledger, generated.group_id, [0.0, 1.0])
    telemetry.notice(ledger.book)  # no status was asked for yet
    time.passes(7.0)
    after = telemetry.status(ledger.book, scoring)
    assert (after.queue_age_s, after.lags_in_queue) == (7.0, {"0": 1})
    assert after.lags_in_flight == {"0": 2}
    assert after.memory["rss_bytes"] > 1_000_000


def test_a_worker_that_was_gone_for_an_hour_is_shown_no_longer_and_its_tokens_stay(
    telemetry: Telemetry, time: Clock, ledger: Ledger
):
    telemetry.training_began()
    telemetry.hello(Hello(role="learner", name="learner"))
    telemetry.hello(Hello(role="generator", name="host-17", incarnation="a"))
    telemetry.report("host-17", RoleReport(phase_seconds={}, counters={"tokens": 7_201.0}))
    time.passes(3_601.0)
    telemetry.hello(Hello(role="generator", name="host-18", incarnation="b"))
    status = status_of(telemetry, ledger)
    assert [role.name for role in status.roles] == ["broker", "host-18", "learner"]
    telemetry.report("host-18", RoleReport(phase_seconds={}, counters={"tokens": 3_601.0}))
    time.passes(3_600.0)
    tokens = status_of(telemetry, ledger).tokens_per_second
    assert tokens == {"generator": (7_201 + 3_601) / 7_201}


def test_a_batch_that_was_rejected_is_no_step_under_way(telemetry: Telemetry):
    ledger = make_ledger(make_rules(total_steps=9))
    ledger.training.take_over(0)
    make_ready(ledger, lease(ledger, max_sequences=4))
    batch = ledger.training.deliver(ledger.book.version)
    assert isinstance(batch, list)
    rejected = [group.group_id for group in batch]
    ledger.training.reject_batch(ledger.book.version, 0, "nonfinite", rejected)
    telemetry.notice(ledger.book)
    assert ledger.book.state.in_hand == ()


def test_a_connection_has_one_name_at_a_time(telemetry: Telemetry, ledger: Ledger):
    telemetry.hello(Hello(role="generator", name="first"))
    report(telemetry, "first", 5.0)
    telemetry.forget("first")
    telemetry.hello(Hello(role="generator", name="second"))
    report(telemetry, "second", 7.0)
    assert "first" not in {role.name for role in status_of(telemetry, ledger).roles}


def test_a_step_without_an_end_is_told_once_with_the_groups_of_its_batch(
    telemetry: Telemetry, time: Clock, caplog: pytest.LogCaptureFixture
):
    ledger = make_ledger(make_rules(total_steps=9))
    ledger.training.take_over(0)
    for _ in range(4):
        make_ready(ledger, lease(ledger, max_sequences=4))
        ledger.training.deliver(ledger.book.version)
        telemetry.notice(ledger.book)
        time.passes(5.0)
        train_step(ledger)
        telemetry.notice(ledger.book)
    make_ready(ledger, lease(ledger, max_sequences=4))
    time.passes(3_600.0)
    telemetry.notice(ledger.book)
    assert status_of(telemetry, ledger).slow_step is None, "nobody has asked for the batch"
    batch = ledger.training.deliver(ledger.book.version)
    assert isinstance(batch, list)
    for _ in range(3):
        telemetry.notice(ledger.book)
        time.passes(100.0)
    slow = status_of(telemetry, ledger).slow_step
    assert slow is not None
    assert (slow.step, slow.groups) == (4, tuple(group.group_id for group in batch))
    assert [one.message for one in caplog.records if "been training step 4" in one.message] == [
        f"the learner has been training step 4 for 200 s, those before it took 5 s; groups of its "
        f"batch: {', '.join(map(str, slow.groups))}"
    ]
