"""The broker's loop over a real socket in a private folder, with the store in memory."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from slipstream.broker.client import BrokerClient
from slipstream.broker.ledger.commands import Ledger
from slipstream.broker.ledger.scoring_queue import ScoringQueue
from slipstream.broker.report.run_records import RunRecords
from slipstream.broker.report.run_report import RunReport
from slipstream.broker.report.telemetry import Telemetry
from slipstream.broker.server.assembly import make_server
from slipstream.broker.server.keyring import KeyRing
from slipstream.broker.server.limits import ServerRules
from slipstream.broker.server.loop import BrokerServer
from slipstream.broker.store.group_commit import GroupCommitter
from slipstream.wire.files.image_folder import ImageFolder
from slipstream.wire.messages.broker import (
    Answer,
    Done,
    GroupsLeased,
    LeasedGroup,
    LeaseGroups,
    LeaseScoring,
    RequestBatch,
    Role,
    ScoringLeased,
    SubmitScores,
    SubmitTrajectory,
    TakeOver,
    TookOver,
    Welcome,
)
from slipstream.wire.messages.codec import decode_answer, decode_transcript
from slipstream.wire.messages.pieces import cut
from slipstream.wire.messages.status import RunStatus
from slipstream.wire.messages.trajectory import Score
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.settings.sections import RunSection
from tests.support.ledger_driver import header, make_ledger, make_rules
from tests.support.memory_store import MemoryStore
from tests.support.waiting import HANG_S

V0 = PolicyVersion(1, 0)
WORK = LeaseGroups(adopted=V0, max_sequences=2, wait_s=30.0)
WORK_NOW = LeaseGroups(adopted=V0, max_sequences=2, wait_s=0.0)
SCORING = LeaseScoring(credits=8, wait_s=30.0)
BATCH = RequestBatch(version=V0, step=V0.step, wait_s=30.0)


@dataclass(slots=True)
class Running:
    endpoint: str
    ledger: Ledger
    server: BrokerServer
    store: MemoryStore
    task: "asyncio.Task[None]"
    clients: list[BrokerClient] = field(default_factory=list)

    async def client(self, role: Role, name: str) -> BrokerClient:
        client, _ = await BrokerClient.connect(
            self.endpoint, role=role, name=name, timeout_s=HANG_S
        )
        self.clients.append(client)
        return client

    async def takes_over(self) -> BrokerClient:
        """Connect a learner that trains the run."""
        learner = await self.client("learner", "learner")
        await learner.ask(TakeOver(step=0), TookOver)
        return learner

    async def opened(self, *siblings: int) -> tuple[BrokerClient, BrokerClient, LeasedGroup]:
        """Connect a learner and a generator, which leases a group and answers these siblings."""
        learner = await self.client("learner", "learner")
        generator = await self.client("generator", "generator-0")
        group = await one_group(learner, generator)
        for sibling in siblings:
            await submit(generator, group.group_id, sibling)
        return learner, generator, group

    async def scored(self) -> list[str]:
        """Have a worker reward what waits with the number of the sibling; return the responses."""
        worker = await self.client("reward_worker", "reward-worker-0")
        leased, transcripts = await worker.ask(SCORING, ScoringLeased)
        scores = tuple(
            Score(
                group_id=item.group_id,
                sibling=item.sibling,
                lease_id=item.lease_id,
                reward=float(item.sibling),
            )
            for item in leased.items
        )
        await worker.ask(SubmitScores(scores=scores), Done)
        return [decode_transcript(transcript).response for transcript in transcripts]

    @property
    def status(self) -> RunStatus:
        return self.server.report.status()


def make_test_server(
    ledger: Ledger,
    scoring: ScoringQueue,
    store: MemoryStore,
    committer: GroupCommitter,
    rules: ServerRules,
    *,
    records: RunRecords | None = None,
    images: ImageFolder | None = None,
    **options: Any,  # noqa: ANN401
) -> BrokerServer:
    """Return a server of a run named run, without files."""
    telemetry = Telemetry(RunSection(name="run"))
    report = RunReport(ledger.book, scoring, telemetry, records or RunRecords(), run_name="run")
    return make_server(
        ledger,
        scoring,
        store,
        committer,
        report,
        rules,
        images or ImageFolder(Path("nowhere"), most_bytes=0),
        **options,
    )


@asynccontextmanager
async def running(
    folder: Path,
    ledger: Ledger | None = None,
    *,
    store: MemoryStore | None = None,
    cache_bytes: int = 1 << 20,
    records: RunRecords | None = None,
    on_epoch: Callable[[int], None] = lambda _: None,
    keys: KeyRing | None = None,
    images: ImageFolder | None = None,
) -> AsyncIterator[Running]:
    owned = ledger or make_ledger(make_rules(groups_per_step=1, total_steps=1))
    store = store or MemoryStore()
    committer = GroupCommitter(store)
    server = make_test_server(
        owned,
        ScoringQueue(lease_s=HANG_S),
        store,
        committer,
        ServerRules(max_message_bytes=1_000_000, scores_inline=True, cache_bytes=cache_bytes),
        records=records,
        on_epoch=on_epoch,
        keys=keys,
        images=images,
    )
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    endpoint = f"ipc://{folder}/broker.sock"
    task = asyncio.create_task(server.serve(context, endpoint))
    writer = asyncio.create_task(committer.run())
    it = Running(endpoint, owned, server, store, task)
    try:
        yield it
        assert not task.done(), "the broker's loop ended"
    finally:
        for client in it.clients:
            client.close()
        for one in (task, writer):
            one.cancel()
            with suppress(asyncio.CancelledError):
                await one
        context.term()


@asynccontextmanager
async def bare_socket(endpoint: str) -> AsyncIterator[Callable[..., Awaitable[Answer]]]:
    """Yield a function that sends frames as they are and returns the answer."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(endpoint)

    session = b""

    async def ask(*frames: bytes, answered: bool = True) -> Answer:
        nonlocal session
        await socket.send_multipart([frames[0], session, *cut(frames[1:])])
        if not answered:
            return Done()
        async with asyncio.timeout(HANG_S):
            request_id, body = await socket.recv_multipart()
        assert request_id == frames[0]
        answer = decode_answer(body)
        if isinstance(answer, Welcome):
            session = answer.session
        return answer

    try:
        yield ask
    finally:
        socket.close()
        context.term()


async def submit(client: BrokerClient, group_id: int, sibling: int) -> None:
    frames = [b"payload %d" % sibling, b"response %d" % sibling]
    message = SubmitTrajectory(header=header(group_id, sibling, V0, lease_id=group_id))
    await client.ask(message, Done, frames=frames)


async def one_group(learner: BrokerClient, generator: BrokerClient) -> LeasedGroup:
    await learner.ask(TakeOver(step=0), TookOver)
    leased, _ = await generator.ask(WORK, GroupsLeased)
    return leased.groups[0]
