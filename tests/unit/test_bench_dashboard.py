"""The run that the dashboard's benchmark serves continues like a real one."""

from benchmarks.bench_dashboard import LivingRun


def test_every_step_is_a_new_status():
    run = LivingRun(steps=5)
    before = run.status()
    run.report()
    run.step()
    after = run.status()
    assert (before.steps, before.steps_history[-1].step) == (5, 5)
    assert (after.steps, after.steps_history[-1].step) == (6, 6)
    assert after.trained == before.trained + 64
    assert after.unaccounted == 0
    assert len(after.publish_history) == len(before.publish_history) + 1
    assert len(after.roles) == 65  # the broker, too
    assert {member.version.step for member in after.members} == {6}
