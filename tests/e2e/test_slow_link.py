"""A generator at the other end of a slow link fetches what changed, and has every byte.

How much of its rate a run keeps there is measured by benchmarks/bench_deltas.py.
"""

import json
from pathlib import Path

import pytest

from slipstream.broker.report.summary import PUBLISHES
from slipstream.wire.files.run_folder import SUMMARY
from tests.e2e.hosts import LISTEN, REACH, Link, Roles, two_hosts, write_far_run
from tests.support.tiny_run import assert_complete

# tests/integration/test_deltas.py has deltas without a link, test_remote_roles.py another host.
pytestmark = [pytest.mark.e2e, pytest.mark.slow]
FAR = "far/generator-7"
STEPS = 12


def test_a_generator_behind_a_slow_link_fetches_what_changed(tmp_path: Path):
    with two_hosts(tmp_path, Link(round_trip_s=0.08, mbit=50)) as (head, far):
        write_far_run(
            head,
            far,
            {
                "run.steps": STEPS,
                "learner.lr": 1e-4,
                "learner.dtype": "bfloat16",
                "generators.dtype": "bfloat16",
            },
        )
        with Roles() as roles:
            roles.start(head, "run", f"slipstream run --config run.toml {LISTEN}")
            joining = f"start-generator --config run.toml --name generator-7 {REACH}"
            roles.start(far, "generator", joining)
            roles.wait("run", "generator")
            assert "is fetched whole" not in roles.log("generator")
        (folder,) = (head.folder / "runs").glob("tiny*")
    assert_complete(folder)
    summary = json.loads((folder / SUMMARY).read_text())
    served = [one for one in summary[PUBLISHES] if FAR in one["adopted_by"]]
    assert len(served) > 1
    assert not any(one["failed"] for one in served)
    assert summary["last_publish"]["engine_digests"][FAR]  # compared before each is adopted
    first, *later = [one["fetched_bytes"][FAR] for one in served]
    assert first == served[0]["num_bytes"]
    assert max(later) < first
    assert sum(later) < 0.5 * first * len(later)
