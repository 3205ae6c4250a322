"""Agents on an environment server, a scripted engine, a broker: each token that was sampled."""

import asyncio
import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from typing_extensions import override

from slipstream.broker.ledger.commands import Ledger
from slipstream.generators.engine import Completion, SamplingParams
from slipstream.generators.environments.turn_sampler import TurnSampler
from slipstream.generators.lanes.concurrency import Range
from slipstream.generators.lanes.lanes import Lanes
from slipstream.generators.rollout import Sampler
from slipstream.generators.text.codec import TextCodec, sibling_seed
from slipstream.generators.worker import GeneratorWorker
from slipstream.learner.batches.packing import TrainTrajectory, unpack
from slipstream.wire.messages.broker import (
    BatchDelivered,
    BatchNotReady,
    DeliveredTrajectory,
    Done,
    FetchPayloads,
    Goodbye,
    Payloads,
    RequestBatch,
    StepCommit,
    StepCommitted,
    TakeOver,
    TookOver,
)
from slipstream.wire.messages.codec import decode_payload
from slipstream.wire.messages.trajectory import Json, Prompt
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.process.run_until import running as while_running
from slipstream.wire.settings.sections import EnvironmentSection, SamplingSection
from tests.integration.environments.straying import HELD
from tests.support.custody import Chosen, Reply, Sampled, Tokens, replies_after, take
from tests.support.drawn_images import NO_IMAGES
from tests.support.held_deliveries import held_deliveries
from tests.support.ledger_driver import make_rules
from tests.support.running_broker import Running, running
from tests.support.scripted_engine import ScriptedEngine
from tests.support.several_turns import environment_server
from tests.support.tiny_run import ROOT
from tests.support.tool_policy import CALLS, write_tool_policy
from tests.support.waiting import HANG_S, until_async

pytestmark = pytest.mark.integration
AGENT = ROOT / "tests" / "integration" / "environments" / "straying.py"
RUN_SEED = 9
GROUPS, SIBLINGS, LANES = 10, 2, 16
LONG = 2_500  # tokens of a reply that no connection holds: its logprobs are 1 MB
SHORT = 100  # most tokens of a reply whose length is drawn
MOST_TOKENS, MOST_TURNS = 3 * LONG, 64
CALLS_OF_A_TRAJECTORY = 1_024  # seeds of one differ in lower bits
_CALL = re.compile(r"<tool_call>\n([^<]*)\n</tool_call>")
Calls = list[tuple[Tokens, Reply]]
Whose = tuple[int, int]  # position of the prompt, sibling


class RecordingEngine(ScriptedEngine):
    """Says calls of tools, whole ones and cut ones; records what it chose, and for whom.

    A reply of more than a few tokens is as long as it may be, and the longest have large tokens.
    """

    def __init__(self, codec: TextCodec) -> None:
        words = ("1+1=", "so ", *CALLS, CALLS[0].replace("1", "3"), '<tool_call>\n{"name"')
        self._words = [codec.text_ids(word) for word in words]
        self._large = [codec.text_ids(call) for call in CALLS]  # a token each
        super().__init__(vocabulary=100, end_token_id=codec.end_token_ids[0], mean_tokens=40.0)
        self.attempts: defaultdict[Whose, list[Calls]] = defaultdict(list)
        self._asked: dict[Whose, set[int]] = {}  # seeds of the newest attempt
        self._num_chunks: Counter[object] = Counter()
        self._whose = {
            sibling_seed(RUN_SEED, "train", position, sibling) // CALLS_OF_A_TRAJECTORY: (
                position,
                sibling,
            )
            for position in range(3_000)
            for sibling in range(SIBLINGS)
        }

    @override
    async def _hold(self, key: object, num_tokens: int) -> None:
        await super()._hold(key, num_tokens)
        self._num_chunks[key] += 1
        await asyncio.sleep(0)  # others choose tokens, and weights are published

    @override
    def _give_up(self, key: object) -> bool:
        self._num_chunks.pop(key, None)
        return super()._give_up(key)

    @override
    async def _answer(
        self, key: object, prompt_ids: list[int], params: SamplingParams, seed: int
    ) -> Completion:
        words = self._large if params.max_new_tokens > LONG // 2 else self._words
        if params.max_new_tokens > SHORT:
            params = replace(params, min_new_tokens=params.max_new_tokens)
        attempt = self._attempt_of(seed)
        made = await super()._answer(key, prompt_ids, params, seed)
        draw, count = random.Random(seed), len(made.token_ids)
        ids: list[int] = []
        while len(ids) < count:
            ids += draw.choice(words)
        del ids[count:]
        if made.finish_reason == "stop":
            ids[-1] = self._end_token_id
        logprobs = [-draw.uniform(0.01, 9.0) for _ in ids]
        own = [-1] * count
        for start, version in made.version_starts:
            own[start:] = [version.step] * (count - start)
        attempt.append(
            (tuple(prompt_ids), tuple(map(Chosen, ids, own, np.float32(logprobs).tolist())))
        )
        return replace(made, token_ids=ids, logprobs=logprobs)

    def _attempt_of(self, seed: int) -> Calls:
        """Return the calls of the attempt at a trajectory that a request is of.

        Another attempt asks the same again.
        """
        whose = self._whose[seed // CALLS_OF_A_TRAJECTORY]
        if not self.attempts[whose] or seed in self._asked[whose]:
            self.attempts[whose].append([])
            self._asked[whose] = set()
        self._asked[whose].add(seed)
        return self.attempts[whose][-1]

    @override
    async def tool_calls(
        self, text: str, tools: Sequence[Json], parser: str
    ) -> tuple[str, list[dict[str, Json]], int]:
        del tools, parser
        calls: list[dict[str, Json]] = [
            {
                "id": f"call_{i}",
                "type": "function",
                "function": {
                    "name": "look",
                    "arguments": json.dumps(json.loads(call)["arguments"]),
                },
            }
            for i, call in enumerate(_CALL.findall(text))
        ]
        rest = _CALL.sub("", text)
        return rest, calls, rest.count("<tool_call>")

    async def publish(self, version: PolicyVersion, worker: GeneratorWorker) -> None:
        """Change the weights within an answer, unless there is none."""
        await until_async(
            lambda: not self._num_in_flight or any(count > 1 for count in self._num_chunks.values())
        )
        worker.pausing()
        await self.pause()
        await self.label(version)
        await self.resume()
        worker.adopted(version)


@dataclass
class Custody:
    """A run's generator, and what was trained."""

    broker: Running
    engine: RecordingEngine
    worker: GeneratorWorker
    vocab_size: int
    trained: list[tuple[DeliveredTrajectory, TrainTrajectory]]

    async def train(self) -> None:
        """Train and publish until the run is complete."""
        learner = await self.broker.client("learner", "learner")
        took, _ = await learner.ask(TakeOver(step=0), TookOver)
        version = took.version
        await self.engine.publish(version, self.worker)
        while True:
            asked = RequestBatch(version=version, step=version.step, wait_s=1.0)
            batch, _ = await learner.ask_any(asked, extra_wait_s=1.0)
            if isinstance(batch, BatchNotReady):
                continue
            if not isinstance(batch, BatchDelivered):
                await learner.ask(Goodbye(), Done)
                return
            for group in batch.groups:
                keys = tuple((group.group_id, t.header.sibling) for t in group.trajectories)
                _, frames = await learner.ask(FetchPayloads(keys=keys), Payloads)
                for delivered, frame in zip(group.trajectories, frames, strict=True):
                    arrays = unpack(
                        delivered.header,
                        decode_payload(bytes(frame)),
                        vocab_size=self.vocab_size,
                        longest=MOST_TOKENS,
                        max_turns=MOST_TURNS,
                    )
                    self.trained.append((delivered, arrays))
            version = version.next()
            await learner.ask(StepCommit(version=version, metrics={}), StepCommitted)
            await self.engine.publish(version, self.worker)


def prompt_at(cursor: int) -> Prompt:
    return Prompt(prompt=f"{cursor}+1=", row=cursor)


@asynccontextmanager
async def custody(
    folder: Path, steps: int, environment: EnvironmentSection
) -> AsyncIterator[Custody]:
    """Yield a generator that has begun to work for a broker."""
    write_tool_policy(folder / "model")
    sampling = SamplingSection(max_prompt_tokens=64, max_response_tokens=LONG)
    codec = TextCodec(folder / "model", sampling)
    engine = RecordingEngine(codec)
    params = {"train": SamplingParams(temperature=1.0, max_new_tokens=LONG)}
    sampler = Sampler(engine, codec, params, RUN_SEED)
    rules = make_rules(
        max_staleness_steps=2,
        groups_per_step=GROUPS,
        group_size=SIBLINGS,
        total_steps=steps,
        drop_zero_variance=False,
    )
    ledger = Ledger(replace(rules, lease_s=HANG_S), prompt_at=prompt_at, eval_prompt_at=prompt_at)
    turns = TurnSampler.running(environment, sampling, sampler, hide=())
    async with (
        running(folder, ledger) as broker,
        turns as turn_sampler,
        held_deliveries(turn_sampler._server.url, HELD.encode()) as url,
    ):
        turn_sampler._server.url = url
        worker = GeneratorWorker(
            client=await broker.client("generator", "generator-0"),
            images=NO_IMAGES,
            sampler=sampler,
            lanes=Lanes(Range(lowest=SIBLINGS, highest=LANES, step=SIBLINGS)),
            siblings_together=False,
            skips_bad_prompts=False,
            turn_sampler=turn_sampler,
        )
        yield Custody(broker, engine, worker, codec.vocab_size, [])


@pytest.mark.parametrize(
    "steps", [5, pytest.param(100, marks=pytest.mark.slow)], ids=["100", "2000"]
)
async def test_each_token_that_was_sampled_is_trained_once_or_known_to_be_lost(
    folder: Path, steps: int
):
    """With its logprob and version, after exactly what it was sampled after."""
    died = folder / "died"
    died.mkdir()
    died.chmod(0o777)  # root's environments write what everybody may
    environment = EnvironmentSection(
        function=f"{AGENT}:rollout",
        options={"died": str(died)},
        max_turns=MOST_TURNS,
        max_tokens=MOST_TOKENS,
        tool_call_parser="qwen25",
    )
    settings = {"environment.function": environment.function, "environment.options.died": died}
    with environment_server(folder, settings) as there:
        environment = msgspec.structs.replace(
            environment,
            servers=tuple(json.loads(str(there["environment.servers"]))),
            key_file=str(there["environment.key_file"]),
        )
        async with custody(folder, steps, environment) as it, asyncio.timeout(steps * HANG_S / 10):
            async with while_running(it.worker.run(heartbeat_s=0.5)) as (job,):
                await it.train()
                await job
            assert_each_token_is_accounted_for(it, steps)
            assert len(list(died.iterdir())) == sum(
                len(attempts) - 1 for attempts in it.engine.attempts.values()
            )
            assert it.broker.status.dropped == {"lease_exhausted": 1}, "row 1 has no world"


def assert_each_token_is_accounted_for(it: Custody, steps: int) -> None:
    """Compare what was trained with the engine's record, trajectory by trajectory."""
    did: Counter[str] = Counter()
    record = {whose: list(attempts) for whose, attempts in it.engine.attempts.items()}
    for delivered, arrays in it.trained:
        header, parts = delivered.header, delivered.parts
        did.update({name: int(value) for name, value in parts.items() if name != "row"})
        calls = record.pop((int(parts["row"]), header.sibling))[-1]
        sampled: Sampled = Counter(calls)
        assert arrays.version_steps is not None
        columns = (arrays.token_ids, arrays.version_steps, arrays.behavior_logprobs)
        chosen = list(map(Chosen, *(column.tolist() for column in columns)))
        turns = [(turn.first_token, turn.num_tokens) for turn in header.chosen]
        for prompt, reply in replies_after(chosen, turns, header.branches):
            assert take(sampled, prompt, reply), f"{prompt} was not answered with {reply}"
        lost = list(sampled.elements())
        assert len(calls) - len(lost) == parts["heard"], "each reply that was handed over"
        assert [len(reply) for _, reply in lost] == [LONG] * int(parts["left"])
        assert not (header.branches and parts["faithful"]), "its history was not rewritten"
        did["branched"] += bool(header.branches)
        did["mixed"] += len({token.step for _, reply in calls for token in reply}) > 1
    assert len(it.trained) == steps * GROUPS * SIBLINGS
    assert not record, "nothing else was sampled"
    assert all(
        did[name]
        for name in (
            *("calls", "cut_calls", "together", "text", "hang_up", "left", "full", "edited"),
            *("compacted", "branched", "mixed"),
        )
    ), did
