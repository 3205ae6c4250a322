"""The learner's rank 0 against the broker's loop, over a real socket."""

import asyncio
import time
from pathlib import Path

import pytest

from deploy.addition import write_blank_model
from learner.background import BackgroundLoop
from learner.broker_link import LeaderLink
from learner.config import learner_settings
from tests.unit.broker.ledger_driver import eval_plan, make_ledger, make_rules
from tests.unit.broker.test_server import running
from wire.control import BatchNotReady
from wire.phases import PhaseClock

pytestmark = [pytest.mark.integration, pytest.mark.timeout(30)]
PATIENCE_S = 20.0


def test_a_stop_that_was_planned_while_the_learner_waits_reaches_it_at_once(tmp_path: Path):
    write_blank_model(tmp_path / "model", hidden=16, layers=1)
    run = {"model": str(tmp_path / "model"), "socket_dir": str(tmp_path), "steps": 9}
    settings = learner_settings({"run": run})
    ledger = make_ledger(make_rules(total_steps=9, plan=eval_plan(1)))

    def learner(
        took_over: asyncio.Event, broker: asyncio.AbstractEventLoop
    ) -> tuple[float, list[BatchNotReady]]:
        with BackgroundLoop() as loop:
            link = LeaderLink(loop, settings, PhaseClock(), lambda: False)
            version = link.take_over(0)
            broker.call_soon_threadsafe(took_over.set)
            started = time.monotonic()
            first = link.next_batch(version, max_wait_s=PATIENCE_S)
            waited_s = time.monotonic() - started
            second = link.next_batch(version, max_wait_s=0.0)
            link.close()
        assert isinstance(first, BatchNotReady)
        assert isinstance(second, BatchNotReady)
        return waited_s, [first, second]

    async def scenario() -> None:
        async with running(tmp_path, ledger) as it:
            took_over = asyncio.Event()
            broker = asyncio.get_running_loop()
            learning = asyncio.create_task(asyncio.to_thread(learner, took_over, broker))
            await took_over.wait()
            await it.server.plan_stop("enough")
            waited_s, answers = await learning
            assert [answer.last_step for answer in answers] == [0, 0]
            assert waited_s < PATIENCE_S / 4

    asyncio.run(scenario())
