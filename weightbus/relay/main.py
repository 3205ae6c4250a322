"""The weight relay: serves the learner's versions to the engines, and outlives the learner.

A process that the learner starts: ``python -m slipstream.weightbus.relay.main --config RUN.toml``.
It ends at the learner's request, when its lifeline is cut, or without a learner for
weightbus.linger_s.
"""

import asyncio
import gc
import logging
import os
import secrets
import select
from pathlib import Path

import msgspec

from slipstream.weightbus.config import WeightBusSection, weightbus_section
from slipstream.weightbus.net.compatibility import installed_libraries
from slipstream.weightbus.net.curve import RemoteListener
from slipstream.weightbus.net.interfaces import interface_variables
from slipstream.weightbus.net.proofs import DoorRefusals
from slipstream.weightbus.net.threads import are_done
from slipstream.weightbus.net.traffic import Traffic
from slipstream.weightbus.relay.deltas import Deltas
from slipstream.weightbus.relay.learner_parts import Parts
from slipstream.weightbus.relay.learner_socket import LearnerSocket
from slipstream.weightbus.relay.lock import only_relay
from slipstream.weightbus.relay.part import PartRelay
from slipstream.weightbus.relay.publisher import Publisher
from slipstream.weightbus.relay.reports import BrokerReports
from slipstream.weightbus.relay.served import Versions
from slipstream.wire.errors import ConfigError
from slipstream.wire.process.command_line import (
    load_arguments,
    log_settings,
    print_json,
    refuse_settings,
    role_parser,
    run_role,
)
from slipstream.wire.process.logs import start_logging
from slipstream.wire.process.processes import raise_descriptor_limit
from slipstream.wire.process.run_until import run_until
from slipstream.wire.process.stopping import stop_event
from slipstream.wire.settings.load import Table
from slipstream.wire.settings.sections import (
    RunSection,
    part_name,
    relay_address,
    relay_lock,
    run_section,
)

_log = logging.getLogger(__name__)
_CLOSE_S = 1.0  # wait for groups whose engines are gone
_LEAST_DESCRIPTORS = 256  # an engine on another host takes five connections


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
    """One relay that runs transactions, in one event loop: the head if there are parts."""

    def __init__(self, settings: RelaySettings, *, stop: asyncio.Event, parts: int = 1) -> None:
        """Create a relay; ``run`` serves until ``stop``, which the relay may also set.

        ``parts`` counts the hosts of the learner that keep tensors.
        """
        self._settings = settings
        bus = settings.weightbus
        others: Parts | None = None
        if parts > 1:
            others = Parts(
                relay=secrets.token_hex(8),
                timeout_s=bus.timeout_s,
                hash_timeout_s=bus.receive_timeout_s,
            )
        versions = Versions(
            settings.folder, parts=others, silence_s=bus.member_silence_s, digests=bus.digest_kind
        )
        self._stop = stop
        traffic = Traffic()
        self._reports = BrokerReports(settings.run, traffic)
        self._publisher = Publisher(
            bus,
            versions,
            on_record=self._reports.keep,
            libraries=installed_libraries(),
            parts=others,
            traffic=traffic,
        )
        self._remote = listener_of(bus, traffic) if bus.listen else None
        self._learner = LearnerSocket(
            versions,
            stop=stop,
            linger_s=bus.linger_s,
            door=lambda: self._remote.address if self._remote is not None else None,
        )

    async def run(self) -> None:
        """Serve until ``stop`` is set."""
        run = self._settings.run
        jobs = [
            self._learner.serve(run.endpoint("relay")),
            self._publisher.run(relay_address(run), self._remote),
            self._learner.watch(),
            self._reports.run(self._publisher.states, self._remote),
        ]
        await run_until(self._stop.wait(), *jobs)


def listener_of(bus: WeightBusSection, traffic: Traffic) -> RemoteListener:
    """Return this relay's listener for other hosts; ``traffic`` counts refusals."""
    return RemoteListener(bus.listen, is_plain=bus.bulk == "plain", refusals=DoorRefusals(traffic))


async def _serve_part(settings: RelaySettings, part: int, stop: asyncio.Event) -> None:
    bus = settings.weightbus
    traffic = Traffic()
    listener = listener_of(bus, traffic)
    versions = Versions(settings.folder, digests=bus.digest_kind)
    deltas = Deltas(versions, bus, holds=False)
    relay = PartRelay(
        part, versions, listener, deltas, stop=stop, linger_s=bus.linger_s, traffic=traffic
    )
    await relay.run(settings.run.endpoint(part_name(part)))


async def _serve(settings: RelaySettings, lifeline: int | None, *, part: int, parts: int) -> None:
    stop = stop_event()
    if lifeline is not None:
        loop = asyncio.get_running_loop()

        def cut() -> None:
            loop.remove_reader(lifeline)
            stop.set()

        loop.add_reader(lifeline, cut)
    if part:
        await _serve_part(settings, part, stop)
    else:
        await Relay(settings, stop=stop, parts=parts).run()


def main() -> int:
    """Parse, check, run."""
    parser = role_parser(
        "slipstream.weightbus.relay.main",
        "Send the learner's weights to the engines; start-learner starts this process.",
        ["python -m slipstream.weightbus.relay.main --config run.toml"],
    )
    parser.add_argument("--lifeline", type=int, help="descriptor whose end of file ends the relay")
    parser.add_argument("--part", type=int, default=0, help="number of this host of the learner")
    parser.add_argument("--parts", type=int, default=1, help="hosts of the learner with tensors")
    parser.add_argument("--settings-digest", help="of [weightbus], for a later learner to see")
    arguments = parser.parse_args()
    try:
        table = load_arguments(arguments)
        settings, logs = relay_settings(table), log_settings(table)
    except ConfigError as error:
        return refuse_settings(error, arguments)
    if arguments.dry_run:
        return print_json(settings)
    part: int = arguments.part
    start_logging(part_name(part) if part else "relay", logs)

    def body() -> int:
        lifeline = arguments.lifeline
        is_cut = lifeline is not None and select.select([lifeline], [], [], 0)[0]
        if is_cut or not settings.run.socket_folder.is_dir():
            return 0  # the parent or the run has ended meanwhile
        raise_descriptor_limit(_LEAST_DESCRIPTORS)
        variables = interface_variables(settings.weightbus.host, os.environ)  # noqa: TID251
        os.environ.update(variables)  # noqa: TID251 gloo and NCCL have no setting
        gc.freeze()  # imported modules stay; scanning them would delay a publish
        with only_relay(relay_lock(settings.run, part)):
            asyncio.run(_serve(settings, lifeline, part=part, parts=arguments.parts))
            if not are_done(_CLOSE_S):
                logging.shutdown()
                os._exit(0)
        return 0

    return run_role(body)


if __name__ == "__main__":
    raise SystemExit(main())
