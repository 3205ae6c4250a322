"""`--health` of roles that are started by hand: what they say until they work, and as they end."""

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.wire.files.checkpoints import newest_checkpoint
from slipstream.wire.process.health import probe
from tests.integration.recorded import LAYOUTS, Replays
from tests.support.listening import listeners_of
from tests.support.probed import BROKER, GENERATOR, LEARNER, WORKER, Probed, ProbedRun
from tests.support.waiting import HANG_S

pytestmark = [pytest.mark.integration, pytest.mark.redis]


@pytest.fixture
def run() -> Iterator[ProbedRun]:
    with (
        tempfile.TemporaryDirectory(prefix="sh-", dir="/tmp") as name,
        ProbedRun(Path(name)) as one,
    ):
        yield one


def test_a_worker_is_ready_once_a_broker_has_it_and_both_end_in_order(run: ProbedRun):
    worker = run.start(WORKER)
    waiting = worker.until_it_says("ready", lambda answer: "broker at" in answer["reason"])
    assert waiting["state"] == "starting"
    assert worker.says("live")["live"]
    broker = run.start(BROKER)
    broker.until_ready()
    worker.until_ready()
    for role in (worker, broker):
        found = listeners_of([role.process.pid])
        assert role.port in {one.port for one in found}
        assert all(one.on_loopback for one in found)
    os.kill(worker.process.pid, signal.SIGSTOP)
    assert not probe(worker.port, "live", timeout_s=0.5)[0]
    os.kill(worker.process.pid, signal.SIGCONT)
    worker.until_ready()
    assert worker.ends() == 0, worker.log
    assert broker.says("ready")["ready"]
    assert broker.ends() == 0, broker.log
    assert "no answer" in broker.says("live")["reason"]


@pytest.mark.parametrize("module", [BROKER, WORKER, LEARNER, GENERATOR])
def test_a_port_that_is_taken_ends_a_role_with_one_line(run: ProbedRun, module: str):
    with_port = run.start(WORKER)
    with_port.until_it_says("live", lambda answer: answer["live"])
    other = run.start(module, port=with_port.port)
    assert other.process.wait(HANG_S) == 2, other.log
    text = (
        f"cannot listen at 127.0.0.1:{other.port}: Address already in use (--health {other.port})"
    )
    assert text in other.log
    assert "Traceback" not in other.log


@pytest.mark.parametrize("layout", ["one", "tp2"])
def test_a_learner_is_ready_while_it_trains_and_drains_until_it_has_saved(
    tmp_path: Path, layout: str
):
    """Rank 0 answers for its ranks, which repeat its command line."""
    replays = Replays(tmp_path, steps=400)
    command = replays.command("a", *LAYOUTS[layout])
    learner = Probed(command[2], tmp_path, *command[3:])
    try:
        learner.until_ready()
        seen = learner.says("live")
        assert (seen["role"], seen["state"]) == ("learner", "running")
        assert learner.ends() == 0, learner.log
    finally:
        learner.kill()
    assert "stopping; a second signal ends at once" in learner.log
    assert "attention: torch's scaled_dot_product_attention" in learner.log
    assert newest_checkpoint(tmp_path / "runs" / "a") is not None
