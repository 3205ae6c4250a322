"""Whatever a client sends: the broker counts it, forgets it, and keeps serving.

The broker is real and keeps its store in memory; clients are bare sockets that sent a hello in
every role, or in none. What is malformed, forbidden or of a stranger must leave the ledger as it
is, byte for byte. What is damaged and still allowed must leave it in balance.
"""

import asyncio
import gc
import logging
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import get_args

import msgspec
import psutil
import pytest
import zmq
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from zmq.auth.asyncio import AsyncioAuthenticator

from slipstream.broker.client import BrokerClient
from slipstream.broker.ledger.commands import Ledger
from slipstream.broker.ledger.scoring_queue import ScoringQueue
from slipstream.broker.ledger.state import encode_state
from slipstream.broker.report import publishes
from slipstream.broker.server import sessions
from slipstream.broker.server.keyring import KeyRing, broker_key, make_client_key
from slipstream.broker.server.limits import ServerRules
from slipstream.broker.server.loop import BrokerServer
from slipstream.broker.store.group_commit import GroupCommitter
from slipstream.wire.errors import ProtocolError
from slipstream.wire.files.image_folder import ImageFolder
from slipstream.wire.messages.broker import (
    BatchDelivered,
    Done,
    FetchImage,
    FetchPayloads,
    GetStatus,
    GroupsLeased,
    Heartbeat,
    Hello,
    LeaseGroups,
    LeaseScoring,
    Refusal,
    ReleaseLease,
    Request,
    RequestBatch,
    Role,
    ScoringLeased,
    StatusAnswer,
    StepCommit,
    StepCommitted,
    StoreImage,
    SubmitScores,
    SubmitTrajectory,
    TakeOver,
    TookOver,
    Welcome,
)
from slipstream.wire.messages.codec import decode_answer, encode
from slipstream.wire.messages.images import digest_of
from slipstream.wire.messages.pieces import cut
from slipstream.wire.messages.trajectory import Score
from tests.support.fuzzing import MAX_MESSAGE_BYTES, Attacker, Frames, Mutator, verdict
from tests.support.ledger_driver import header, make_ledger, make_rules
from tests.support.memory_store import MemoryStore
from tests.support.running_broker import make_test_server
from tests.support.waiting import HANG_S, until_async
from tests.support.wire_samples import DECODERS, FAMILIES, REQUESTS

PROFILE = settings(
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
RANDOMS = st.randoms(use_true_random=True)
MAX_GROWTH_MB = 48  # of this process, which holds the broker, the clients and hypothesis
PER_BATCH = 100  # sequences
PARTNERS: tuple[Role | None, ...] = (*get_args(Role), *get_args(Role), None, None)


# ---- decoders ----------------------------------------------------------------


@pytest.mark.integration
@pytest.mark.parametrize("family", DECODERS)
def test_a_decoder_takes_a_message_or_raises_a_protocol_error(family: str):
    corpus = [(encode(sample), []) for samples in FAMILIES.values() for sample in samples.values()]
    outcomes: Counter[str] = Counter()

    @settings(PROFILE, max_examples=40)
    @given(random=RANDOMS)
    def decode_many(random: Random) -> None:
        mutator = Mutator(random, corpus)
        for _ in range(PER_BATCH):
            body = mutator.body()
            try:
                DECODERS[family](body)
            except ProtocolError:
                outcomes["refused"] += 1
            except BaseException as error:
                error.add_note(f"body: {body[:400].hex()}")
                raise
            else:
                outcomes["taken"] += 1

    decode_many()
    assert outcomes["refused"] >= 2_000


# ---- a broker and its attackers ----------------------------------------------


@dataclass(slots=True)
class Fuzzed:
    """A broker in this process."""

    server: BrokerServer
    ledger: Ledger
    scoring: ScoringQueue
    store: MemoryStore
    unix: str
    tasks: list["asyncio.Task[None]"]
    faults: list[dict[str, object]] = field(default_factory=list)  # that reached the event loop

    @property
    def rejected(self) -> Counter[str]:
        return self.server.telemetry.rejected

    def assert_well(self) -> None:
        assert not self.faults, self.faults[0]
        assert not any(task.done() for task in self.tasks), "the broker's loop ended"
        assert self.rejected["internal"] == 0
        assert self.ledger.book.unaccounted() == 0
        encode_state(self.ledger.book.state)
        groups = self.ledger.book.groups
        unscored = {(i, sibling) for i, group in groups.items() for sibling in group.unscored}
        queue = self.scoring
        assert {*queue._waiting, *queue._lease_of} == unscored, "the scoring queue is another"
        assert set(queue._failures) <= unscored
        assert set(queue._lapsed) <= unscored
        assert set(self.server.report._issued_at) <= set(groups)
        assert {key[0] for key in self.server.frames._frames} <= set(groups)

    def sizes(self) -> dict[str, int]:
        server = self.server
        return {
            "sessions": len(server._sessions._by_token),
            "names": len(server._sessions._by_name),
            "readers": len(server._sessions._readers),
            "roles": len(server.telemetry._roles),
            "packages": len(server.telemetry.versions),
            "members": len(server.telemetry._members),
            "publishes": len(server.telemetry._publishes.records),
            "buckets": len(server._rate),
            "pending": len(server.pending),
            "jobs": sum(server._jobs_of.values()),
            "waiting": self.scoring.num_waiting + self.scoring.num_leased,
            "groups": len(self.ledger.book.groups),
            "state": len(encode_state(self.ledger.book.state)),
        }


MOST = {
    "sessions": sessions.MAX_CLIENTS,
    "names": sessions.MAX_CLIENTS,
    "readers": sessions.MAX_READERS,
    "roles": 4_096,
    "packages": 1_000,
    "members": publishes.MAX_MEMBERS,
    "publishes": publishes.MAX_PUBLISHES,
    "buckets": 4_096,
    "pending": 8_256,
    "jobs": 1_024,
    "waiting": 1_000,
    "groups": 1_000,
    "state": 4_000_000,
}


@asynccontextmanager
async def fuzzed(
    folder: Path, *, listens: bool = False, max_message_bytes: int = MAX_MESSAGE_BYTES
) -> AsyncIterator[Fuzzed]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    key, ring = None, None
    doorkeeper = AsyncioAuthenticator(context)
    if listens:
        key, ring = broker_key(folder / "keys"), KeyRing(folder / "keys")
        doorkeeper.start()
        doorkeeper.configure_curve_callback("slipstream", credentials_provider=ring)
    rules = make_rules(total_steps=1_000_000, replay_budget_bytes=1_000_000)
    ledger, store = make_ledger(rules), MemoryStore()
    ledger._terms._lease_s = 3_600.0  # what changes by itself would hide what a message changed
    scoring, committer = ScoringQueue(lease_s=3_600.0), GroupCommitter(store)
    limits = ServerRules(
        max_message_bytes=max_message_bytes,
        max_requests_per_s=1e6,
        scores_inline=True,
        cache_bytes=1 << 20,
    )
    images = ImageFolder(folder / "images", most_bytes=1_000_000)
    server = make_test_server(ledger, scoring, store, committer, limits, keys=ring, images=images)
    unix = f"ipc://{folder}/broker.sock"
    listen = "tcp://127.0.0.1:*" if listens else ""
    tasks = [
        asyncio.create_task(server.serve(context, unix, listen=listen, key=key)),
        asyncio.create_task(committer.run()),
    ]
    it = Fuzzed(server, ledger, scoring, store, unix, tasks)
    asyncio.get_running_loop().set_exception_handler(lambda _, what: it.faults.append(what))
    await until_async(lambda: len(server.addresses) == 1 + listens)
    try:
        yield it
        it.assert_well()
    finally:
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        if listens:
            doorkeeper.stop()
        context.term()


class Bare:
    """A DEALER socket that sends what it is given."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", unix: str, name: str) -> None:
        self.attacker = Attacker(None)
        self._name = name
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(unix)

    def send(self, frames: Sequence[bytes]) -> None:
        self._socket.send_multipart(frames, zmq.NOBLOCK)

    async def ask(self, frames: Sequence[bytes]) -> tuple[object, float]:
        """Send, and pass over all answers up to the one to this; return it and its seconds."""
        began = time.monotonic()
        self.send(frames)
        while time.monotonic() - began < HANG_S:
            try:
                got = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                await asyncio.sleep(0.0005)
                continue
            if got[0] == frames[0]:
                return decode_answer(got[1]), time.monotonic() - began
        raise TimeoutError(f"no answer to {frames[0]!r}")

    async def hello(self, role: Role) -> None:
        body = encode(Hello(role=role, name=self._name, incarnation="a"))
        answer, _ = await self.ask([b"hello", b"", body])
        assert isinstance(answer, Welcome), answer
        if self.attacker.session:
            self.attacker.others = [self.attacker.session, *self.attacker.others][:8]
        self.attacker.role, self.attacker.session = role, answer.session

    async def catch_up(self) -> float:
        """Return when the broker has done with all that this socket sent."""
        body = encode(GetStatus())
        _, seconds = await self.ask([b"probe", self.attacker.session, body])
        return seconds

    def close(self) -> None:
        self._socket.close()


class Siege:
    """Every role, twice, and two strangers."""

    def __init__(self, it: Fuzzed) -> None:
        self._it = it
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._bare = [
            Bare(self._context, it.unix, f"{role}-{at}") for at, role in enumerate(PARTNERS)
        ]
        self._honest = Bare(self._context, it.unix, "honest")
        self.sent: Counter[str] = Counter()
        self.slowest_s = 0.0

    async def begin(self) -> None:
        for bare, role in zip(self._bare, PARTNERS, strict=True):
            if role is not None:
                await bare.hello(role)
        sessions_ = [bare.attacker.session for bare in self._bare if bare.attacker.session]
        for bare in self._bare:
            old = [one for one in bare.attacker.others if one not in sessions_][:4]
            bare.attacker.others = [s for s in sessions_ if s != bare.attacker.session] + old

    async def attack(self, random: Random) -> None:
        """Send a hundred sequences: first what has to change nothing, then the others."""
        mutator = Mutator(random, corpus_of(self._it.ledger, random))
        harmless: list[tuple[Bare, Frames]] = []
        allowed: list[tuple[Bare, Frames]] = []
        expected: Counter[str] = Counter()
        for _ in range(PER_BATCH):
            bare = random.choice(self._bare)
            for whole in mutator.sequence(bare.attacker):
                frames = [bytes(piece) for piece in cut(whole)]  # larger ones end a connection
                what = verdict(frames, bare.attacker)
                expected[what] += 1
                (allowed if what == "allowed" else harmless).append((bare, frames))
        self.sent += expected
        self.sent["sequences"] += PER_BATCH
        await self._without_a_trace(harmless, expected)
        await self._send(allowed)
        await self.begin()  # some sent a hello as another client
        self._it.assert_well()
        await self._assert_serves()

    async def _without_a_trace(
        self, messages: list[tuple[Bare, Frames]], expected: Counter[str]
    ) -> None:
        it = self._it
        before, counted = encode_state(it.ledger.book.state), it.rejected.copy()
        roles = [bare.attacker.role for bare in self._bare]
        await self._send(messages)
        assert encode_state(it.ledger.book.state) == before, "a message that is no request acted"
        new = it.rejected - counted
        expected = +expected
        del expected["allowed"]
        expected["hello_first"] += roles.count(None)  # clients without a hello
        expected["forbidden"] += roles.count("relay") + roles.count("learner_part")  # ask no status
        assert new == +expected

    async def _send(self, messages: list[tuple[Bare, Frames]]) -> None:
        for bare, frames in messages:
            bare.send(frames)
        for bare in self._bare:
            self.slowest_s = max(self.slowest_s, await bare.catch_up())
        await until_async(lambda: not self._it.server._jobs_of)  # images are read in threads

    async def _assert_serves(self) -> None:
        if not self._honest.attacker.session:
            await self._honest.hello("generator")
        answer, _ = await self._honest.ask(
            [b"honest", self._honest.attacker.session, encode(GetStatus())]
        )
        if isinstance(answer, Refusal) and answer.code in {"hello_first", "superseded"}:
            await self._honest.hello("generator")  # somebody took its name
            return
        assert isinstance(answer, StatusAnswer), answer
        assert answer.status.unaccounted == 0

    def close(self) -> None:
        for bare in (*self._bare, self._honest):
            bare.close()
        self._context.term()


def corpus_of(ledger: Ledger, random: Random) -> list[tuple[bytes, Frames]]:
    """Return messages that mean something to this ledger as it is, beside all samples."""
    version = ledger.book.version
    live: list[Request] = [
        TakeOver(step=version.step),
        RequestBatch(version=version, step=version.step, wait_s=0.0),
        StepCommit(version=version.next(), metrics={"policy/loss": 0.5}),
        LeaseGroups(adopted=version, max_sequences=4, wait_s=0.0),
        LeaseScoring(credits=4, wait_s=0.0),
        Heartbeat(lease_ids=tuple(ledger.book.leases)[:4]),
        *(kind(digest=digest_of(b"image")) for kind in (StoreImage, FetchImage)),
        *(ReleaseLease(lease_id=i, reason="no") for i in list(ledger.book.leases)[:1]),
    ]
    groups = list(ledger.book.groups.values())
    for group in random.sample(groups, min(3, len(groups))):
        for sibling in range(group.size):
            chosen_by = msgspec.structs.replace(version, step=max(0, group.adopted_step))
            sent = header(group.group_id, sibling, chosen_by, lease_id=group.lease_id)
            score = Score(group_id=group.group_id, sibling=sibling, lease_id=-1, reward=sibling)
            live += [SubmitTrajectory(header=sent), SubmitScores(scores=(score,))]
        live.append(FetchPayloads(keys=tuple(group.trajectory_keys())[:2]))
    return [(encode(one), _attached(one)) for one in (*REQUESTS, *live)]


def _attached(request: Request) -> Frames:
    if isinstance(request, StoreImage):
        return [b"image"]
    return [b"payload", b"response"] if isinstance(request, SubmitTrajectory) else []


def rss_mb() -> float:
    gc.collect()
    return psutil.Process().memory_info().rss / 2**20


@pytest.fixture
def _only_errors() -> Iterator[None]:
    """A warning per hostile message is as it should be, and a lot."""
    log = logging.getLogger("broker")
    before = log.level
    log.setLevel(logging.ERROR)
    yield
    log.setLevel(before)


def lay_siege(folder: Path, num_sequences: int) -> None:
    """Send so many sequences and see that nothing grows."""
    batches = num_sequences // PER_BATCH
    figures: list[float] = []
    began = time.monotonic()
    with asyncio.Runner() as runner:
        manager = fuzzed(folder)
        it = runner.run(manager.__aenter__())
        siege = Siege(it)
        runner.run(siege.begin())

        @settings(PROFILE, max_examples=batches)
        @given(random=RANDOMS)
        def attack(random: Random) -> None:
            runner.run(siege.attack(random))
            if siege.sent["sequences"] % (PER_BATCH * max(1, batches // 10)) == 0:
                figures.append(rss_mb())
            sizes = it.sizes()
            over = {name: n for name, n in sizes.items() if n > MOST[name]}
            assert not over, f"grew past {MOST}: {over}"

        try:
            try:
                attack()
            finally:
                siege.close()  # one of them may be the learner, and would keep its place
            runner.run(one_step(it))
            sizes = it.sizes()
        finally:
            runner.run(manager.__aexit__(None, None, None))
    seconds = time.monotonic() - began
    sent = siege.sent
    print(  # noqa: T201 the figures of docs/wire.md
        f"\n{sent['sequences']} sequences in {seconds:.0f} s, {sent['sequences'] / seconds:.0f}/s: "
        f"{dict(sent)}; slowest {siege.slowest_s:.3f} s; resident MB "
        f"{', '.join(f'{one:.0f}' for one in figures)}; {sizes}; {dict(it.rejected)}"
    )
    assert sent["sequences"] >= num_sequences
    assert min(sent[what] for what in ("malformed", "forbidden", "hello_first", "allowed")) > 100
    warm = figures[len(figures) // 5]
    assert figures[-1] - warm < MAX_GROWTH_MB, f"resident MB: {figures}"


async def one_step(it: Fuzzed) -> None:
    """After all that, honest roles train a step."""
    clients = []

    async def client(role: Role, name: str) -> BrokerClient:
        one, _ = await BrokerClient.connect(it.unix, role=role, name=name, timeout_s=HANG_S)
        clients.append(one)
        return one

    sessions = it.server._sessions
    await until_async(lambda: not sessions.is_connected(it.ledger.book.state.learner))
    learner, generator = await client("learner", "L"), await client("generator", "G")
    took, _ = await learner.ask(TakeOver(step=it.ledger.book.step), TookOver)
    for name in list(it.ledger.book.by_holder):
        it.ledger.release_all(name, "left")  # the clients of before are gone
    for _ in range(50):
        leased, _ = await generator.ask(
            LeaseGroups(adopted=took.version, max_sequences=64, wait_s=0.1), GroupsLeased
        )
        for group in leased.groups:
            for sibling in group.siblings:
                sent = header(group.group_id, sibling, took.version, lease_id=group.lease_id)
                await generator.ask(
                    SubmitTrajectory(header=sent), Done, frames=[b"payload", b"response"]
                )
        leased_scoring, _ = await generator.ask(LeaseScoring(credits=99, wait_s=0.0), ScoringLeased)
        scores = tuple(
            Score(
                group_id=i.group_id, sibling=i.sibling, lease_id=i.lease_id, reward=float(i.sibling)
            )
            for i in leased_scoring.items
        )
        await generator.ask(SubmitScores(scores=scores), Done)
        answer, _ = await learner.ask_any(
            RequestBatch(version=took.version, step=took.version.step, wait_s=0.1)
        )
        if isinstance(answer, BatchDelivered):
            commit = StepCommit(version=took.version.next(), metrics={})
            await learner.ask(commit, StepCommitted)
            break
    for one in clients:
        one.close()
    assert it.ledger.book.version == took.version.next()


@pytest.mark.integration
@pytest.mark.parametrize(
    "count", [10_000, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(3_000)])]
)
@pytest.mark.usefixtures("_only_errors")
def test_hostile_sequences_change_nothing_and_leave_nothing_behind(short_folder: Path, count: int):
    lay_siege(short_folder, count)


# ---- what is no ZMTP at all ---------------------------------------------------

NUM_STREAMS = 300
SILENT = 40
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00"  # signature and version of ZMTP 3.0
MECHANISMS = (b"CURVE", b"NULL", b"PLAIN", b"GSSAPI", b"\xff" * 20)


def stream_of(random: Random) -> bytes:
    """Return what a stranger sends into the port: noise, or the beginning of a handshake."""
    greeting = GREETING + random.choice(MECHANISMS).ljust(20, b"\0") + bytes(32)
    command = bytes([4, 200]) + b"\x05HELLO" + random.randbytes(194)
    huge = b"\x06" + b"\x7f" + b"\xff" * 7 + b"\x05HELLO"  # a command of a very large stated length
    http = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    start = random.choice((b"", http, greeting, greeting, greeting + command, greeting + huge))
    return start[: random.randrange(len(start) + 1)] + random.randbytes(
        random.choice((0, 9, 3_000))
    )


async def sent(port: int, stream: bytes, *, then_close: bool) -> float:
    """Send a stream; return how long the broker kept the connection."""
    began = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with suppress(ConnectionError):
        writer.write(stream)
        if then_close:
            await writer.drain()
        else:
            async with asyncio.timeout(HANG_S):
                while await reader.read(4_096):
                    pass
    writer.close()
    return time.monotonic() - began


@pytest.mark.integration
async def test_streams_that_prove_no_key_are_closed_before_the_loop(short_folder: Path):
    """Noise, half a handshake and then silence, a client without keys: none gets to the loop."""

    async with fuzzed(short_folder, listens=True) as it:
        address = it.server.addresses[1]
        port = int(address.rpartition(":")[2])
        key = make_client_key(short_folder / "keys", "hostb", "observer")
        it.server._clients.refresh_keys()
        honest, _ = await BrokerClient.connect(
            address, role="observer", name="o", timeout_s=HANG_S, key_file=str(key)
        )
        seen = it.server.telemetry
        random, process = Random(4), psutil.Process()
        before, state = process.num_fds(), encode_state(it.ledger.book.state)
        null: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        keyless = null.socket(zmq.DEALER)
        keyless.setsockopt(zmq.LINGER, 0)
        keyless.connect(address)
        keyless.send_multipart([b"1", b"", encode(Hello(role="learner", name="l"))])
        for _ in range(NUM_STREAMS // 20):
            some = (sent(port, stream_of(random), then_close=True) for _ in range(20))
            await asyncio.gather(*some)
            await honest.ask(GetStatus(), StatusAnswer)
        silent = [GREETING + b"CURVE".ljust(20, b"\0") + bytes(32), b"", GREETING]
        waiting = asyncio.gather(
            *(sent(port, silent[i % 3], then_close=False) for i in range(SILENT))
        )
        await honest.ask(GetStatus(), StatusAnswer)
        assert not waiting.done(), "the honest one was answered only when the silent were closed"
        kept = await waiting
        await honest.ask(GetStatus(), StatusAnswer)
        assert keyless.poll(0) == 0
        keyless.close()
        null.term()
        honest.close()
        await until_async(lambda: process.num_fds() <= before, "connections were not closed")
        assert encode_state(it.ledger.book.state) == state
        assert not +seen.rejected
        assert len(it.server._sessions._by_token) == 1
        kept_s = max(kept)
    print(f"\n{NUM_STREAMS} streams, {SILENT} silent ones kept {kept_s:.1f} s")  # noqa: T201


def held_for_a_stranger(port: int, size: int) -> socket.socket:
    """Announce a command of many bytes, without any key, and send them."""
    stranger = socket.create_connection(("127.0.0.1", port))
    stranger.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32))
    stranger.settimeout(HANG_S)
    stranger.recv(64)
    with suppress(OSError):  # the broker has closed it
        stranger.sendall(b"\x06" + size.to_bytes(8, "big"))
        for _ in range(size >> 20):
            stranger.sendall(bytes(1 << 20))
    return stranger


@pytest.mark.integration
def test_peer_without_a_key_makes_the_broker_hold_at_most_one_piece(short_folder: Path):
    """Frames of 256 MiB were taken before a key was asked for: four strangers, 611 MiB."""

    async def body() -> int:
        async with fuzzed(short_folder, listens=True, max_message_bytes=256 << 20) as it:
            port = int(it.server.addresses[1].rpartition(":")[2])
            process = psutil.Process()
            before = process.memory_info().rss
            most, is_over = before, asyncio.Event()

            async def watch() -> None:
                nonlocal most
                while not is_over.is_set():
                    most = max(most, process.memory_info().rss)
                    await asyncio.sleep(0.005)

            watching = asyncio.create_task(watch())
            for _ in range(4):
                stranger = await asyncio.to_thread(held_for_a_stranger, port, 150 << 20)
                stranger.close()
            is_over.set()
            await watching
            return most - before

    assert asyncio.run(body()) < 40 << 20
