"""Every role of a run, started by hand with `--health`, from its start to its end by SIGTERM."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.deploy.terminal.observe import status_now
from slipstream.wire.files.checkpoints import newest_checkpoint
from slipstream.wire.messages.status import RunStatus
from slipstream.wire.settings.sections import RunSection
from tests.support.probed import BROKER, GENERATOR, LEARNER, WORKER, Probed, ProbedRun
from tests.support.waiting import until

pytestmark = [pytest.mark.e2e]


@pytest.fixture
def run() -> Iterator[ProbedRun]:
    with (
        tempfile.TemporaryDirectory(prefix="sh-", dir="/tmp") as name,
        ProbedRun(Path(name), "run.steps=10000", "checkpoint.export_at_end=false") as one,
    ):
        yield one


def test_every_role_becomes_ready_and_ends_in_order_when_it_is_asked_to(run: ProbedRun):
    section = RunSection(name="tiny", dir=str(run.folder / "runs"))

    def status() -> RunStatus:
        return status_now(section)

    broker = run.start(BROKER)
    broker.until_ready()
    generator = run.start(GENERATOR, "--name", "generator-0")
    generator.until_it_says(
        "ready", lambda said: said["reason"] == "it waits for its engine to start"
    )
    generator.until_it_says("ready", lambda said: "adopted no version" in said["reason"])
    assert generator.says("live")["state"] == "running"
    worker = run.start(WORKER, "--name", "worker-0")
    worker.until_ready()
    learner = run.start(LEARNER)
    learner.until_it_says("ready", lambda said: said["reason"] == "it waits for its policy to load")
    learner.until_ready()
    generator.until_ready()
    until(lambda: status().steps >= 2, "two steps are not trained")
    roles: list[Probed] = [generator, worker, learner, broker]
    for role in roles:
        assert role.says("live")["live"]
        assert role.says("ready")["ready"]

    until(
        lambda: any(one.leases for one in status().roles if one.role == "generator"),
        "the generator has no work",
    )
    assert generator.ends() == 0, generator.log
    assert "asked to stop" in generator.log
    after = status()
    assert not {"lease_exhausted", "poison"} & set(after.dropped)
    assert after.queue["lapsed_leases"] == 0, "it handed them back"
    assert [one.leases for one in after.roles if one.role == "generator"] in ([], [0])
    assert worker.ends() == 0, worker.log
    assert [one.leases for one in status().roles if one.role == "reward_worker"] in ([], [0])
    assert learner.ends() == 0, learner.log
    steps = status().steps
    assert newest_checkpoint(run.folder / "runs" / "tiny") == (
        run.folder / "runs" / "tiny" / "checkpoints" / f"step-{steps:06d}"
    )
    assert status().unaccounted == 0
    assert broker.says("ready")["ready"], "it waits for others to come"
    assert broker.ends() == 0, broker.log
    for role in roles:
        assert "Traceback" not in role.log
        assert not role.says("live")["live"]
