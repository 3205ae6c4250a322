"""What an observer knows of a run: what the broker wrote, and what was reported since."""

from msgspec.structs import replace

from slipstream.broker.history.columns import HistoryColumns
from slipstream.broker.history.history import RunHistory
from slipstream.deploy.terminal.recent import Recent
from slipstream.wire.messages.status import RunStatus, StepPoint
from tests.support.clock import Clock
from tests.support.wire_samples import STATUS

BEGAN_S = 1_000.0
STEP_S = 5.0


def status_at(elapsed_s: float, *, waited: float) -> RunStatus:
    """A run that began a step every five seconds, whose learner waits a share of its time."""
    phases = {"wait": waited * elapsed_s, "train": (1 - waited) * elapsed_s}
    learner = replace(
        STATUS.roles[0], name="learner", role="learner", age_s=elapsed_s, phase_seconds=phases
    )
    steps = [
        StepPoint(step=n, at_s=STEP_S * n, metrics={"reward/sampled": 0.1 * n})
        for n in range(1, int(elapsed_s / STEP_S) + 1)
    ]
    return replace(
        STATUS,
        elapsed_s=elapsed_s,
        roles=[learner],
        steps=len(steps),
        total_steps=1_000,
        steps_history=steps,
        publish_history=[],
    )


def watch(recent: Recent, clock: Clock, *, since_s: float, until_s: float, waited: float) -> None:
    for second in range(int(since_s), int(until_s)):
        clock.now_s = BEGAN_S + second
        recent.add(status_at(float(second), waited=waited))


def make(written: HistoryColumns | None, clock: Clock, *, fsync: str = "") -> Recent:
    return Recent(written, high_water_bytes=0, fsync=fsync, now=clock)


def made() -> tuple[Recent, Clock]:
    clock = Clock(BEGAN_S)
    return make(None, clock), clock


def test_advice_starts_when_the_window_is_full():
    recent, clock = made()
    watch(recent, clock, since_s=10, until_s=100, waited=0.5)
    assert recent.advisories() == []
    watch(recent, clock, since_s=100, until_s=200, waited=0.5)
    assert [advisory.rule for advisory in recent.advisories()] == ["learner-starved"]
    assert recent.busy("learner") == 0.5
    assert recent.busy("generator-0") is None


def test_what_the_broker_wrote_is_known_at_once():
    clock = Clock(BEGAN_S)
    history = RunHistory(began_s=BEGAN_S)
    for second in range(10, 200, 2):
        history.sample(status_at(float(second), waited=0.5), BEGAN_S + second)
    for point in status_at(199.0, waited=0.5).steps_history:
        history.step(point, BEGAN_S + point.at_s)
    recent = make(history.columns(), clock)
    watch(recent, clock, since_s=200, until_s=201, waited=0.5)
    assert [advisory.rule for advisory in recent.advisories()] == ["learner-starved"]
    assert len(recent.curve("reward/sampled")) == 40


def test_evaluating_an_ended_run_adds_no_samples():
    clock = Clock(BEGAN_S)
    recent = make(RunHistory(began_s=BEGAN_S).columns(), clock, fsync="no")
    recent.evaluate(status_at(50.0, waited=0.5))
    assert [advisory.rule for advisory in recent.advisories()] == ["fsync-too-weak"]
    assert recent.curve("reward/sampled") == []


def test_a_learner_that_went_back_takes_its_later_steps_with_it():
    recent, clock = made()
    watch(recent, clock, since_s=90, until_s=100, waited=0.0)
    assert len(recent.curve("reward/sampled")) == 19
    clock.now_s += 10.0
    recent.add(status_at(50.0, waited=0.0))
    assert len(recent.curve("reward/sampled")) == 10


def test_an_answer_that_was_seen_before_is_not_counted_again():
    recent, clock = made()
    status = status_at(100.0, waited=0.2)
    for _ in range(30):
        clock.now_s += 1.0
        recent.add(status)
    clock.now_s += 10.0
    recent.add(status_at(110.0, waited=0.2))
    assert recent.busy("learner") is not None
    assert round(recent.busy("learner") or 0.0, 3) == 0.8


def test_a_share_of_now_is_of_the_last_seconds_however_long_the_run_has_lasted():
    clock = Clock(BEGAN_S)
    history = RunHistory(began_s=BEGAN_S, every_s=64.0)
    history.sample(status_at(10.0, waited=1.0), BEGAN_S + 10)
    recent = make(history.columns(), clock)
    waited_s = 900.0
    for second in range(1_000, 1_030):
        clock.now_s = BEGAN_S + second
        waited_s += second < 1_015  # it waited until then, and then worked
        status = status_at(float(second), waited=waited_s / second)
        recent.add(status)
        if second == 1_000:
            assert recent.busy("learner") is None  # nothing is known of now
    assert recent.busy("learner") == 1.0


def test_restarted_process_is_busy_as_it_reports():
    recent, clock = made()
    watch(recent, clock, since_s=100, until_s=105, waited=1.0)
    clock.now_s += 2.0
    recent.add(status_at(2.0, waited=0.25))
    assert recent.busy("learner") == 0.75
