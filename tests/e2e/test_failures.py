"""What dies, and how the run ends or continues."""

import signal
import time
from collections.abc import Callable

import psutil
import pytest

from tests.support.tiny_run import TinyRun
from tests.support.waiting import HANG_S

pytestmark = [pytest.mark.e2e]


@pytest.mark.slow  # test_crashes.py kills a generator of real parts, and three other roles
def test_a_generator_killed_in_mid_run_loses_nothing(start_run: Callable[..., TinyRun]):
    run = start_run(
        run__steps=14,
        sampling__min_response_tokens=150,
        sampling__max_response_tokens=200,
        broker__lease_s=4.0,
    )
    run.wait_until(lambda: run.steps() >= 2, "second learner step")
    victim = run.process_with("--name generator-0")
    assert victim is not None
    servers = victim.children(recursive=True)
    assert servers, "the agent has no SGLang"
    victim.kill()
    _, alive = psutil.wait_procs(servers, timeout=HANG_S)
    assert not alive, "kill -9 of the agent left its SGLang behind"
    assert run.steps() < 14, "the run was over before the kill: make it longer"

    assert run.wait() == 0, run.output
    summary = run.summary()
    assert summary["trained"] == 14 * 4
    assert summary["equation"]["unaccounted"] == 0
    assert summary["issued"] == summary["trained"] + sum(summary["dropped"].values())
    assert set(summary["staleness_histogram"]) <= {"0", "1", "2"}
    assert "generator-0 was killed by SIGKILL" in run.output
    run.assert_nothing_left()


@pytest.mark.parametrize(
    ("signum", "after_step"),
    [
        (signal.SIGINT, 1),
        pytest.param(signal.SIGTERM, -1, marks=pytest.mark.slow),  # another moment, the same end
    ],
    ids=["ctrl-c", "early"],
)
def test_a_signal_ends_the_run_and_leaves_nothing(
    start_run: Callable[..., TinyRun], signum: signal.Signals, after_step: int
):
    run = start_run(run__steps=1000, generators__count=1, deploy__stop_timeout_s=15)
    run.wait_until(lambda: run.process_with("--name generator-0") is not None, "the generator")
    run.wait_until(lambda: run.steps() >= after_step, "the step to interrupt")
    time.sleep(1.0)
    run.remember_children()
    run.process.send_signal(signum)
    assert run.wait() == 128 + signum
    assert f"stopped: {signum.name}" in run.output
    run.assert_nothing_left()


def test_a_learner_that_leaves_early_fails_the_run(start_run: Callable[..., TinyRun]):
    run = start_run(run__steps=1000, generators__count=1)
    run.wait_until(lambda: run.steps() >= 1, "first learner step")
    learner = run.process_with("slipstream.learner.main")
    assert learner is not None
    learner.terminate()
    assert run.wait() == 1
    assert "learner ended before the run was complete" in run.output
    run.assert_nothing_left()
