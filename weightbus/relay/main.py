"""The weight relay: serves the learner's versions to the engines, and outlives the learner.

A process that the learner starts: ``python -m slipstream.weightbus.relay.main --config RUN.toml``.
It ends at the learner's request, when its lifeline is cut, or without a learner for
weightbus.linger_s.
"""

import asyncio
import gc
import logging
import os
import select
import time
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from slipstream.weightbus.config import WeightBusSection, weightbus_section
from slipstream.weightbus.net.compatibility import installed_libraries
from slipstream.weightbus.net.curve import RemoteListener
from slipstream.weightbus.net.interfaces import interface_variables
from slipstream.weightbus.net.threads import are_done
from slipstream.weightbus.net.traffic import Traffic
from slipstream.weightbus.relay.lock import only_relay
from slipstream.weightbus.relay.publisher import Publisher
from slipstream.weightbus.relay.reports import BrokerReports
from slipstream.weightbus.relay.served import Versions
from slipstream.wire.errors import ConfigError, ProtocolError, PublishError, SupersededError
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
from slipstream.wire.process.command_line import (
    load_arguments,
    print_json,
    refuse_settings,
    role_parser,
    run_role,
)
from slipstream.wire.process.logs import start_logging
from slipstream.wire.process.run_until import run_until
from slipstream.wire.process.stopping import stop_event
from slipstream.wire.settings.load import Table
from slipstream.wire.settings.sections import RunSection, relay_address, relay_lock, run_section

_log = logging.getLogger(__name__)
_CLOSE_S = 1.0  # for groups whose engines are gone


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
        """Create a relay; ``run`` serves until ``stop``, which the relay may also set."""
        self._settings = settings
        self._stop = stop
        self._versions = Versions(settings.folder, digests=settings.weightbus.digests)
        self._last_message_s = time.monotonic()  # last message of a learner
        traffic = Traffic()
        self._reports = BrokerReports(settings.run, traffic)
        self._publisher = Publisher(
            settings.weightbus,
            self._versions,
            on_record=self._reports.keep,
            libraries=installed_libraries(),
            traffic=traffic,
        )
        listen = settings.weightbus.listen
        self._remote = RemoteListener(listen) if listen else None

    async def run(self) -> None:
        """Serve until ``stop`` is set."""
        run = self._settings.run
        jobs = [
            self._serve_learner(run.endpoint("relay")),
            self._publisher.run(relay_address(run), self._remote),
            self._watch_learner(),
            self._reports.run(self._publisher.states, self._remote),
        ]
        await run_until(self._stop.wait(), *jobs)

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
        self._last_message_s = time.monotonic()
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
        while (left_s := self._last_message_s + linger_s - time.monotonic()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(left_s)
        _log.warning("no learner for %g s (weightbus.linger_s): the relay ends", linger_s)
        self._stop.set()


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
    parser.add_argument("--lifeline", type=int, help="descriptor whose end of file ends the relay")
    arguments = parser.parse_args()
    try:
        settings = relay_settings(load_arguments(arguments))
    except ConfigError as error:
        return refuse_settings(error)
    if arguments.dry_run:
        return print_json(settings)
    start_logging("relay")

    def body() -> int:
        lifeline = arguments.lifeline
        is_cut = lifeline is not None and select.select([lifeline], [], [], 0)[0]
        if is_cut or not settings.run.socket_folder.is_dir():
            return 0  # the parent or the run has ended meanwhile
        variables = interface_variables(settings.weightbus.host, os.environ)  # noqa: TID251
        os.environ.update(variables)  # noqa: TID251 gloo and NCCL have no setting
        gc.freeze()  # imported modules stay: collecting them would delay a publish
        with only_relay(relay_lock(settings.run)):
            asyncio.run(_serve(settings, lifeline))
            if not are_done(_CLOSE_S):
                logging.shutdown()
                os._exit(0)
        return 0

    return run_role(body)


if __name__ == "__main__":
    raise SystemExit(main())
