"""A target below the bound, in a run of real parts whose learner is the narrow side."""

import json
from pathlib import Path

import pytest

from slipstream.wire.files.run_folder import ACCOUNT
from tests.support.tiny_run import TinyRun

pytestmark = [pytest.mark.e2e]
STEPS, LAST = 28, 6


def test_generators_ahead_of_a_slow_learner_are_held_back_to_the_target(tmp_path: Path):
    run = TinyRun(
        tmp_path,
        {
            "run.steps": STEPS,
            "run.max_staleness_steps": 5,
            "run.staleness_target.p95_lag": 1,
            "learner.max_tokens_per_microbatch": 80,  # an answer at a time: slow
            "generators.max_sequences": 64,
        },
    )
    assert run.wait() == 0, run.output
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "staleness/bound_in_force" in row]
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    oldest: dict[int, int] = {}
    for row in run.rollouts():
        lags = [row["step"] - one["step"] for one in row["version_runs"]]
        oldest[row["step"]] = max(oldest.get(row["step"], 0), *lags)
    assert max(oldest.values()) >= 3, "nothing was to be held back"
    last = [oldest[step] for step in sorted(oldest)[-LAST:]]
    assert sum(last) / LAST <= 1.5, f"{oldest}, {steps}"  # it tries more now and then
    assert steps[0]["staleness/bound_in_force"] == 5
    assert steps[-1]["staleness/bound_in_force"] <= 2
    assert "is above its target" in run.log("broker")
    assert json.loads((run.folder / ACCOUNT).read_text())["unaccounted"] == 0
