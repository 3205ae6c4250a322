"""A broker that listens to other hosts: which clients are let in, and what each may send."""

import asyncio
import errno
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from msgspec.structs import replace
from zmq.auth.asyncio import AsyncioAuthenticator

from slipstream.broker.client import BrokerClient
from slipstream.broker.ledger.commands import Ledger
from slipstream.broker.ledger.scoring_queue import ScoringQueue
from slipstream.broker.server.keyring import KeyHolder, KeyRing, broker_key, make_client_key, revoke
from slipstream.broker.server.limits import ServerRules
from slipstream.broker.server.loop import BrokerServer
from slipstream.broker.store.group_commit import GroupCommitter
from slipstream.wire.errors import ConfigError, ForbiddenError, RefusedError
from slipstream.wire.files.keys import ClientKey, read_client_key, write_client_key
from slipstream.wire.messages.broker import (
    WIRE_REVISION,
    Done,
    FetchPayloads,
    FindRelay,
    GetLedgerSnapshot,
    GetStatus,
    GroupsLeased,
    Heartbeat,
    HeartbeatAnswer,
    Hello,
    LeaseGroups,
    LeaseScoring,
    Refusal,
    RelayHeard,
    RelayPlace,
    RelayReport,
    RequestBatch,
    Role,
    RoleReport,
    ScoringLeased,
    SealSteps,
    StatusAnswer,
    StepCommit,
    StepCommitted,
    SubmitScores,
    SubmitTrajectory,
    TakeOver,
    TookOver,
    Welcome,
)
from slipstream.wire.messages.codec import decode_answer, encode
from slipstream.wire.messages.pieces import cut
from slipstream.wire.messages.trajectory import Score
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import RelayAddress
from tests.support.ledger_driver import header, make_ledger, make_rules
from tests.support.memory_store import MemoryStore
from tests.support.running_broker import make_test_server
from tests.support.waiting import HANG_S, until_async

pytestmark = pytest.mark.integration


@dataclass(slots=True)
class Secured:
    """A broker with a Unix socket and a TCP port."""

    server: BrokerServer
    ledger: Ledger
    keys: Path
    unix: str
    clients: list[BrokerClient] = field(default_factory=list)

    @property
    def tcp(self) -> str:
        return self.server.addresses[1]

    def key(self, name: str, role: Role) -> Path:
        path = make_client_key(self.keys, name, role)
        self.server._clients.refresh_keys()  # it would, within a second
        return path

    async def client(
        self, role: Role, name: str, key: Path | None = None, *, tokenizer: str = ""
    ) -> BrokerClient:
        client, _ = await BrokerClient.connect(
            self.tcp if key else self.unix,
            role=role,
            name=name,
            timeout_s=HANG_S,
            outage_s=HANG_S,
            key_file=str(key or ""),
            tokenizer=tokenizer,
        )
        self.clients.append(client)
        return client

    def rejected(self, why: str) -> int:
        return self.server.telemetry.rejected[why]


@asynccontextmanager
async def secured(
    folder: Path, *, max_requests_per_s: float = 10_000.0, now: Callable[[], float] = time.monotonic
) -> AsyncIterator[Secured]:
    keys = folder / "keys"
    key, ring = broker_key(keys), KeyRing(keys)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    doorkeeper = AsyncioAuthenticator(context)
    doorkeeper.start()
    doorkeeper.configure_curve_callback("slipstream", credentials_provider=ring)
    ledger = make_ledger(make_rules(groups_per_step=1, total_steps=1))
    committer = GroupCommitter(MemoryStore())
    rules = ServerRules(max_message_bytes=1_000_000, max_requests_per_s=max_requests_per_s)
    scoring = ScoringQueue(lease_s=HANG_S)
    server = make_test_server(ledger, scoring, MemoryStore(), committer, rules, keys=ring, now=now)
    unix = f"ipc://{folder}/broker.sock"
    tasks = [
        asyncio.create_task(server.serve(context, unix, listen="tcp://127.0.0.1:*", key=key)),
        asyncio.create_task(committer.run()),
    ]
    await until_async(lambda: len(server.addresses) == 2)
    it = Secured(server, ledger, keys, unix)
    try:
        yield it
        assert not any(task.done() for task in tasks), "the broker's loop ended"
    finally:
        for client in it.clients:
            client.close()
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        doorkeeper.stop()
        context.term()


async def test_a_client_with_a_key_works_over_tcp_and_one_without_keys_over_a_unix_socket(
    short_folder: Path,
):
    async with secured(short_folder) as it:
        worker = await it.client("reward_worker", "w", it.key("hostb", "reward_worker"))
        learner = await it.client("learner", "learner")
        leased, _ = await worker.ask(LeaseScoring(credits=4, wait_s=0.05), ScoringLeased)
        took, _ = await learner.ask(TakeOver(step=0), TookOver)
    assert (leased.items, took.version) == ((), PolicyVersion(1, 0))


async def test_a_reward_workers_key_cannot_commit_a_step_and_the_attempt_is_counted(
    short_folder: Path,
):
    async with secured(short_folder) as it:
        worker = await it.client("reward_worker", "w", it.key("hostb", "reward_worker"))
        commit = StepCommit(version=PolicyVersion(1, 1), metrics={})
        with pytest.raises(ForbiddenError, match="hostb/w is a reward_worker, which may not"):
            await worker.ask(commit, StepCommitted)
        assert (it.rejected("forbidden"), it.ledger.book.step) == (1, 0)


async def test_the_key_of_another_host_of_a_learner_trains_nothing_and_moves_no_relay(
    short_folder: Path,
):
    async with secured(short_folder) as it:
        first, stolen = it.key("node-0", "learner"), it.key("node-1", "learner")
        learner = await it.client("learner", "learner", first)
        (taken, _) = await learner.ask(TakeOver(step=0), TookOver)
        relay = await it.client("relay", "relay", first)
        true = RelayAddress(endpoint="tcp://10.0.0.1:1", bulk_endpoint="tcp://10.0.0.1:2")
        await relay.ask(RelayReport(members=[], door=true), RelayHeard)

        thief = await it.client("learner", "learner", stolen)
        for request in (
            RequestBatch(version=taken.version, step=0, wait_s=0.0),
            StepCommit(version=taken.version.next(), metrics={}),
            GetLedgerSnapshot(version=taken.version),
        ):
            with pytest.raises(ForbiddenError, match="is for node-0/learner, which took over"):
                await thief.ask_any(request)
        with pytest.raises(RefusedError, match="is connected and trains this run"):
            await thief.ask(TakeOver(step=0), TookOver)
        part = it.key("node-2", "learner_part")
        reader = await it.client("learner_part", "learner-rank-2", part)
        for request in (
            TakeOver(step=0),
            RequestBatch(version=taken.version, step=0, wait_s=0.0),
            StepCommit(version=taken.version.next(), metrics={}),
            SealSteps(version=taken.version, step=0, oldest_kept=0),
            GetLedgerSnapshot(version=taken.version),
            GetStatus(),
            RelayReport(members=[], door=true),
        ):
            with pytest.raises(ForbiddenError, match="is a learner_part, which may not send"):
                await reader.ask_any(request)
        with pytest.raises(RefusedError, match="is in no delivered batch"):
            await reader.ask_any(FetchPayloads(keys=((0, 0),)))
        for role in ("learner", "relay"):
            with pytest.raises(ConfigError, match="made for the role learner_part, not"):
                await it.client(role, role, part)
        false = await it.client("relay", "relay", stolen)
        with pytest.raises(ForbiddenError, match="no relay of node-0/learner"):
            await false.ask(
                RelayReport(members=[], door=replace(true, endpoint="tcp://10.0.0.9:1")), RelayHeard
            )
        assert it.rejected("forbidden") == 13
        generator = await it.client("generator", "g", it.key("gpu1", "generator"))
        assert (await generator.ask(FindRelay(), RelayPlace))[0].door == true


async def test_a_generators_key_scores_nothing_of_anybody_else_and_sees_no_truth(
    short_folder: Path,
):
    async with secured(short_folder) as it:
        learner = await it.client("learner", "learner", it.key("node-0", "learner"))
        (taken, _) = await learner.ask(TakeOver(step=0), TookOver)
        honest = await it.client("generator", "g", it.key("gpu1", "generator"))
        thief = await it.client("generator", "g", it.key("gpu2", "generator"))
        work = LeaseGroups(adopted=taken.version, max_sequences=2, wait_s=30.0)
        (leased, _) = await honest.ask(work, GroupsLeased)
        (group,) = leased.groups
        answer = SubmitTrajectory(
            header=header(group.group_id, 0, taken.version, lease_id=group.lease_id)
        )
        await honest.ask(answer, Done, frames=[b"payload", b"response"])
        for request in (
            LeaseScoring(credits=8, wait_s=0.0),
            SubmitScores(scores=(Score(group_id=0, sibling=0, lease_id=1 << 40, reward=1e15),)),
        ):
            with pytest.raises(ForbiddenError, match="may not send"):
                await thief.ask_any(request)
        worker = await it.client("reward_worker", "w", it.key("cpu1", "reward_worker"))
        (items, transcripts) = await worker.ask(LeaseScoring(credits=8, wait_s=30.0), ScoringLeased)
        assert (len(items.items), len(transcripts)) == (1, 1)
        assert not it.ledger.book.groups[0].scores


async def test_a_key_is_good_for_its_own_role_alone(short_folder: Path):
    async with secured(short_folder) as it:
        key = it.key("hostb", "reward_worker")
        with pytest.raises(ConfigError, match="was made for the role reward_worker, not learn"):
            await it.client("learner", "learner", key)
        operator = it.key("desk", "operator")
        reader = await it.client("observer", "o", operator)
        assert isinstance((await reader.ask(GetStatus(), StatusAnswer))[0], StatusAnswer)


async def test_a_key_cannot_take_the_name_of_anybody_else(short_folder: Path):
    async with secured(short_folder) as it:
        learner = await it.client("learner", "learner")
        await it.client("reward_worker", "w", it.key("a", "reward_worker"))
        key = it.key("b", "reward_worker")
        await it.client("reward_worker", "w", key)
        await it.client("reward_worker", "learner", key)
        await learner.ask(TakeOver(step=0), TookOver)
        found = [role.name for role in it.server.report.status().roles]
    assert {"learner", "a/w", "b/w", "b/learner"} <= set(found)


async def test_no_key_decides_which_tokenizer_the_others_must_have(short_folder: Path):
    async with secured(short_folder) as it:
        for role in ("reward_worker", "generator"):
            await it.client(role, "thief", it.key(role, role), tokenizer="f" * 16)
        await it.client("learner", "learner", tokenizer="a" * 16)
        await it.client("generator", "g", it.key("honest", "generator"), tokenizer="a" * 16)
        with pytest.raises(ConfigError, match="is not that of learner"):
            await it.client("generator", "g", it.key("late", "generator"), tokenizer="f" * 16)


async def work_forever(worker: BrokerClient) -> None:
    while True:
        await worker.ask(Heartbeat(lease_ids=()), HeartbeatAnswer)
        await asyncio.sleep(0.05)


async def test_revoked_key_ends_its_connections_and_cannot_make_new_ones(short_folder: Path):
    async with secured(short_folder) as it:
        key = it.key("hostb", "reward_worker")
        copied = short_folder / "copied.key"
        write_client_key(copied, read_client_key(key))
        worker = await it.client("reward_worker", "w", key)
        revoke(it.keys, "hostb")
        with pytest.raises(ForbiddenError):
            await asyncio.wait_for(work_forever(worker), HANG_S)  # noqa: TID251 cancelled by nobody
        with pytest.raises((ConfigError, ForbiddenError), match="the key hostb"):
            await it.client("reward_worker", "w", copied)
        assert it.rejected("forbidden") >= 1


async def test_what_came_with_a_key_that_is_revoked_with_discard_is_not_trained(short_folder: Path):
    """A stolen key's answers stayed, and were trained."""

    async with secured(short_folder) as it:
        learner = await it.client("learner", "learner")
        await learner.ask(TakeOver(step=0), TookOver)
        thief = await it.client("generator", "g", it.key("gpu7", "generator"))
        await it.client("generator", "g", it.key("gpu8", "generator"))
        work = LeaseGroups(adopted=PolicyVersion(1, 0), max_sequences=2, wait_s=30.0)
        leased, _ = await thief.ask(work, GroupsLeased)
        group = leased.groups[0]
        sent = header(group.group_id, 0, PolicyVersion(1, 0), lease_id=group.lease_id)
        await thief.ask(SubmitTrajectory(header=sent), Done, frames=[b"payload", b"answer"])
        revoke(it.keys, "gpu8", discard=True)  # nothing came with it
        it.server._clients.refresh_keys()
        assert group.group_id in it.ledger.book.groups
        revoke(it.keys, "gpu7", discard=True)
        it.server._clients.refresh_keys()
        it.server._clients.refresh_keys()
        assert dict(it.ledger.book.state.dropped) == {"revoked": 1}
        assert it.ledger.book.unaccounted() == 0


async def test_unreadable_keys_suspend_remote_clients_without_dropping_them(
    short_folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """Without a descriptor left the folder could not be listed, and revoked keys stayed good."""

    class Clock:
        now_s = 0.0

    def fails(_self: KeyRing) -> list[KeyHolder]:
        raise OSError(errno.EMFILE, "Too many open files")

    async with secured(short_folder, now=lambda: Clock.now_s) as it:
        remote = await it.client("observer", "o", it.key("desk", "observer"))
        local = await it.client("observer", "o")
        with monkeypatch.context() as patched:
            patched.setattr(KeyRing, "refresh", fails)
            it.server._clients.refresh_keys()
            Clock.now_s += 9.0
            it.server._clients.refresh_keys()
            await remote.ask(GetStatus(), StatusAnswer)
            Clock.now_s += 2.0
            waiting = asyncio.create_task(remote.ask(GetStatus(), StatusAnswer))
            await until_async(lambda: it.rejected("slow_down") > 1, "it was served")
            await local.ask(GetStatus(), StatusAnswer)
        it.server._clients.refresh_keys()
        await asyncio.wait_for(waiting, HANG_S)  # noqa: TID251 cancelled by nobody
    assert caplog.text.count("keys cannot be read") == 1


async def test_key_of_another_broker_is_refused_with_the_reason(short_folder: Path):
    async with secured(short_folder) as it:
        own = read_client_key(it.key("hostb", "generator"))
        strange_public, strange_secret = (half.decode() for half in zmq.curve_keypair())
        strange = ClientKey(
            name="strange",
            role="generator",
            public=strange_public,
            secret=strange_secret,
            broker=own.broker,
        )
        path = short_folder / "strange.key"
        write_client_key(path, strange)
        with pytest.raises(ConfigError, match=r"does not take the key strange \(run.key_f"):
            await it.client("generator", "g", path)


async def test_tcp_requires_a_key(short_folder: Path):
    async with secured(short_folder) as it:
        with pytest.raises(ConfigError, match=r"run\.key_file must name a key"):
            await BrokerClient.connect(it.tcp, role="observer", name="o", timeout_s=HANG_S)
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(it.tcp)
        await socket.send_multipart([b"1", b"", encode(Hello(role="observer", name="o"))])
        answered = await socket.poll(200)
        socket.close()
        context.term()
        good = await it.client("observer", "o", it.key("desk", "observer"))
        await good.ask(GetStatus(), StatusAnswer)
        assert answered == 0


@asynccontextmanager
async def bare(endpoint: str, routing_id: bytes = b"") -> AsyncIterator["zmq.asyncio.Socket"]:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    if routing_id:
        socket.setsockopt(zmq.ROUTING_ID, routing_id)
    socket.connect(endpoint)
    try:
        yield socket
    finally:
        socket.close()
        context.term()


async def answer_to(socket: "zmq.asyncio.Socket", *frames: bytes) -> object:
    await socket.send_multipart(frames)
    async with asyncio.timeout(HANG_S):
        _, body = await socket.recv_multipart()
    return decode_answer(body)


async def test_a_session_is_worth_nothing_on_another_connection_nor_a_routing_id_without_it(
    short_folder: Path,
):
    """Neither a token nor a routing id makes another peer the client that sent the hello."""

    async with secured(short_folder) as it:
        hello = encode(Hello(role="learner", name="learner"))
        async with bare(it.unix, b"mine") as first:
            welcome = await answer_to(first, b"1", b"", hello)
            assert isinstance(welcome, Welcome)
            take_over = encode(TakeOver(step=0))
            async with bare(it.unix) as other:
                stolen = await answer_to(other, b"2", welcome.session, take_over)
        borrowed: object = None
        for _ in range(round(HANG_S)):  # until the broker has noticed that the first is gone
            async with bare(it.unix, b"mine") as again:
                with suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        borrowed = await answer_to(again, b"3", b"", take_over)
                        break
        found = [stolen, borrowed]
    for answer in found:
        assert isinstance(answer, Refusal)
        assert answer.code == "hello_first"


async def test_refusal_of_older_and_newer_peers_names_both_revisions(short_folder: Path):
    async with secured(short_folder) as it, bare(it.unix) as socket:
        old = encode(Hello(role="learner", name="learner", wire_revision=3))
        new = encode(Hello(role="learner", name="learner", wire_revision=WIRE_REVISION + 1))
        answers = [
            await answer_to(socket, b"1", old),  # revision 3 had no session
            await answer_to(socket, b"2", b"", old),
            await answer_to(socket, b"3", b"", new),
        ]
    assert all(isinstance(answer, Refusal) for answer in answers)
    reasons = [answer.reason for answer in answers if isinstance(answer, Refusal)]
    ours = WIRE_REVISION
    assert f"wire revision {ours}, you one before 4" in reasons[0]
    assert f"speaks wire revision 3, this broker {ours}" in reasons[1]
    assert f"speaks wire revision {ours + 1}, this broker {ours}" in reasons[2]


async def test_client_with_too_many_requests_is_slowed_down_and_loses_nothing(short_folder: Path):
    clock = [0.0]

    async with secured(short_folder, max_requests_per_s=50, now=lambda: clock[0]) as it:
        client = await it.client("generator", "g")
        report = RoleReport(phase_seconds={}, counters={})
        asking = asyncio.gather(*(client.ask(report, Done) for _ in range(130)))
        await until_async(lambda: it.rejected("slow_down") >= 20)
        while not asking.done():
            clock[0] += 1.0
            await asyncio.sleep(0.02)
        assert len(await asking) == 130


async def test_a_message_too_large_for_its_role_is_refused(short_folder: Path):
    async with secured(short_folder) as it, bare(it.unix) as socket:
        answer = await answer_to(socket, b"1", b"", *cut([b"x" * 100_000]))
        answer, malformed = answer, it.rejected("malformed")
    assert isinstance(answer, Refusal)
    assert "a client without a hello may send 65536" in answer.reason
    assert malformed == 1
