"""One kind of fault at a time, at the moment where it hurts most."""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from slipstream.deploy.launch.plan import RolePlan
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.checkpoints import newest_checkpoint
from tests.chaos.harness import ROOT, Chaos, chaos_run, mounted, redis_server
from tests.support.waiting import HANG_S

pytestmark = [pytest.mark.integration, pytest.mark.redis]


def test_a_broker_killed_between_the_write_and_the_acknowledgement(folder: Path):
    with chaos_run(folder, prompts=240, broker_module="tests.chaos.dying_broker") as it:
        it.start()
        it.finish()
        view = it.assert_nothing_was_lost(240)
        assert (folder / "broker-deaths").read_text() == "xxxx"
        assert view.broker_generation == 5


def test_a_broker_that_is_asked_to_end_alone_is_started_again(folder: Path):
    with chaos_run(folder, prompts=80) as it:
        it.start()
        it.wait_until(lambda: it.steps() >= 2, "a step")
        broker = it.pid_of("broker")
        os.kill(broker, signal.SIGTERM)
        it.finish()
        assert it.assert_nothing_was_lost(80).broker_generation == 2


def test_a_store_that_comes_back_empty_ends_the_run_with_the_way_out(folder: Path):
    with chaos_run(folder, prompts=500) as it:
        it.start()
        it.wait_until(lambda: it.steps() >= 2, "a step")
        it.kill("redis")
        shutil.rmtree(it.run_folder / "redis", ignore_errors=True)
        with pytest.raises(ConfigError, match=r"has started, and its store at .* is empty"):
            it.finish()


def test_messages_that_come_twice_late_and_in_another_order(folder: Path):
    with chaos_run(folder, prompts=120, clients_sockets="front") as it:
        sockets = (folder / "front" / "broker.sock", folder / "sockets" / "broker.sock")
        arguments = ("--seed", "3", "--clients", str(sockets[0]), "--broker", str(sockets[1]))
        command = (sys.executable, "-m", "tests.chaos.mischief", *arguments)
        it.supervisor.start(RolePlan("mischief", command, environment={"PYTHONPATH": str(ROOT)}))
        it.start()
        it.finish()
        it.assert_nothing_was_lost(120)


@pytest.mark.parametrize(
    "die_at",
    [
        ("commit:3", "commit:7"),  # committed, not published
        # The same kind of fault at other moments:
        # published, in no checkpoint;
        pytest.param(("publish:3", "publish:9"), marks=pytest.mark.slow),
        # half a checkpoint, and a checkpoint that the broker does not know of;
        pytest.param(("save:5", "seal:10"), marks=pytest.mark.slow),
        # twice in a row from one checkpoint.
        pytest.param(("publish:8", "publish:8", "commit:6"), marks=pytest.mark.slow),
    ],
    ids=["before-publish", "before-checkpoint", "while-saving", "twice-from-one-checkpoint"],
)
def test_a_learner_that_dies_trains_the_same_batches_again(folder: Path, die_at: tuple[str, ...]):
    with chaos_run(folder, prompts=70, trainer_arguments=("--die-at", *die_at)) as it:
        it.start()
        it.finish()
        view = it.assert_nothing_was_lost(70)
        assert sorted((it.run_folder / "deaths").read_text().split()) == sorted(die_at)
        assert view.version.epoch == 1 + len(die_at)
        assert view.requeued == 0
        assert view.redelivered_steps > 0 or die_at[0].startswith("save")


def test_past_the_replay_budget_lost_steps_are_generated_again(folder: Path):
    with chaos_run(
        folder,
        prompts=120,
        trainer_arguments=("--save-every", "1000", "--die-at", "publish:12"),
        broker__replay_budget_bytes=10_000,
    ) as it:
        it.start()
        it.finish()
        view = it.assert_nothing_was_lost(120)
        assert view.requeued > 0


def test_run_pauses_while_the_disk_is_full_and_continues_afterwards(folder: Path):
    disk = folder / "runs"
    with mounted(disk, megabytes=24), chaos_run(folder, prompts=120, generators=1) as it:
        it.start()
        it.wait_until(lambda: it.steps() >= 3, "third step")
        filler = disk / "filler"
        fill(filler)
        it.wait_until(lambda: "disk is full" in it.logs(), "word of the full disk")
        before = it.steps()
        pause = time.monotonic() + 2.0
        it.wait_until(lambda: time.monotonic() > pause, "pause")
        assert it.steps() - before <= 1
        filler.unlink()
        it.finish()
        it.assert_nothing_was_lost(120)


def test_a_stopped_broker_that_comes_back_cannot_write(folder: Path):
    with redis_server(folder) as url, chaos_run(folder, prompts=160, broker__redis=url) as it:
        it.start()
        it.wait_until(lambda: it.steps() >= 3, "third step")
        stale = it.supervisor.children["broker"].process
        assert stale is not None
        stale.send_signal(signal.SIGSTOP)
        second = it.plans["broker"]
        name = "broker-2"
        plan = RolePlan(name, (*second.command, "--restarted"), environment=second.environment)
        it.supervisor.start(plan)
        it.wait_until(lambda: it.steps() >= 6, "three steps more, by the second broker")
        it.supervisor.children["broker"].finished = True  # its end is no failure to be repaired
        stale.send_signal(signal.SIGCONT)
        it.wait_until(lambda: stale.poll() is not None, "end of the stale broker")
        assert stale.returncode == 3
        log = (it.run_folder / "logs" / "broker.log").read_text()
        assert "another broker" in log
        it.plans["broker"] = plan
        it.finish()
        it.assert_nothing_was_lost(160)


def fill(path: Path) -> None:
    """Write until the disk is full."""
    with suppress(OSError), path.open("wb") as file:  # closing it writes, too
        while True:
            file.write(b"x" * 65536)
            file.flush()


def kill_everything(it: Chaos) -> None:
    for child in it.supervisor.children.values():
        if child.process is not None:
            child.process.kill()
    for child in it.supervisor.children.values():
        if child.process is not None:
            child.process.wait()
        child.restart_at_s = None


def resumed(it: Chaos) -> None:
    """Start every role again, as `slipstream run --resume auto` does."""
    newest = newest_checkpoint(it.run_folder)
    for name, plan in it.plans.items():
        extra = (f"run.resume_from={newest}",) if newest and name == "broker" else ()
        it.supervisor.start(RolePlan(name, (*plan.command, *extra), environment=plan.environment))


@pytest.mark.parametrize(
    ("save_every", "redis_survives"),
    [
        (5, True),
        # resuming from a checkpoint alone: test_user_loop.py
        pytest.param(5, False, marks=pytest.mark.slow),
        # as the first, without a checkpoint
        pytest.param(1000, True, marks=pytest.mark.slow),
    ],
    ids=["same-redis", "empty-redis", "before-its-first-checkpoint"],
)
def test_run_whose_processes_all_died_at_once_resumes(
    folder: Path, save_every: int, redis_survives: bool
):
    arguments = ("--save-every", str(save_every))
    with chaos_run(folder, prompts=120, trainer_arguments=arguments) as it:
        it.start()
        it.wait_until(lambda: it.steps() >= 8, "eighth step")  # so the seventh was acknowledged
        kill_everything(it)
        if not redis_survives:
            shutil.rmtree(it.run_folder / "redis")
        resumed(it)
        it.finish()
        view = it.assert_nothing_was_lost(120)
        least = 7 if save_every > 8 else redis_survives  # steps that are delivered again
        assert (view.requeued, view.redelivered_steps >= least) == (0, True)
        assert redis_survives or view.redelivered_steps == 0


@pytest.mark.parametrize("shared", [False, True], ids=["own-redis", "shared-redis"])
def test_a_second_broker_does_not_start_beside_the_first(folder: Path, shared: bool):
    """On a shared server it claimed the store, and the first one ended with code 3."""
    with ExitStack() as cleanup:
        server = {"broker__redis": cleanup.enter_context(redis_server(folder))} if shared else {}
        it = cleanup.enter_context(chaos_run(folder, prompts=400, **server))
        it.start()
        it.wait_until(lambda: it.steps() >= 2, "second step")
        plan = it.plans["broker"]
        second = subprocess.run(
            plan.command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=False
        )
        assert second.returncode == 2
        assert "is the broker of the run in" in second.stderr
        before = it.steps()
        it.wait_until(lambda: it.steps() > before + 1, "two steps more by the first")
        assert it.supervisor.children["broker"].num_starts == 1
