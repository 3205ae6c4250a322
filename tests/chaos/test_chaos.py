"""Kills and stops at random moments: the run completes, and every prompt is accounted for."""

import json
from pathlib import Path

import pytest

from tests.chaos.harness import chaos_run, disturb

pytestmark = [pytest.mark.integration, pytest.mark.redis]


def test_undisturbed_run_completes(folder: Path):
    with chaos_run(folder, prompts=40) as it:
        it.start()
        it.finish()
        view = it.assert_nothing_was_lost(40)
        assert view.redelivered_steps == view.requeued == 0


@pytest.mark.slow  # the next one stops roles too, for up to one and a half leases
def test_every_role_may_be_stopped_for_longer_than_a_lease(folder: Path):
    with chaos_run(folder, prompts=600, broker__lease_s=1.5) as it:
        it.start()
        roles = ["generator-0", "reward-worker-0", "redis", "learner", "broker", "generator-1"]
        for number, role in enumerate(roles):
            it.wait_until(lambda: it.steps() >= 2 * number + 2, "a step")  # noqa: B023
            # The broker longer than its connections live without a heartbeat.
            assert it.stop(role, seconds=12.0 if role == "broker" else 2.5)
            it.wait_until(lambda: not it.stopped, "end of the stop")
        it.finish()
        it.assert_nothing_was_lost(600)
        assert set(it.done) == {f"stop {role}" for role in roles}


def test_a_run_of_twelve_kills_and_three_stops_loses_nothing(folder: Path):
    with chaos_run(
        folder,
        prompts=500,
        seed=1,
        broker__record_batches=True,
        eval__file=str(folder / "held_out.jsonl"),
        eval__every_steps=5,
        eval__samples=2,
        eval__temperature=1.0,
    ) as it:
        it.start()
        it.wait_until(lambda: it.steps() >= 1, "a step")  # a broker has begun, and can begin again
        disturb(it, kills=12, stops=3)
        it.finish()
        view = it.assert_nothing_was_lost(500)
        assert sum(n for what, n in it.done.items() if what.startswith("kill")) == 12
        assert view.broker_generation > 1
        lineage = it.weights().lineage
        trained = sorted((step, g) for step, (groups, _) in lineage.items() for g in groups)
        assert sorted(it.recorded()) == trained, "the recording is not what was trained"
        summary = json.loads((it.run_folder / "summary.json").read_text())
        evaluated = [point["step"] for point in summary["eval"]]
        assert evaluated == sorted({*range(0, view.version.step, 5), view.version.step})
        assert all(point["overall"]["num_answers"] == 12 for point in summary["eval"])
        for step in evaluated:
            answers = it.run_folder / "eval" / f"step-{step:06d}.jsonl"
            rows = [json.loads(line) for line in answers.read_text().splitlines()]
            answered = {(row["problem"], row["sample"]) for row in rows}
            assert len(answered) == 12, f"answers of step {step}: {len(answered)} of 12"
