"""Try an environment: a few trajectories one after the other, without a run.

Imported by deploy.commands.env.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

import msgspec

from slipstream.generators.config import GeneratorSettings
from slipstream.generators.environments.host import EnvironmentFailedError
from slipstream.generators.environments.turn_sampler import TurnSampler, rendering_of
from slipstream.generators.lanes.concurrency import Range
from slipstream.generators.lanes.lanes import Lanes
from slipstream.generators.sglang.running import make_sampler, running_engine, watch
from slipstream.generators.text.codec import TextCodec
from slipstream.generators.turns.calls import RecordedReply
from slipstream.wire.messages.broker import LeasedGroup
from slipstream.wire.messages.trajectory import Json, Prompt
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.process.run_until import first_ended, running
from slipstream.wire.process.stopping import stop_event

_NAME = "trial"


class TrialMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A reply of the policy, and the messages before it."""

    asked: tuple[dict[str, Json], ...]
    message: dict[str, Json]
    num_tokens: int
    finish_reason: str
    unknown_calls: int = 0  # calls of tools that do not exist
    unreadable_calls: int = 0  # calls that stay in the text, because they cannot be read


class TriedTrajectory(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory, or the reason why it failed."""

    row: int
    said: tuple[TrialMessage, ...] = ()
    reward: float | None = None  # None: a reward function would give it
    parts: dict[str, float] = {}
    failed: str = ""  # why the environment could not continue
    was_cut_off: bool = False
    num_tokens: int = 0
    num_chosen: int = 0  # tokens that the policy chose
    num_branches: int = 0
    rewritten: str = ""  # first difference of a history that began a branch
    seconds: float = 0.0


async def try_environment(
    settings: GeneratorSettings,
    prompts: Sequence[Prompt],
    *,
    on_begin: Callable[[int, Prompt], None],
    on_said: Callable[[TrialMessage], None],
    on_end: Callable[[TriedTrajectory], None],
) -> list[TriedTrajectory] | None:
    """Run a trajectory from each prompt; None if it was interrupted.

    Args:
        settings: Settings of a generator; its engine serves ``run.model``.
        prompts: First prompts.
        on_begin: Receives the number of a trajectory and its prompt.
        on_said: Receives each reply at once.
        on_end: Receives each trajectory at its end.

    Raises:
        ConfigError: the environment does not exist, or the model does not fit it.
        SlipstreamError: the engine does not start or has failed.
    """
    codec = TextCodec(settings.model, settings.sampling)
    # The sampler's own check, before an engine starts.
    rendering_of(codec).check(uses_tools=bool(settings.environment.tool_call_parser))
    async with AsyncExitStack() as cleanup:
        stopping = asyncio.create_task(stop_event().wait())
        cleanup.callback(stopping.cancel)
        started = await cleanup.enter_async_context(running_engine(settings, _NAME, stopping))
        if started is None:
            return None
        process, engine = started
        await engine.label(PolicyVersion(0, 0))
        sampler = make_sampler(settings, engine, codec)
        turns = TurnSampler.running(
            settings.environment, settings.sampling, sampler, hide=settings.hidden
        )
        turn_sampler = await cleanup.enter_async_context(turns)
        tried: list[TriedTrajectory] = []

        async def run_all() -> None:
            for number, prompt in enumerate(prompts):
                on_begin(number, prompt)
                tried.append(await _tried(turn_sampler, number, prompt, on_said))
                on_end(tried[-1])

        async with running(run_all(), watch(process)) as (job, watching):
            if job not in await first_ended(stopping, job, watching):
                return None
            job.result()
            return tried


async def _tried(
    turn_sampler: TurnSampler, number: int, prompt: Prompt, on_said: Callable[[TrialMessage], None]
) -> TriedTrajectory:
    work = LeasedGroup(
        group_id=number, lease_id=0, item="train", position=number, prompt=prompt, siblings=(0,)
    )
    replies: list[TrialMessage] = []

    def keep(reply: RecordedReply) -> None:
        replies.append(
            TrialMessage(
                asked=tuple(dict(message) for message in reply.asked),
                message=reply.message,
                num_tokens=len(reply.completion.token_ids),
                finish_reason=reply.finish_reason,
                unknown_calls=reply.rejected["unknown"],
                unreadable_calls=reply.rejected["unreadable"],
            )
        )
        on_said(replies[-1])

    booking = Lanes(Range(lowest=1, highest=1, step=1)).book(1)
    await booking.enter()
    began_s = time.monotonic()
    try:
        async with booking.by_call() as lanes:
            message, _ = await turn_sampler.run(work, 0, lanes, keep)
    except EnvironmentFailedError as error:
        return TriedTrajectory(
            row=prompt.row,
            said=tuple(replies),
            failed=str(error),
            seconds=time.monotonic() - began_s,
        )
    header, score = message.header, message.score
    return TriedTrajectory(
        row=prompt.row,
        said=tuple(replies),
        reward=None if score is None else score.reward,
        parts={} if score is None else score.parts,
        was_cut_off=header.finish_reason == "length",
        num_tokens=header.num_tokens,
        num_chosen=header.num_response_tokens,
        num_branches=1 + len(header.branches),
        rewritten=turn_sampler.differences[-1],
        seconds=time.monotonic() - began_s,
    )
