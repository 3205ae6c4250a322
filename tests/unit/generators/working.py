"""A generator's worker at a real broker, with an engine that answers when a test lets it."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from typing_extensions import override

from slipstream.broker.client import BrokerClient
from slipstream.broker.ledger.commands import Ledger
from slipstream.broker.reward_worker.scorer import Rewards
from slipstream.generators.engine import Completion, EngineLoad, SamplingParams
from slipstream.generators.environments.turn_sampler import TurnSampler
from slipstream.generators.lanes.concurrency import Range
from slipstream.generators.lanes.lanes import Lanes
from slipstream.generators.rollout import Sampler
from slipstream.generators.text.codec import TextCodec, sibling_seed
from slipstream.generators.versions.probe_audit import ProbeAudit
from slipstream.generators.worker import GeneratorWorker
from slipstream.wire.errors import EngineError
from slipstream.wire.messages.broker import (
    Answer,
    GroupsLeased,
    Heartbeat,
    LeaseGroups,
    Request,
    RoleReport,
    ScoringItem,
    SubmitTrajectory,
)
from slipstream.wire.messages.codec import Frame
from slipstream.wire.messages.trajectory import Prompt, Score, Transcript
from slipstream.wire.settings.sections import SamplingSection
from tests.support.blank_model import write_blank_model
from tests.support.drawn_images import NO_IMAGES
from tests.support.ledger_driver import make_rules
from tests.support.running_broker import Running, running
from tests.support.scripted_engine import ScriptedEngine
from tests.support.waiting import HANG_S, until_async

R = TypeVar("R")
Answered = tuple[int, int]  # position of the prompt, sibling
RUN_SEED = 9
MOST_PROMPTS, MOST_SIBLINGS = 64, 8
BEAT_S = 0.02
PARAMS = SamplingParams(temperature=1.0, max_new_tokens=16, min_new_tokens=15)


class NotingClient(BrokerClient):
    """The real client; it notes what was asked, in order, and how much work came of it."""

    requests: list[Request]
    granted: int
    may_submit: asyncio.Event  # answers wait for it before they are sent

    @override
    async def ask_any(
        self, request: Request, *, frames: Sequence[Frame] = (), extra_wait_s: float = 0.0
    ) -> tuple[Answer, list[Frame]]:
        self.requests.append(request)
        if isinstance(request, SubmitTrajectory):
            await self.may_submit.wait()
        answer, attached = await super().ask_any(request, frames=frames, extra_wait_s=extra_wait_s)
        if isinstance(answer, GroupsLeased):
            self.granted += sum(len(group.siblings) for group in answer.groups)
        return answer, attached

    def asked(self, kind: type[R]) -> list[R]:
        """Return all requests of one kind so far."""
        return [request for request in self.requests if isinstance(request, kind)]


class HeldRewards:
    """Rewards that come when the test lets them: the number of the sibling, or none for some."""

    needs_groups = False

    def __init__(self, *, unavailable: Sequence[int] = ()) -> None:
        self.begun, self.may_end = asyncio.Event(), asyncio.Event()
        self._unavailable = unavailable

    async def score(self, work: Sequence[tuple[ScoringItem, Transcript]]) -> AsyncIterator[Score]:
        self.begun.set()
        await self.may_end.wait()
        for item, _ in work:
            none = item.sibling in self._unavailable
            yield Score(
                group_id=item.group_id,
                sibling=item.sibling,
                lease_id=item.lease_id,
                reward=None if none else float(item.sibling),
                unavailable="the judge is down" if none else "",
            )


class HeldEngine(ScriptedEngine):
    """The scripted engine; each request waits at its door until the test lets it in."""

    def __init__(self, *, cached_tokens: int) -> None:
        super().__init__(
            vocabulary=40, end_token_id=2, tokens_per_second=4000.0, cached_tokens=cached_tokens
        )
        self.held: dict[Answered, asyncio.Event] = {}
        self.begun: list[Answered] = []
        self.cancelled: list[Answered] = []
        self.most = 0  # answers under way at a time, ever
        self.lets_all = False
        self.is_silent = False  # of its load
        self.num_chosen = 0  # tokens
        self._failing: dict[Answered, str] = {}
        self._which = {
            sibling_seed(RUN_SEED, "train", position, sibling): (position, sibling)
            for position in range(MOST_PROMPTS)
            for sibling in range(MOST_SIBLINGS)
        }

    @override
    async def sample(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        count: int,
        seeds: Sequence[int] = (),
    ) -> list[Completion]:
        which = [self._which[seed] for seed in seeds]
        may_go = asyncio.Event()
        self.begun += which
        self.held |= dict.fromkeys(which, may_go)
        self.most = max(self.most, len(self.held))
        try:
            if not self.lets_all:
                await may_go.wait()
            if (reason := self._failing.pop(which[0], "")) != "":
                raise EngineError(reason)
            answers = await super().sample(prompt_ids, params, count=count, seeds=seeds)
        except asyncio.CancelledError:
            self.cancelled += which
            raise
        else:
            self.num_chosen += sum(len(answer.token_ids) for answer in answers)
            return answers
        finally:
            for one in which:
                del self.held[one]

    @override
    async def load(self) -> EngineLoad:
        if self.is_silent:
            raise EngineError("no answer to /v1/loads")
        return await super().load()

    def let(self, *which: Answered) -> None:
        """Answer these."""
        for one in which:
            self.held[one].set()

    def let_all(self) -> None:
        """Answer all that wait, and all that come."""
        self.lets_all = True
        self.let(*self.held)

    def fail(self, which: Answered, reason: str) -> None:
        """Give one request no answer."""
        self._failing[which] = reason
        self.let(which)


@dataclass
class Working:
    """A worker under way."""

    broker: Running
    client: NotingClient
    engine: HeldEngine
    worker: GeneratorWorker
    job: "asyncio.Task[None]"

    async def until_held(self, *which: Answered) -> None:
        """Wait until the engine is at these answers, and at no others."""
        await until_async(
            lambda: set(self.engine.held) == set(which),
            lambda: f"the engine is at {sorted(self.engine.held)}, not at {sorted(which)}",
        )

    async def until_asked_again(self) -> None:
        """Wait until the worker has been granted whatever it asks for of its own accord.

        It asks at once when it may, its requests go one way, and it waits for the answer to each
        heartbeat: when the third from now on is sent, what it asked for before has been settled.
        """
        last = len(self.client.asked(Heartbeat)) + 3
        await until_async(lambda: len(self.client.asked(Heartbeat)) >= last, "no heartbeats came")

    def rooms(self) -> list[int]:
        """Return how many sequences it asked for, request by request, repeats left out."""
        rooms = [request.max_sequences for request in self.client.asked(LeaseGroups)]
        return [room for i, room in enumerate(rooms) if i == 0 or rooms[i - 1] != room]

    def last_report(self) -> RoleReport:
        """Return its newest report."""
        return self.client.asked(RoleReport)[-1]

    async def end(self) -> None:
        """Cancel it as a generator does that was asked to end, without handing back."""
        self.job.cancel()
        await asyncio.gather(self.job, return_exceptions=True)


def ledger_of(num_groups: int, group_size: int, **rules: object) -> Ledger:
    """Return a ledger that grants so many groups at once, and no more in its life."""
    made = make_rules(
        groups_per_step=num_groups,
        group_size=group_size,
        max_staleness_steps=0,
        total_steps=1,
        **rules,  # type: ignore[arg-type]
    )

    def prompt_at(cursor: int) -> Prompt:
        return Prompt(prompt=f"{cursor}+1=", row=cursor)

    ledger = Ledger(made, prompt_at=prompt_at, eval_prompt_at=prompt_at)
    ledger.training.take_over(0)
    return ledger


@asynccontextmanager
async def working(
    folder: Path,
    ledger: Ledger,
    *,
    params: SamplingParams = PARAMS,
    max_sequences: int = 0,
    lanes: Lanes | None = None,
    cached_tokens: int = 1 << 20,
    siblings_together: bool = False,
    rewards: Rewards | None = None,
    audit: ProbeAudit | None = None,
    turn_sampler: TurnSampler | None = None,
) -> AsyncIterator[Working]:
    """Have a worker work for a broker in this process; without ``lanes`` in a fixed number."""
    size = ledger.book.rules.group_size
    fixed = Lanes(Range(lowest=size, highest=max_sequences, step=size))
    write_blank_model(folder / "model", hidden=16, layers=1)
    codec = TextCodec(folder / "model", SamplingSection(max_prompt_tokens=16))
    engine = HeldEngine(cached_tokens=cached_tokens)
    await engine.label(ledger.book.version)
    async with running(folder, ledger) as broker, asyncio.timeout(HANG_S):
        client, _ = await NotingClient.connect(
            broker.endpoint, role="generator", name="generator-0", timeout_s=HANG_S
        )
        client.requests, client.granted, client.may_submit = [], 0, asyncio.Event()
        client.may_submit.set()
        broker.clients.append(client)
        worker = GeneratorWorker(
            client=client,
            images=NO_IMAGES,
            sampler=Sampler(engine, codec, {"train": params}, RUN_SEED),
            lanes=lanes or fixed,
            siblings_together=siblings_together,
            skips_bad_prompts=False,
            rewards=rewards,
            audit=audit,
            turn_sampler=turn_sampler,
        )
        worker.adopted(ledger.book.version)
        job = asyncio.create_task(worker.run(heartbeat_s=BEAT_S, report_every_s=BEAT_S))
        it = Working(broker, client, engine, worker, job)
        try:
            yield it
        finally:
            await it.end()
