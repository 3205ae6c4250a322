"""Two generators on another host: each version goes there once."""

import json
from pathlib import Path

import pytest

from slipstream.broker.report.summary import PUBLISHES
from slipstream.wire.files.run_folder import SUMMARY
from tests.e2e.hosts import LISTEN, REACH, Roles, two_hosts, write_far_run
from tests.support.tiny_run import assert_complete

# tests/integration/test_shared_fetches.py has engines and agents without a run.
pytestmark = [pytest.mark.e2e, pytest.mark.slow]
NAMES = ("far/generator-7", "far/generator-8")


def test_generators_of_another_host_share_what_one_of_them_fetches(tmp_path: Path):
    with two_hosts(tmp_path) as (head, far):
        write_far_run(head, far, {"run.steps": 10})
        with Roles() as roles:
            roles.start(head, "run", f"slipstream run --config run.toml {LISTEN}")
            for name in NAMES:
                short = name.removeprefix("far/")
                joining = f"start-generator --config run.toml --name {short} {REACH}"
                roles.start(far, short, joining)
            roles.wait("run", *(name.removeprefix("far/") for name in NAMES))
        (folder,) = (head.folder / "runs").glob("tiny*")
    assert_complete(folder)
    summary = json.loads((folder / SUMMARY).read_text())
    assert len(set(summary["last_publish"]["engine_digests"].values())) == 1
    served = summary[PUBLISHES]
    shared = [record for record in served if record["adopted_by"].keys() >= set(NAMES)]
    assert shared, "no version came to both"
    assert not any(record["failed"] for record in served)
    for record in shared:
        assert min(record["fetched_bytes"].values()) == 0
        assert sum(record["fetched_bytes"].values()) <= record["num_bytes"]
