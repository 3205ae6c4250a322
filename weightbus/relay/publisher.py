"""The relay's side of the weight bus: brings every engine that joined to the newest version.

fleet.py and publish_state.py decide the next phase and its members; this module waits and sends.
"""

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import zmq
import zmq.asyncio

from slipstream.broker.listening.gate import limit_of
from slipstream.broker.listening.router import ListeningRouter
from slipstream.weightbus.config import WeightBusSection
from slipstream.weightbus.net.compatibility import Libraries
from slipstream.weightbus.net.curve import (
    MAX_BYTES,
    MAX_WAITING,
    RemoteListener,
    num_connections,
    proved,
)
from slipstream.weightbus.net.router import MessageRouter
from slipstream.weightbus.net.traffic import Traffic
from slipstream.weightbus.relay.bulk import serve_buckets
from slipstream.weightbus.relay.chain import Chains, may_be_source
from slipstream.weightbus.relay.deltas import Deltas
from slipstream.weightbus.relay.fleet import CollectiveGroup, Fleet, Seat, Serving
from slipstream.weightbus.relay.host_sharing import HostSharing
from slipstream.weightbus.relay.learner_parts import Parts
from slipstream.weightbus.relay.member import PROBE_S, Member
from slipstream.weightbus.relay.served import VersionReading, Versions
from slipstream.weightbus.relay.transaction import Transaction
from slipstream.weightbus.relay.transports.base import Transport, transport_class
from slipstream.weightbus.transports import FALLBACK, TRANSPORTS, TransportEntry
from slipstream.wire.errors import ProtocolError, PublishError
from slipstream.wire.messages.codec import decode_agent_message, decode_part_report, encode
from slipstream.wire.messages.part_relays import HeadCommand
from slipstream.wire.messages.pieces import joined_message
from slipstream.wire.messages.weightbus import (
    Admit,
    AgentMessage,
    BulkDoor,
    CommandOutcome,
    Join,
    JoinAcknowledged,
    Leave,
    MemberState,
    PublishRecord,
    RelayAddress,
)
from slipstream.wire.process.rate_limited_log import RateLimitedLog

_log = logging.getLogger(__name__)
_malformed = RateLimitedLog(_log)
_RETRY_S = 1.0
_WATCH_S = 1.0
_MAX_MEMBERS = 10_000
_SHARE = 1 / 16  # share of the descriptors for each of the two sockets on this host
_MAX_PROBES = 200  # sent at a time: bounds the cost of slow members


class MessageOrigin(NamedTuple):
    """Origin of a message."""

    peer: bytes  # routing id
    router: MessageRouter
    prefix: str  # prefix of its engines' names
    key: str  # key that it proved; empty on this host


class Publisher:
    """Serves the newest version to every engine that joined. Use it in one event loop."""

    def __init__(
        self,
        settings: WeightBusSection,
        versions: Versions,
        *,
        on_record: Callable[[PublishRecord], Awaitable[None]],
        libraries: Libraries,
        transports: Mapping[str, TransportEntry] = TRANSPORTS,
        parts: Parts | None = None,
        traffic: Traffic | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without members; ``parts`` are given if the learner spans hosts."""
        self._settings = settings
        self._versions = versions
        self._on_record = on_record
        self._libraries = libraries
        self._transports = transports
        self._classes = {name: transport_class(entry) for name, entry in transports.items()}
        self._states = {
            name: chosen.relay_state(settings, versions.folder)
            for name, chosen in self._classes.items()
        }
        self._deltas = Deltas(versions, settings)
        self._now = now
        self._parts = parts
        self._incarnation = secrets.token_hex(8) if parts is None else parts.relay
        self._heard = encode(JoinAcknowledged(relay=self._incarnation))
        self._members: dict[str, Member] = {}
        self._by_place: dict[tuple[MessageRouter, bytes], Member] = {}
        self._num_events = 0  # events that may make another serving due
        self._waits_because = ""  # last reason that a part did not keep a version
        self._is_starved = False  # a serving was due, and no version could be read
        self._probed = 0  # position of the next late member to probe
        self._fleet = Fleet(
            silence_s=settings.member_silence_s,
            retry_s=_RETRY_S,
            engines_per_group=settings.engines_per_group,
        )
        self.traffic = traffic or Traffic()
        self._chains = Chains(settings.fanout)
        self._sharing = HostSharing(limit_s=settings.receive_timeout_s, now=now)
        self._turns = itertools.count()
        self._closing: list[Member] = []  # members that still admit a former successor
        self._near: BulkDoor | None = None
        self._remote: RemoteListener | None = None
        self._alone: dict[Seat, asyncio.Task[None]] = {}
        self._shared: dict[CollectiveGroup, Transport] = {}

    async def run(self, address: RelayAddress, remote: RemoteListener | None = None) -> None:
        """Serve until cancelled: at Unix sockets in a private folder, other hosts at ``remote``.

        Raises:
            ConfigError: an address cannot be bound.
        """
        is_far = remote is not None
        context = zmq.asyncio.Context(
            io_threads=num_connections(self._settings.connections, is_far=is_far)
        )
        self._near = BulkDoor(endpoint=address.bulk_endpoint)
        self._remote = remote
        routers: list[ListeningRouter[zmq.asyncio.Socket]] = []
        pairs: list[tuple[zmq.asyncio.Socket, zmq.asyncio.Socket, RemoteListener | None]] = []
        try:
            for endpoint, option, value in (
                (address.endpoint, zmq.ROUTER_MANDATORY, 1),
                (address.bulk_endpoint, zmq.SNDHWM, MAX_WAITING),
            ):
                routers.append(_near_router(context, endpoint, option, value))
            pairs.append((routers[0].socket, routers[1].socket, None))
            if remote is not None:
                pairs.append((*remote.open(context), remote))
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch(remote))
                if self._parts is not None and remote is not None:
                    group.create_task(self._admit_parts(self._parts, remote))
                group.create_task(self._serve_due(group))
                group.create_task(self._deltas.run())
                for state in self._states.values():
                    group.create_task(state.run())
                for socket, bulk, checks in pairs:
                    served = serve_buckets(bulk, self._versions, self._deltas, checks, self.traffic)
                    group.create_task(served)
                    group.create_task(self._listen(socket, checks))
                group.create_task(self._probe())
        finally:
            for member in list(self._members.values()):
                self._forget(member, "is left: the relay ends")
            for shared in list(self._shared):
                self._dissolve(shared)
            if remote is not None:
                remote.close()
            for router in routers:
                router.close()
            context.term()
            for state in self._states.values():
                await state.close()

    def states(self) -> list[MemberState]:
        """Return the state of each member, sorted by name."""
        newest = self._versions.newest
        return [
            MemberState(
                name=name,
                state=member.state(newest),
                version=member.adopted,
                since_s=member.since_s,
                transport=member.transport,
                reason=member.failure,
            )
            for name, member in sorted(self._members.items())
        ]

    # ---- membership ----------------------------------------------------------

    async def _listen(self, socket: zmq.asyncio.Socket, listener: RemoteListener | None) -> None:
        router = MessageRouter(socket)

        def take(received: list[zmq.Frame]) -> None:
            peer, *frames = received
            key = proved(peer) if listener is not None else ""
            part = listener.part_of(key) if listener is not None else None
            if listener is not None and part is not None:
                self._take_report(part, peer.bytes, router, listener, frames)
                return
            if listener is not None and listener.name_of(key) is None:
                return  # its key was revoked; _watch logs that
            prefix = (
                f"{listener.name_of(key)}/" if listener is not None else ""
            )  # the broker uses the same names
            try:
                message = decode_agent_message(_message(frames))
            except ProtocolError as error:
                _malformed.say("malformed message on the weight bus: %s", error)
                return
            self._take(MessageOrigin(peer.bytes, router, prefix, key), message)

        await router.run(take)

    def _take_report(
        self,
        part: int,
        peer: bytes,
        router: MessageRouter,
        listener: RemoteListener,
        frames: Sequence[zmq.Frame],
    ) -> None:
        if self._parts is None:
            return

        def send(command: HeadCommand) -> None:
            try:
                router.send(peer, encode(command))
            except zmq.ZMQError as error:  # ROUTER_MANDATORY
                raise PublishError(f"part {part} has gone") from error

        try:
            report = decode_part_report(_message(frames))
            self._parts.take(
                part,
                report,
                send,
                peer=peer,
                generator_keys=listener.holders,
                heard=lambda state: self._versions.heard(state, self._now()),
            )
        except (ProtocolError, PublishError) as error:
            _log.warning("a report of part %d of the learner: %s", part, error)

    def _take(self, sender: MessageOrigin, message: AgentMessage) -> None:
        member = self._by_place.get((sender.router, sender.peer))
        match message:
            case Join():
                self._joined(sender, message)
                with suppress(zmq.ZMQError):  # the agent is gone
                    sender.router.send(sender.peer, self._heard)
            case Leave(name=name):
                if member is not None and member.name == sender.prefix + name:
                    self._forget(member, "left")
            case CommandOutcome():
                if member is not None:
                    member.take(message)

    def _joined(self, sender: MessageOrigin, join: Join) -> None:
        peer, name = sender.peer, sender.prefix + join.name
        known = self._members.get(name)
        there = self._by_place.get((sender.router, peer))
        if there is not None and there is not known:  # a connection belongs to one member
            self._forget(there, f"is {name} now")
        if known is not None and known.join.incarnation == join.incarnation:
            if known.peer != peer:
                del self._by_place[known.place]
                known.peer = peer
                self._by_place[known.place] = known
            known.heartbeat(join)
            before = self._fleet.seats[name].adopted
            self._fleet.heartbeat(name, join.adopted, self._now())
            if self._fleet.seats[name].adopted != before:
                self._decide()
            return
        if known is not None:
            self._forget(known, "restarted")
        if len(self._members) >= _MAX_MEMBERS:
            _log.error("%s is refused: %d engines are on the weight bus", name, _MAX_MEMBERS)
            return
        transport = self._transport_for(join, name, is_far=bool(sender.key))
        shares = bool(sender.key and join.host) and transport == FALLBACK
        member = Member(
            peer,
            join,
            sender.router,
            name=name,
            relay=self._incarnation,
            key=sender.key,
            transport=transport,
            timeout_s=self._settings.timeout_s,
            bulk=self._bulk_door(is_far=bool(sender.key)),
            traffic=self.traffic,
            host=f"{sender.key} {join.host}" if shares else "",  # no trust in other keys' engines
            sharing=self._sharing,
        )
        self._sharing.join(member.on_host)
        _log.info("%s joined the weight bus (%s)", name, member.transport)
        if self._parts is not None and self._remote is not None and sender.key:
            self._parts.tell(self._remote.holders)  # the engine fetches from the parts next
        self._members[name] = self._by_place[member.place] = member
        seat = Seat(
            name,
            member.transport,
            join.device,
            join.adopted,
            last_message_s=self._now(),
            shares_group=self._classes[member.transport].shares_group,
        )
        self._fleet.join(seat)
        self._decide()

    def _bulk_door(self, *, is_far: bool) -> BulkDoor | None:
        """Return this relay's door for a member that fetches buckets."""
        if not is_far:
            return self._near
        return self._remote.door if self._remote is not None else None

    def _transport_for(self, join: Join, name: str, *, is_far: bool) -> str:
        """Return the transport of a member: the requested one, or the fallback."""
        entry = self._transports.get(join.transport)
        if entry is None:
            why = f"this relay has no such transport, only {', '.join(self._transports)}"
        else:
            why = entry.why_not_from_afar(self._settings.host) if is_far else ""
            why = why or self._classes[join.transport].why_not(join, self._libraries)
            if self._parts is not None and not entry.serves_parts:
                why = (
                    "the learner is on several hosts, each of which keeps a part of every version "
                    "(weightbus.parts)"
                )
        if why:
            _log.warning(
                "%s gets its weights over %s instead of %s: %s", name, FALLBACK, join.transport, why
            )
        return FALLBACK if why else join.transport

    def _forget(self, member: Member, why: str) -> None:
        _log.info("%s %s", member.name, why)
        del self._members[member.name], self._by_place[member.place]
        if (task := self._alone.pop(self._fleet.seats[member.name], None)) is not None:
            task.cancel()
        self._dissolve(self._fleet.forget(member.name))
        self._chains.leave(member.name)
        self._leave_chain(member)
        self._sharing.leave(member.on_host)
        member.leave(why)

    async def _watch(self, remote: RemoteListener | None) -> None:
        """Forget silent members and those with a revoked key, even while they are served."""
        while True:
            await asyncio.sleep(_WATCH_S)
            if self._parts is not None:
                for part in self._versions.lost_parts(self._now()):
                    self._parts.lost(part)
            for name in self._fleet.silent(self._now()):
                self._forget(
                    self._members[name], f"was silent for {self._settings.member_silence_s:g} s"
                )
            for member in [m for m in self._members.values() if m.key]:
                if remote is not None and remote.name_of(member.key) is None:
                    self._forget(member, "is left: its key was revoked")
            self._close_doors()

    async def _admit_parts(self, parts: Parts, remote: RemoteListener) -> None:
        """Admit the parts of the newest learner as soon as it names them: a refused part waits."""
        while True:
            changed, keys = self._versions.changed, self._versions.part_keys
            remote.admit_parts(keys)
            parts.expected = len(keys)
            await changed.wait()

    async def _probe(self) -> None:
        """Notice agents that are gone while their outcome is awaited, in turns.

        Neither NCCL nor a command notices that a process has ended.
        """
        while True:
            await asyncio.sleep(PROBE_S)
            now_s = time.monotonic()
            late = [member for member in self._members.values() if member.is_overdue(now_s)]
            self._probed = self._probed % len(late) if late else 0
            turn = (late[self._probed :] + late[: self._probed])[:_MAX_PROBES]
            self._probed += len(turn)
            for member in turn:
                member.probe()

    # ---- publishes -----------------------------------------------------------

    def _decide(self) -> None:
        """Ask the fleet again: something has changed that its decisions depend on."""
        self._num_events += 1
        self._versions.wake()

    async def _serve_due(self, group: asyncio.TaskGroup) -> None:
        """Start the servings that are due, whenever something has changed."""
        while True:
            changed = self._versions.changed
            decided = self._num_events, self._versions.newest
            now = self._now()
            self._is_starved = False
            for serving in self._fleet.due(self._versions.newest, now):
                if (reading := self._versions.read()) is None:
                    self._is_starved = True
                    break  # two others are being read; the end of one wakes this loop
                self._start(serving, reading, group)
            with suppress(TimeoutError):  # not wait_for, which can swallow a cancellation
                async with asyncio.timeout(self._fleet.wait_s(now)):
                    while True:
                        await changed.wait()
                        if self._is_starved or decided != (self._num_events, self._versions.newest):
                            break
                        changed = self._versions.changed  # a reading ended that no serving awaits

    def _start(self, serving: Serving, reading: VersionReading, group: asyncio.TaskGroup) -> None:
        self._fleet.started(serving)
        members = [self._members[seat.name] for seat in serving.seats]
        for member in members:
            is_alone = bool(member.failure) or reading.publication.has_adapters
            self._sharing.begin(member.on_host, serving.version, is_alone=is_alone)
        task = group.create_task(self._serve(serving, members, reading))
        task.add_done_callback(lambda _: reading.end())  # the task may be cancelled before it runs
        if serving.group is None:
            self._alone[serving.seats[0]] = task

    def _place(self, member: Member, serving: Serving, reading: VersionReading) -> None:
        """Choose a member's source of a version that every part keeps."""
        self._leave_chain(member)
        member.before = self._before(member, serving, reading)
        if member.before is not None:
            member.first_part = member.before.first_part
        else:
            member.first_part = next(self._turns)  # members begin with different hosts

    def _before(self, member: Member, serving: Serving, reading: VersionReading) -> Member | None:
        """Return the member that serves another with a version; None for the relay.

        Members of a chain are on other hosts, offer a door, and fetch.
        """
        is_repair = bool(member.failure)
        if serving.group is not None or reading.publication.has_adapters:
            return None
        if is_repair or not member.key or not may_be_source(member.join.forward):
            return None
        if not self._sharing.fetches(member.on_host):
            return None
        name = self._chains.place(serving.version, member.name)
        return self._members.get(name) if name is not None else None

    def _leave_chain(self, member: Member) -> None:
        """Take a member out of its chain: the member before it stops serving it."""
        before, member.before = member.before, None
        if before is not None and before.serves is member:
            before.serves = None
            self._closing.append(before)

    def _close_doors(self) -> None:
        """Tell members whose successors have left to serve no other."""
        closing, self._closing = self._closing, []
        for member in closing:
            if member.serves is None and (newest := self._versions.newest) is not None:
                with suppress(PublishError):  # the member is gone; its outcome does not matter
                    member.send(lambda n: Admit(command_id=n, version=newest, keys=()))

    async def _serve(
        self, serving: Serving, members: list[Member], reading: VersionReading
    ) -> None:
        """Bring members to a version; report the results in a record and to the fleet."""
        group = serving.group
        try:
            name = serving.seats[0].transport
            if group is None:
                transport = self._open(FALLBACK if self._classes[name].shares_group else name)
            else:
                transport = self._shared.get(group) or self._open(name)
                self._shared[group] = transport
            check_every = self._settings.engine_check_every
            if self._parts is not None and not await self._is_held(reading):
                self._alone.pop(serving.seats[0], None)
                self._end_sharing(members)
                self._fleet.postponed(serving, self._now())
                self._decide()
                return
            for member in members:
                self._place(member, serving, reading)
            record = await Transaction(reading.publication, members, transport, check_every).run()
            self._alone.pop(serving.seats[0], None)
            self._end_sharing(members)
            self._dissolve(self._fleet.finished(serving, record.adopted_by, self._now()))
            if group is not None or record.failed or serving.version != self._versions.newest:
                self._decide()
        finally:
            await asyncio.shield(reading.end())
        for name, reason in record.failed.items():
            self._chains.leave(name)
            _log.warning("%s does not run %s: %s", name, record.version.label, reason)
        await self._on_record(record)
        wanted = self._versions.wanted()
        for state in self._states.values():
            await state.keep(wanted)

    def _end_sharing(self, members: Sequence[Member]) -> None:
        """Record the end of a serving before another can begin; a cancelled one's members left."""
        for member in members:
            self._sharing.end(member.on_host)

    async def _is_held(self, reading: VersionReading) -> bool:
        """True if every part of the learner keeps the version: no engine is touched before."""
        try:
            await reading.publication.manifest()
        except PublishError as error:
            if self._waits_because != str(error):
                self._waits_because = str(error)
                _log.warning("%s waits: %s", reading.publication.version.label, error)
            return False
        self._waits_because = ""
        return True

    def _open(self, name: str) -> Transport:
        return self._classes[name](self._settings, self._states[name])

    def _dissolve(self, group: CollectiveGroup | None) -> None:
        if group is not None and (transport := self._shared.pop(group, None)) is not None:
            transport.close_soon()


def _near_router(
    context: zmq.asyncio.Context, endpoint: str, option: int, value: int
) -> ListeningRouter[zmq.asyncio.Socket]:
    """Listen at a Unix socket with one option set."""
    return ListeningRouter(
        context,
        endpoint,
        setting="run.socket_dir",
        limit=limit_of(_SHARE),
        prepare=lambda socket: socket.setsockopt(option, value),
    )


def _message(frames: Sequence[zmq.Frame]) -> bytes:
    return joined_message([frame.buffer for frame in frames], most_bytes=MAX_BYTES)
