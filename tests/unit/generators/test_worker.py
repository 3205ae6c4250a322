"""The agent's loop against the broker's, over a real socket; the engine is scripted."""

import asyncio
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.broker.ledger.commands import Ledger
from slipstream.broker.reward_worker.scorer import Rewards
from slipstream.generators.engine import Completion, EngineLoad, SamplingParams
from slipstream.generators.lanes.concurrency import Range
from slipstream.generators.lanes.lanes import Lanes
from slipstream.generators.rollout import Sampler
from slipstream.generators.text.codec import TextCodec, sibling_seed
from slipstream.generators.worker import GeneratorWorker
from slipstream.wire.errors import ConfigError, EngineError
from slipstream.wire.messages.images import Image
from slipstream.wire.messages.trajectory import ChatMessage, ContentPart, Prompt
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.settings.sections import SamplingSection
from tests.support.blank_model import write_blank_model
from tests.support.canned_engine import CannedEngine, completion
from tests.support.drawn_images import NO_IMAGES
from tests.support.ledger_driver import make_rules
from tests.support.running_broker import Running, running
from tests.support.vision_models import VISION_MODELS, write_tokens
from tests.support.waiting import HANG_S, until_async
from tests.unit.generators.working import HeldRewards

VERSION = PolicyVersion(1, 0)
PARAMS = SamplingParams(temperature=1.0, max_new_tokens=2)


class Counting(CannedEngine):
    """Answers every request, and keeps the seeds that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.called = asyncio.Event()

    def answers(self, count: int) -> list[Completion]:
        self.called.set()
        return [completion(5, 2, starts=[(0, VERSION)])] * count


def prompt_at(cursor: int) -> Prompt:
    return Prompt(prompt="1+1=" if cursor else "100000+1=", row=cursor)


def conversation_at(cursor: int) -> Prompt:
    return Prompt(prompt=(ChatMessage("user" if cursor else "tool", "1+1="),), row=cursor)


TEMPLATE = """{% if messages[0].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}
{{- messages[0].content }}"""


SEEING = "{% for part in messages[0].content %}{{ part.text or '<|image_pad|>' }}{% endfor %}"


def image_at(row: int) -> Prompt:
    """Return a prompt of four tokens; the first one has an image that nobody has."""
    part = ContentPart(text="seen") if row else ContentPart(image=Image("a" * 64, 28, 28, 9))
    return Prompt(prompt=(ChatMessage("user", (part,)),), row=row)


def worker_of(
    it: Running,
    client: object,
    folder: Path,
    overlong: str = "error",
    *,
    skips_bad_prompts: bool = False,
    rewards: Rewards | None = None,
    sees: bool = False,
) -> tuple[GeneratorWorker, Counting]:
    if sees:
        write_tokens(folder / "model", "qwen2_5_vl")
        config = json.dumps(VISION_MODELS["qwen2_5_vl"])
        (folder / "model" / "config.json").write_text(config)
    else:
        write_blank_model(folder / "model", hidden=16, layers=1)
    (folder / "model" / "chat_template.jinja").write_text(SEEING if sees else TEMPLATE)
    sampling = SamplingSection(max_prompt_tokens=6, overlong_prompts=overlong)  # type: ignore[arg-type]
    engine = Counting()
    sampler = Sampler(engine, TextCodec(folder / "model", sampling), {"train": PARAMS}, 9)
    worker = GeneratorWorker(
        client=client,  # type: ignore[arg-type]
        images=NO_IMAGES,
        sampler=sampler,
        lanes=Lanes(Range(lowest=2, highest=8, step=2)),
        siblings_together=True,
        skips_bad_prompts=skips_bad_prompts,
        rewards=rewards,
    )
    worker.adopted(it.ledger.book.version)
    return worker, engine


def ledger(prompt_at: Callable[[int], Prompt] = prompt_at) -> Ledger:
    rules = make_rules(groups_per_step=1, max_staleness_steps=0, total_steps=1)
    return Ledger(rules, prompt_at=prompt_at, eval_prompt_at=prompt_at)


# The first prompt cannot be answered, the second can.
@pytest.mark.parametrize(
    ("prompts", "settings", "reason"),
    [
        (prompt_at, {"overlong": "drop"}, "overlong_prompt"),
        (conversation_at, {"skips_bad_prompts": True}, "bad_prompt"),
        (image_at, {"skips_bad_prompts": True, "sees": True}, "bad_prompt"),
    ],
)
async def test_a_prompt_that_cannot_be_answered_is_dropped_and_another_answered(
    tmp_path: Path, prompts: Callable[[int], Prompt], settings: dict[str, Any], reason: str
):
    async with running(tmp_path, ledger(prompts)) as it:
        client = await it.client("generator", "generator-0")
        worker, engine = worker_of(it, client, tmp_path, **settings)
        job = asyncio.create_task(worker.run(heartbeat_s=5.0))
        async with asyncio.timeout(HANG_S):
            await engine.called.wait()
        assert it.status.dropped == {reason: 1}
        ((prompt_ids, _, count, seeds),) = engine.asked
        assert (len(prompt_ids), count) == (4, 2)
        assert seeds == [sibling_seed(9, "train", 1, sibling) for sibling in (0, 1)]
        job.cancel()
        await asyncio.gather(job, return_exceptions=True)


@pytest.mark.parametrize(
    ("prompts", "why"),
    [
        (prompt_at, r"row 0 .* sampling\.max_prompt_tokens is 6"),
        (conversation_at, r"row 0 .* refuses it: no tools"),
    ],
)
async def test_a_prompt_that_cannot_be_answered_ends_the_generator_by_default(
    tmp_path: Path, prompts: Callable[[int], Prompt], why: str
):
    async with running(tmp_path, ledger(prompts)) as it:
        client = await it.client("generator", "generator-0")
        worker, engine = worker_of(it, client, tmp_path)
        with pytest.RaisesGroup(pytest.RaisesExc(ConfigError, match=why), flatten_subgroups=True):
            async with asyncio.timeout(HANG_S):
                await worker.run(heartbeat_s=5.0)
        assert engine.asked == []
        assert it.status.dropped == {}


async def test_a_dead_engine_costs_no_further_attempts(tmp_path: Path):
    """Handed back at once, a group would be leased again at once, until no attempt is left."""

    class Dead(Counting):
        is_dead = True
        num_loads = 0

        def answers(self, count: int) -> list[Completion]:
            if self.is_dead:
                raise EngineError("connection refused")
            return super().answers(count)

        async def load(self) -> EngineLoad:
            self.num_loads += 1
            if self.is_dead:
                raise EngineError("connection refused")
            return await super().load()

    async with running(tmp_path, ledger()) as it:
        client = await it.client("generator", "generator-0")
        worker, _ = worker_of(it, client, tmp_path, "drop")
        engine = Dead()
        worker._sampler = dataclasses.replace(worker._sampler, engine=engine)
        job = asyncio.create_task(worker.run(heartbeat_s=5.0))
        await until_async(lambda: engine.num_loads >= 4)
        assert len(engine.asked) == 1
        assert it.status.dropped == {"overlong_prompt": 1}
        engine.is_dead = False
        await until_async(lambda: len(engine.asked) == 2)
        assert it.status.dropped == {"overlong_prompt": 1}
        job.cancel()
        await asyncio.gather(job, return_exceptions=True)


async def test_a_lease_is_kept_while_its_answers_are_scored_inline(tmp_path: Path):
    own = ledger(lambda _cursor: Prompt(prompt="1+1="))
    own.training.take_over(0)
    async with running(tmp_path, own) as it:
        client = await it.client("generator", "generator-0")
        rewards = HeldRewards()
        worker, _ = worker_of(it, client, tmp_path, rewards=rewards)
        job = asyncio.create_task(worker.run(heartbeat_s=0.02))
        async with asyncio.timeout(HANG_S):
            await rewards.begun.wait()
            (lease,) = it.ledger.book.leases.values()
            ends_s = it.ledger._terms._ends
            first_s = ends_s[lease.lease_id]
            await until_async(lambda: ends_s[lease.lease_id] > first_s, "no heartbeat came")
            rewards.may_end.set()
            await until_async(lambda: it.status.in_flight.get("ready") == 1)
        (group,) = it.ledger.book.groups.values()
        assert group.rewards == [0.0, 1.0]
        job.cancel()
        await asyncio.gather(job, return_exceptions=True)
