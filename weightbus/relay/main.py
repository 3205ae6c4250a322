"""The weight relay: serves the learner's versions to the engines, and outlives the learner.

A process that the learner starts: ``python -m slipstream.weightbus.relay.main --config RUN.toml``.
It ends when the learner asks it to, when its lifeline is cut, or without a learner for
weightbus.linger_s.
"""

import asyncio
import contextlib
import fcntl
import gc
import logging
import os
import select
import signal
import time
from collections import deque
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TextIO

import msgspec
import zmq
import zmq.asyncio

from slipstream.broker.client import BrokerClient
from slipstream.weightbus.config import WeightBusSection, weightbus_section
from slipstream.weightbus.net.compatibility import installed_libraries
from slipstream.weightbus.net.curve import RemoteListener
from slipstream.weightbus.net.interfaces import interface_variables
from slipstream.weightbus.net.threads import are_done
from slipstream.weightbus.relay.publisher import Publisher
from slipstream.weightbus.relay.served import Versions
from slipstream.weightbus.version.disk import copies_in, number_after, remove_copies
from slipstream.wire.errors import (
    ConfigError,
    ProtocolError,
    PublishError,
    SlipstreamError,
    SupersededError,
)
from slipstream.wire.messages.broker import Done, PublishReport, RelayHeard, RelayReport, RoleReport
from slipstream.wire.messages.codec import decode_relay_request, encode
from slipstream.wire.messages.relay import (
    Alive,
    EndRelay,
    Ok,
    OpenMemory,
    RelayAnswer,
    RelayRequest,
    Reserve,
    Reserved,
    Written,
)
from slipstream.wire.messages.status import REPORT_EVERY_S
from slipstream.wire.messages.weightbus import PublishRecord
from slipstream.wire.process.command_line import (
    load_arguments,
    refuse_settings,
    role_parser,
    run_role,
)
from slipstream.wire.process.logs import start_logging
from slipstream.wire.process.patience import END_AT_MOST, Patience, signs_of
from slipstream.wire.process.phases import WAIT
from slipstream.wire.process.run_until import run_until
from slipstream.wire.process.stopping import stop_event
from slipstream.wire.settings.load import Table
from slipstream.wire.settings.sections import RunSection, relay_address, relay_lock, run_section

_log = logging.getLogger(__name__)
_CLOSE_S = 1.0  # for groups whose engines are gone
_BROKER_AGAIN_S = 5.0
_LOCK_POLL_S = 0.1
_LOCK_S = 2.0  # a relay that holds the lock this long without a sign of life is killed
_LOCK_END_S = 30.0
_MAX_RECORDS = 1_000  # kept while the broker is gone


class RelaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a relay."""

    run: RunSection
    weightbus: WeightBusSection

    @property
    def folder(self) -> Path:
        """Folder for versions of the disk transport."""
        if self.weightbus.folder:
            return Path(self.weightbus.folder).resolve() / self.run.name
        return self.run.folder.resolve() / "weights"


def relay_settings(table: Table) -> RelaySettings:
    """Decode and check the relay's sections."""
    return RelaySettings(run=run_section(table), weightbus=weightbus_section(table))


class Relay:
    """One relay, in one event loop."""

    def __init__(self, settings: RelaySettings, *, stop: asyncio.Event) -> None:
        """Create a relay; ``run`` serves.

        Args:
            settings: of the run.
            stop: ends the relay, which may also set it.
        """
        self._settings = settings
        self._stop = stop
        self._versions = Versions(settings.folder)
        self._records: deque[PublishRecord] = deque()  # not yet reported to the broker
        self._is_news = asyncio.Event()
        self._num_lost_records = 0
        self._heard_s = time.monotonic()  # last message of a learner
        self._started_s = time.monotonic()
        self._publisher = Publisher(
            settings.weightbus,
            self._versions,
            on_record=self._keep,
            libraries=installed_libraries(),
        )
        listen = settings.weightbus.listen
        self._remote = RemoteListener(listen) if listen else None

    async def run(self) -> None:
        """Serve until ``stop`` is set."""
        run = self._settings.run
        left = await asyncio.to_thread(copies_in, self._settings.folder)
        self._versions.first_copy = number_after(left)
        jobs = [
            self._remove_when_unread(left),
            self._serve_learner(run.endpoint("relay")),
            self._publisher.run(relay_address(run), self._remote),
            self._watch_learner(),
            self._report(),
        ]
        try:
            await run_until(self._stop.wait(), *jobs)
        finally:
            await self._versions.clean_disk(all_of_it=True)
            await asyncio.to_thread(remove_copies, left)

    async def _remove_when_unread(self, left: list[Path]) -> None:
        """Remove the copies on disk of earlier relays, once no engine can be reading them.

        A load that the last relay ordered takes weightbus.timeout_s at most.
        """
        await asyncio.to_thread(remove_copies, left, unfinished_only=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.weightbus.timeout_s):
                await self._stop.wait()
        await asyncio.to_thread(remove_copies, left)
        await self._stop.wait()

    # ---- the learner ---------------------------------------------------------

    async def _serve_learner(self, endpoint: str) -> None:
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 200)
        try:
            socket.bind(endpoint)
            while True:
                peer, *frames = await socket.recv_multipart()
                try:
                    answer = self._answer(decode_relay_request(b"".join(frames)))
                except SupersededError as error:
                    _log.warning("refused: %s", error)
                    answer = Ok(error=str(error), superseded=True)
                except (ProtocolError, PublishError) as error:
                    _log.warning("refused: %s", error)
                    answer = Ok(error=str(error), pid=os.getpid())
                await socket.send_multipart([peer, encode(answer)])
        finally:
            socket.close()
            context.term()

    def _answer(self, request: RelayRequest) -> RelayAnswer:
        self._heard_s = time.monotonic()
        match request:
            case OpenMemory():
                self._versions.open(request)
            case Reserve(epoch=epoch):
                return Reserved(slot=self._versions.reserve(epoch))
            case Written(epoch=epoch, version=written, slot=slot):
                self._versions.written(epoch, slot, written)
            case EndRelay(epoch=epoch):
                self._versions.refuse_older(epoch)
                _log.info("the learner stopped the relay")
                self._stop.set()
            case Alive():
                pass
        return Ok(pid=os.getpid())

    async def _watch_learner(self) -> None:
        """End the relay when no learner has sent anything for weightbus.linger_s."""
        linger_s = self._settings.weightbus.linger_s
        while (left_s := self._heard_s + linger_s - time.monotonic()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(left_s)
        _log.warning("no learner for %g s (weightbus.linger_s): the relay ends", linger_s)
        self._stop.set()

    # ---- the broker ----------------------------------------------------------

    async def _keep(self, record: PublishRecord) -> None:
        if len(self._records) == _MAX_RECORDS:
            self._num_lost_records += 1
            _log.error(
                "%d records of publishes are lost: the broker accepts none", self._num_lost_records
            )
            self._records.popleft()
        self._records.append(record)
        self._is_news.set()

    async def _report(self) -> None:
        """Report publishes and the states of members to the broker.

        Engines are served also without a broker.
        """
        while True:
            try:
                await self._report_to_broker()
            except SlipstreamError as error:
                _log.warning("%s; trying the broker again", error)
                await asyncio.sleep(_BROKER_AGAIN_S)

    async def _report_to_broker(self) -> None:
        run = self._settings.run
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
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._is_news.wait(), REPORT_EVERY_S)
                while self._records:
                    record = self._records[0]
                    await client.ask(PublishReport(record=record), Done)
                    if self._records and self._records[0] is record:
                        self._records.popleft()
                self._is_news.clear()
                remote = self._remote
                report = RelayReport(
                    members=self._publisher.states(), door=remote.address if remote else None
                )
                heard, _ = await client.ask(report, RelayHeard)
                if remote is not None:
                    remote.admit(heard.generator_keys)
                await client.ask(RoleReport(phase_seconds=self._phases(), counters={}), Done)
        finally:
            client.close()

    def _phases(self) -> dict[str, float]:
        """Return the seconds of each phase; CPU time of the process counts as serving."""
        age_s = time.monotonic() - self._started_s
        busy_s = min(time.process_time(), age_s)
        return {"serve": busy_s, WAIT: age_s - busy_s}


@contextlib.contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """Hold the lock of the run's only relay; a holder that hangs is killed.

    Raises:
        ConfigError: another relay holds the lock and does not end.
    """
    with path.open("a+") as file:
        signs = signs_of(lambda: _holder(path))
        waited = Patience("the previous relay to end", _LOCK_S, signs, at_most=END_AT_MOST)
        killed: Patience | None = None
        while not _is_ours(file):
            if killed is None and waited.is_over():
                for holder in _holder(path):
                    _log.warning("killing relay %d of this run, which hangs", holder)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(holder, signal.SIGKILL)
                killed = Patience("the previous relay to be gone", _LOCK_END_S)
            if killed is not None and killed.is_over():
                raise ConfigError(f"another relay of this run holds {path}")
            time.sleep(_LOCK_POLL_S)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _is_ours(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(path: Path) -> list[int]:
    """Return the process id in the lock file, if there is one."""
    words = path.read_text().strip()
    return [int(words)] if words.isdecimal() else []


def _is_cut(lifeline: int | None) -> bool:
    return lifeline is not None and bool(select.select([lifeline], [], [], 0)[0])


async def _serve(settings: RelaySettings, lifeline: int | None) -> None:
    stop = stop_event()
    if lifeline is not None:
        loop = asyncio.get_running_loop()

        def cut() -> None:
            loop.remove_reader(lifeline)
            stop.set()

        loop.add_reader(lifeline, cut)
    await Relay(settings, stop=stop).run()


def main() -> int:
    """Parse, check, run."""
    parser = role_parser(
        "slipstream.weightbus.relay.main",
        "Send the learner's weights to the engines; start-learner starts this process.",
        ["python -m slipstream.weightbus.relay.main --config run.toml"],
    )
    parser.add_argument("--replay", help="of start-learner; ignored")
    parser.add_argument("--resume", help="of start-learner; ignored")
    parser.add_argument("--lifeline", type=int, help="descriptor whose end of file ends the relay")
    arguments = parser.parse_args()
    try:
        settings = relay_settings(load_arguments(arguments))
    except ConfigError as error:
        return refuse_settings(error)
    start_logging("relay")

    def body() -> int:
        if _is_cut(arguments.lifeline) or not settings.run.socket_folder.is_dir():
            return 0  # the parent or the run has ended meanwhile
        variables = interface_variables(settings.weightbus.host, os.environ)  # noqa: TID251
        os.environ.update(variables)  # noqa: TID251 gloo and NCCL have no setting
        gc.freeze()  # imported modules stay: collecting them would delay a publish
        with _only_one(relay_lock(settings.run)):
            asyncio.run(_serve(settings, arguments.lifeline))
            if not are_done(_CLOSE_S):
                logging.shutdown()
                os._exit(0)
        return 0

    return run_role(body)


if __name__ == "__main__":
    raise SystemExit(main())
