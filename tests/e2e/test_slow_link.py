"""A generator at the other end of a slow link fetches what changed, and has every byte.

How much of its rate a run keeps there is measured by benchmarks/bench_deltas.py.
"""

import json
import shutil
from pathlib import Path

import pytest

from slipstream.broker.report.summary import PUBLISHES
from slipstream.wire.files.run_folder import SUMMARY
from tests.e2e.hosts import Link, Roles, toml_of, two_hosts
from tests.support.tiny_run import assert_complete, tiny_inputs, tiny_settings

# tests/integration/test_deltas.py has deltas without a link, test_remote_roles.py another host.
pytestmark = [pytest.mark.e2e, pytest.mark.slow]
FAR = "far/generator-7"
STEPS = 12


def test_a_generator_behind_a_slow_link_fetches_what_changed(tmp_path: Path):
    with two_hosts(tmp_path, Link(round_trip_s=0.08, mbit=50)) as (head, far):
        tiny_inputs(head.folder)
        settings = tiny_settings(head.folder) | {
            "run.dir": "runs",
            "run.steps": STEPS,
            "learner.lr": 1e-4,
            "learner.dtype": "bfloat16",
            "generators.dtype": "bfloat16",
            "generators.count": 0,
            "weightbus.listen": "tcp://10.77.0.1:5600",
            "weightbus.transport": "tcp",
            "checkpoint.export_at_end": False,
        }
        (head.folder / "run.toml").write_text(toml_of(settings))
        head.run("slipstream keys make far --role generator --config run.toml")
        shutil.copy(head.folder / "runs/keys/clients/far.key", far.folder)
        shutil.copy(head.folder / "run.toml", far.folder)
        listen = "broker.listen=tcp://0.0.0.0:5555"
        reach = "run.broker=tcp://head:5555 run.key_file=far.key"
        with Roles() as roles:
            roles.start(head, "run", f"slipstream run --config run.toml {listen}")
            joining = f"start-generator --config run.toml --name generator-7 {reach}"
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
