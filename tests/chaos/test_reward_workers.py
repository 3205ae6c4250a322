"""Rewards that fail and reward workers that die: no reward is lost, and none is made up."""

import asyncio
import shutil
from pathlib import Path

import msgspec
import pytest

from slipstream.deploy.launch.observer import ask_broker
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.run_folder import BATCHES
from slipstream.wire.files.trajectory_file import read_groups
from slipstream.wire.messages.broker import DeadLetters, GetDeadLetters
from slipstream.wire.messages.codec import decode_transcript
from slipstream.wire.settings.load import load_table
from slipstream.wire.settings.sections import run_section
from tests.chaos.harness import Chaos, chaos_run
from tests.support.commands import call_command

pytestmark = [pytest.mark.integration, pytest.mark.redis]
SLOW = """
import time

def score(data_source, solution_str, ground_truth, extra_info):
    time.sleep(0.02)
    return 1.0 + (sum(map(ord, solution_str)) % 5) / 4
"""
WHIMSICAL = """
import os, pathlib, time
FOLDER = pathlib.Path(__file__).parent

def score(data_source, solution_str, ground_truth, extra_info):
    row = int(ground_truth)
    if row % 10 == 3:
        raise RuntimeError("no idea")
    if row % 10 == 4:
        return float("nan")
    first = FOLDER / f"tried-{row}"
    if row % 10 in (5, 6, 7) and not first.exists():
        first.touch()
        if row % 10 == 5:
            time.sleep(600)
        if row % 10 == 6:
            os._exit(9)
        return {"score": "good"}
    return 1.0 + (sum(map(ord, solution_str)) % 5) / 4
"""


def reward_of(response: str) -> float:
    """What the functions above give; it is never 0."""
    return 1.0 + (sum(map(ord, response)) % 5) / 4


def assert_rewards_are_true(it: Chaos) -> int:
    """Every reward that was trained on is the function's value for that very answer."""
    count = 0
    for recorded in read_groups(it.run_folder / BATCHES):
        for one, transcript in zip(recorded.group.trajectories, recorded.transcripts, strict=True):
            assert one.reward == reward_of(decode_transcript(transcript).response)
            count += 1
    return count


def test_a_worker_killed_in_mid_batch_loses_no_reward_and_none_becomes_zero(folder: Path):
    with chaos_run(
        folder, prompts=100, reward=SLOW, reward_workers=2, broker__record_batches=True
    ) as it:
        it.start()
        for step in (2, 5, 8):
            it.wait_until(lambda: it.steps() >= step, f"step {step}")  # noqa: B023
            assert it.kill(f"reward-worker-{step % 2}")
        it.finish()
        view = it.assert_nothing_was_lost(100)
        assert "reward_unavailable" not in view.dropped
        assert assert_rewards_are_true(it) == 2 * view.trained


@pytest.mark.slow  # the one above kills workers, one at a time
def test_all_workers_may_be_gone_for_a_while(folder: Path):
    with chaos_run(
        folder, prompts=60, reward=SLOW, broker__record_batches=True, broker__lease_s=1.5
    ) as it:
        it.start()
        it.wait_until(lambda: it.steps() >= 3, "third step")
        child = it.supervisor.children["reward-worker-0"]
        assert child.process is not None
        child.process.kill()
        child.process.wait()
        child.restart_at_s = None
        del it.supervisor.children["reward-worker-0"]
        before = it.steps()
        asyncio.run(asyncio.sleep(4.0))  # more than two leases
        assert it.steps() - before <= 3  # what was scored before
        it.supervisor.start(it.plans["reward-worker-0"])
        it.finish()
        view = it.assert_nothing_was_lost(60)
        assert "reward_unavailable" not in view.dropped
        assert_rewards_are_true(it)


def test_what_cannot_be_scored_becomes_a_dead_letter_that_can_be_tried_again(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    with chaos_run(
        folder,
        prompts=40,
        reward=WHIMSICAL,
        reward_workers=2,
        broker__max_attempts=3,
        broker__record_batches=True,
        reward__timeout_s=1.0,
    ) as it:
        it.start()
        shutil.copy(folder / "run.json.toml", it.run_folder / "resolved.toml")
        it.wait_until(it.broker_answers, "broker")
        it.wait_until(lambda: len(letters(it).letters) >= 4, "dead letters")
        first = letters(it).letters[0]
        name = f"g{first.group_id}"
        assert {one.by.partition("@")[0] for one in first.failures} == {
            "reward-worker-0",
            "reward-worker-1",
        }
        assert call_command("dead-letters", "list", run=it.run_folder) == 0
        assert name in capsys.readouterr().out
        assert call_command("dead-letters", "show", name, run=it.run_folder) == 0
        shown = capsys.readouterr().out
        assert "reward_unavailable" in shown
        assert "no idea" in shown or "invalid" in shown
        assert call_command("dead-letters", "retry", name, run=it.run_folder) == 0
        assert f"{name}: issued again as g" in capsys.readouterr().out
        with pytest.raises(ConfigError, match=f"no dead letter {name}"):
            call_command("dead-letters", "drop", name, run=it.run_folder)
        it.finish()
        view = it.account()
        assert (view.unaccounted, sum(view.in_flight.values())) == (0, 0)
        assert view.issued == 41  # one prompt twice
        assert view.dropped["reward_unavailable"] == 9
        assert (view.dead_letters, view.retried) == (8, 1)
        rows = {
            msgspec.json.decode(decode_transcript(one).prompt.ground_truth) % 10
            for recorded in read_groups(it.run_folder / BATCHES)
            for one in recorded.transcripts
        }
        assert not rows & {3, 4}
        assert rows & {5, 6, 7}, "what failed once was scored the second time"
        assert_rewards_are_true(it)


def letters(it: Chaos) -> DeadLetters:
    run = run_section(load_table(it.folder / "run.json.toml"))
    return ask_broker(run, GetDeadLetters(), DeadLetters)
