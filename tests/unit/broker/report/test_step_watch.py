from msgspec.structs import replace

from slipstream.broker.report.step_watch import LEAST_S, TIMES, StepWatch
from slipstream.wire.messages.versions import PolicyVersion


def watched(step_s: float, *, steps: int = 5) -> tuple[StepWatch, float]:
    """Return a watch that has seen steps of so many seconds, and when the next one begins."""
    watch = StepWatch()
    for step in range(steps + 1):
        watch.look(PolicyVersion(1, step), (2 * step, 2 * step + 1), step * step_s)
    return watch, steps * step_s


def test_a_step_is_slow_once_it_takes_many_times_as_long_as_usual():
    watch, began_s = watched(10.0)
    late_s = began_s + TIMES * 10.0
    watch.look(PolicyVersion(1, 5), (10, 11), late_s)
    assert watch.slow(late_s - 1.0) is None
    slow = watch.slow(late_s)
    assert slow is not None
    assert (slow.step, slow.seconds, slow.usual_s, slow.groups) == (5, 200.0, 10.0, (10, 11))
    assert slow.text == (
        "the learner has been training step 5 for 200 s, those before it took 10 s; "
        "groups of its batch: 10, 11"
    )
    many = replace(slow, groups=tuple(range(20)))
    assert many.text.endswith(": 0, 1, 2, 3, 4, 5, 6, 7 and 12 more")
    watch.look(PolicyVersion(1, 6), (12, 13), late_s + 1.0)
    assert watch.slow(late_s + 1.0) is None, "it has ended"


def test_a_checkpoint_or_an_evaluation_makes_no_step_of_a_moment_slow():
    watch, began_s = watched(0.1)
    assert watch.slow(began_s + LEAST_S - 1.0) is None
    assert watch.slow(began_s + LEAST_S) is not None


def test_a_wait_for_a_batch_is_no_part_of_its_step():
    watch, began_s = watched(1.0)
    watch.look(PolicyVersion(1, 6), (), began_s + 1.0)
    watch.look(PolicyVersion(1, 6), (), began_s + 900.0)
    assert watch.slow(began_s + 900.0) is None
    watch.look(PolicyVersion(1, 6), (12,), began_s + 901.0)
    assert watch.slow(began_s + 1000.0) is None
    assert watch.slow(began_s + 901.0 + LEAST_S) is not None


def test_steps_of_another_learner_and_too_few_of_them_are_no_measure():
    few, began_s = watched(1.0, steps=2)
    assert few.slow(began_s + 9_999.0) is None
    watch, began_s = watched(1.0)
    watch.look(PolicyVersion(2, 3), (6, 7), began_s + 500.0)
    assert watch.slow(began_s + 501.0) is None, "its own time began with its take-over"
