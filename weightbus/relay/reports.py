"""The relay's reports to the broker: publishes, and the states of the engines."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version

from slipstream.broker.client import BrokerClient
from slipstream.weightbus.net.curve import RemoteListener
from slipstream.weightbus.net.traffic import Traffic
from slipstream.wire.errors import SlipstreamError
from slipstream.wire.messages.bounds import finite
from slipstream.wire.messages.broker import Done, PublishReport, RelayHeard, RelayReport, RoleReport
from slipstream.wire.messages.status import REPORT_EVERY_S
from slipstream.wire.messages.weightbus import MemberState, PublishRecord, merged
from slipstream.wire.process.phases import WAIT
from slipstream.wire.process.usage import ProcessUsage
from slipstream.wire.settings.sections import RunSection

_log = logging.getLogger(__name__)
_AGAIN_S = 5.0
_MAX_RECORDS = 1_000  # versions kept while the broker is gone, and records of each


class BrokerReports:
    """Reports of a relay. Use it inside one event loop."""

    def __init__(self, run: RunSection, traffic: Traffic) -> None:
        """Report also the counts of ``traffic``."""
        self._run = run
        self._traffic = traffic
        self._records: deque[list[PublishRecord]] = deque()  # not yet reported, by version
        self._is_news = asyncio.Event()
        self._num_lost_records = 0
        self._started_s = time.monotonic()
        self._usage = ProcessUsage()

    async def keep(self, record: PublishRecord) -> None:
        """Keep the record of a publish until the broker has it, or there are too many records.

        Members that are served alone have records of their own: records of one version are merged.
        """
        self._is_news.set()
        if self._records and self._records[-1][0].version == record.version:
            newest = self._records[-1]
            newest.append(record)
            if len(newest) > _MAX_RECORDS:
                newest[:] = [merged(newest)]
            return
        if len(self._records) == _MAX_RECORDS:
            self._num_lost_records += 1
            _log.error(
                "%d records of publishes are lost: the broker accepts none", self._num_lost_records
            )
            self._records.popleft()
        self._records.append([record])

    async def run(
        self, states: Callable[[], list[MemberState]], remote: RemoteListener | None
    ) -> None:
        """Report until cancelled; engines are served even without a broker.

        ``remote`` gets the keys that the broker knows.
        """
        while True:
            try:
                await self._report(states, remote)
            except SlipstreamError as error:
                _log.warning("%s; trying the broker again", error)
                await asyncio.sleep(_AGAIN_S)

    async def _report(
        self, states: Callable[[], list[MemberState]], remote: RemoteListener | None
    ) -> None:
        run = self._run
        client, _ = await BrokerClient.connect(
            run.broker_endpoint,
            role="relay",
            name="relay",
            packages={"torch": version("torch")},
            outage_s=run.outage_s,
            key_file=run.key_file,
        )
        try:
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(REPORT_EVERY_S):
                        await self._is_news.wait()
                report = RelayReport(members=states(), door=remote.address if remote else None)
                answer, _ = await client.ask(report, RelayHeard)
                if remote is not None:  # do this first: a key may have been revoked
                    remote.admit(answer.generator_keys)
                while self._records:
                    sent = self._records.popleft()
                    try:
                        await client.ask(PublishReport(record=merged(sent)), Done)
                    except BaseException:
                        self._records.appendleft(sent)
                        raise
                self._is_news.clear()
                age_s = time.monotonic() - self._started_s
                busy_s = min(time.process_time(), age_s)  # CPU time counts as serving
                phases = {"serve": busy_s, WAIT: age_s - busy_s}
                role_report = RoleReport(
                    phase_seconds=phases,
                    counters=self._traffic.as_counters(),
                    gauges=finite(self._usage.gauges()),
                )
                await client.ask(role_report, Done)
        finally:
            client.close()
