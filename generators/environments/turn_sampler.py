"""Siblings of a group as trajectories of several turns, each in an environment of its own."""

import itertools
import logging
import secrets
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from slipstream.broker.images import LocalImages
from slipstream.generators.capture.server import CaptureServer
from slipstream.generators.engine import Completion, InferenceEngine, SamplingParams
from slipstream.generators.environments.host import EnvironmentFailedError
from slipstream.generators.environments.local import local_environments
from slipstream.generators.environments.remote.link import EnvironmentServers
from slipstream.generators.environments.remote.messages import identity_of
from slipstream.generators.environments.rollout import (
    Environments,
    TrajectoryOutcome,
    run_trajectory,
    transcript_text,
)
from slipstream.generators.lanes.lanes import CallLanes
from slipstream.generators.rollout import Sampler, Submission, packed, shown
from slipstream.generators.text.codec import TextCodec, sibling_seed
from slipstream.generators.turns.calls import RecordedReply, TrajectoryCalls
from slipstream.generators.turns.conversation import Conversation
from slipstream.generators.turns.images import TrajectoryImages
from slipstream.generators.turns.rendering import MessageRendering
from slipstream.generators.turns.replies import ReplyParser
from slipstream.wire.errors import ConfigError, EngineError
from slipstream.wire.files.keys import read_client_key
from slipstream.wire.messages.broker import LeasedGroup, SubmitTrajectory
from slipstream.wire.messages.codec import encode
from slipstream.wire.messages.trajectory import MAX_PARTS, MAX_REASON, Score, TrajectoryHeader
from slipstream.wire.settings.rendezvous import parse_rendezvous
from slipstream.wire.settings.sections import EnvironmentSection, SamplingSection

_log = logging.getLogger(__name__)
_LISTEN = "127.0.0.1"
_MODEL = "policy"
_REMEMBERED = 100  # trajectories
_SERVER_PATIENCE_S = 120.0  # wait for the first environment server, without a sign of it
_NO_SCORER = (
    "no reward function scores the transcript (reward.workers = 0, reward.inline = false): start "
    "reward workers with reward.workers"
)


def rendering_of(codec: TextCodec) -> MessageRendering:
    """Return the rendering of messages for a model."""
    return MessageRendering(codec.template, codec.text_ids, codec.token_text, codec.end_token_ids)


def replies_of(
    engine: InferenceEngine, settings: EnvironmentSection, codec: TextCodec
) -> ReplyParser:
    """Return the parser of replies in an environment."""
    return ReplyParser(
        engine,
        tools=settings.tool_call_parser,
        reasoning=settings.reasoning_parser,
        opening=rendering_of(codec).opening,
    )


async def environments_of(settings: EnvironmentSection, hide: Sequence[Path]) -> Environments:
    """Start processes of environments next to this generator, or connect to servers."""
    if settings.servers:
        return await EnvironmentServers.start(
            [parse_rendezvous(text, setting="environment.servers") for text in settings.servers],
            read_client_key(Path(settings.key_file), setting="environment.key_file"),
            identity=identity_of(settings.function, settings.options),
            silence_s=settings.server_silence_s,
            patience_s=_SERVER_PATIENCE_S,
        )
    return await local_environments(settings, hide=hide)


class Differences(deque[str]):
    """First differences of histories that began a branch, of the newest hundred trajectories.

    A trajectory without such a history has an empty text.
    """

    def __init__(self) -> None:
        super().__init__(maxlen=_REMEMBERED)

    @property
    def newest(self) -> str:
        """The newest difference; empty if no trajectory has one."""
        return next(filter(None, reversed(self)), "")


class TurnSampler:
    """Runs trajectories in an environment. Make one with ``running``."""

    def __init__(
        self,
        settings: EnvironmentSection,
        sampling: SamplingSection,
        sampler: Sampler,
        host: Environments,
        server: CaptureServer,
        *,
        must_reward: bool = False,
    ) -> None:
        self._settings = settings
        self._max_tokens = settings.longest(sampling)
        self._sampler = sampler
        self._host = host
        self._server = server
        self._rendering = rendering_of(sampler.codec)
        self._parse = replies_of(sampler.engine, settings, sampler.codec)
        self._must_reward = must_reward
        self._num_abandoned = 0
        self._num_rejected = Counter[str]()
        self.differences = Differences()

    @classmethod
    @asynccontextmanager
    async def running(
        cls,
        settings: EnvironmentSection,
        sampling: SamplingSection,
        sampler: Sampler,
        *,
        hide: Sequence[Path],
        must_reward: bool = False,
    ) -> AsyncIterator["TurnSampler"]:
        """Yield a sampler whose environment is imported; nothing of it is left afterwards.

        With ``must_reward`` a trajectory without a reward of its environment has failed, because no
        scorer is configured.

        Raises:
            ConfigError: the environment cannot be imported, a setting is wrong, the chat template
                takes no conversation of several turns, or the environment must reward and cannot.
        """
        rendering = rendering_of(sampler.codec)
        rendering.check(uses_tools=bool(settings.tool_call_parser))
        if settings.tool_call_parser and (reason := rendering.why_no_tools()):
            _log.warning(
                "the prompt does not list the tools (environment.tool_call_parser = %r): %s; name "
                "a template that lists them in sampling.chat_template, or describe them in the "
                "prompts",
                settings.tool_call_parser,
                reason,
            )
        await replies_of(sampler.engine, settings, sampler.codec).check()
        host = await environments_of(settings, hide)
        server = CaptureServer(
            host=_LISTEN, port=0, model=_MODEL, token_text=sampler.codec.token_text
        )
        try:
            if must_reward and not host.may_reward:
                raise ConfigError(
                    f"environment.function {settings.function!r} gives no rewards, and {_NO_SCORER}"
                )
            await server.start()
            yield cls(settings, sampling, sampler, host, server, must_reward=must_reward)
        finally:
            await server.close()
            await host.close()

    async def run(
        self,
        group: LeasedGroup,
        sibling: int,
        lanes: CallLanes,
        on_reply: Callable[[RecordedReply], None] | None = None,
        images: LocalImages | None = None,
    ) -> Submission:
        """Run one sibling of a group.

        Args:
            group: Group of the sibling.
            sibling: Number of the sibling.
            lanes: Its lanes of the engine.
            on_reply: Receives each reply that becomes part of the trajectory.
            images: Files of images, which stores those of observations; None: no message may have
                any.

        Raises:
            EnvironmentFailedError: the environment cannot continue.
            EngineError: the engine failed.
        """
        params = replace(self._sampler.params[group.item], session=secrets.token_hex(8))
        conversation = Conversation(max_turns=self._settings.max_turns, max_tokens=self._max_tokens)
        seen = TrajectoryImages(
            self._sampler.codec.image_marks() if images is not None else None,
            group.prompt.images,
            images.store if images is not None else None,
        )
        calls = TrajectoryCalls(
            sample=self._sample(group, sibling, lanes, conversation, seen, images),
            params=params,
            rendering=self._rendering,
            conversation=conversation,
            encode=self._sampler.codec.text_ids,
            decode=self._sampler.codec.decode,
            parse=self._parse,
            longest_token=self._sampler.codec.longest_token,
            vocab_size=self._sampler.codec.vocab_size,
            on_reply=on_reply,
            images=seen,
        )
        try:
            outcome = await run_trajectory(
                self._host,
                calls,
                group.prompt,
                timeout_s=self._settings.timeout_s,
                server=self._server,
            )
            self._refuse_unrewarded(outcome)
            return self._submission(group, sibling, params, calls, outcome)
        except (EngineError, EnvironmentFailedError):
            raise
        except Exception as error:  # results of foreign code may raise anything anywhere
            _log.warning("group %d, sibling %d", group.group_id, sibling, exc_info=True)
            reason = f"{type(error).__name__}: {error}"[:MAX_REASON]
            raise EnvironmentFailedError(reason) from error
        finally:
            self._sampler.engine.end_session(params.session)
            self._num_abandoned += calls.num_abandoned
            self._num_rejected += calls.rejected
            self.differences.append(calls.first_difference)

    @property
    def counters(self) -> dict[str, float]:
        """Undelivered replies, bad tool calls, refused connections, killed processes."""
        killed = {f"environment_killed_{fault}": n for fault, n in self._host.replaced.items()}
        return {
            "replies_abandoned": self._num_abandoned,
            "unknown_calls": self._num_rejected["unknown"],
            "unreadable_calls": self._num_rejected["unreadable"],
            "connections_refused": self._server.num_refused,
            **killed,
        }

    def _refuse_unrewarded(self, outcome: TrajectoryOutcome) -> None:
        if outcome.reward is not None or not self._must_reward:
            return
        limits = {
            "environment": "",
            "turns": f" before environment.max_turns = {self._settings.max_turns}",
            "tokens": f" before environment.max_tokens = {self._max_tokens}",
        }
        ended = limits[outcome.ended_by]
        raise EnvironmentFailedError(f"the environment gave no reward{ended}, and {_NO_SCORER}")

    def _sample(
        self,
        group: LeasedGroup,
        sibling: int,
        lanes: CallLanes,
        conversation: Conversation,
        shown: TrajectoryImages,
        images: LocalImages | None,
    ) -> "_Sample":
        seed: int | None = None
        if self._sampler.run_seed is not None:
            seed = sibling_seed(self._sampler.run_seed, group.item, group.position, sibling)
        return _Sample(self._sampler.engine, seed, lanes, conversation, shown, images)

    def _submission(
        self,
        group: LeasedGroup,
        sibling: int,
        params: SamplingParams,
        calls: TrajectoryCalls,
        outcome: TrajectoryOutcome,
    ) -> Submission:
        conversation = calls.conversation
        tokens = calls.images.encoded(conversation.token_ids)
        turns, num_tokens = conversation.turns, conversation.num_tokens
        is_single = len(turns) == 1 and turns[0].end == num_tokens
        header = TrajectoryHeader(
            group_id=group.group_id,
            sibling=sibling,
            lease_id=group.lease_id,
            num_prompt_tokens=turns[0].first_token,
            num_tokens=num_tokens,
            version_runs=conversation.version_runs,
            temperature=params.temperature,
            finish_reason="stop" if outcome.ended_by == "environment" else "length",
            turns=() if is_single else turns,
            branches=conversation.branches,
        )
        mask = bytearray(num_tokens)
        for turn in turns:
            mask[turn.first_token : turn.end] = b"\1" * turn.num_tokens
        payload = packed(
            tokens,
            bytes(mask),
            conversation.logprobs,
            kept=conversation.kept,
            experts=conversation.experts,
        )
        score = None
        if outcome.reward is not None:
            score = Score(
                group_id=group.group_id,
                sibling=sibling,
                lease_id=-1,
                reward=outcome.reward,
                turn_rewards=conversation.by_turn([reward or 0.0 for reward in outcome.rewards])
                if outcome.has_turn_rewards
                else (),
                parts=dict(itertools.islice(outcome.parts.items(), MAX_PARTS)),
                function=self._settings.function,
                version=self._host.version,
            )
        frames = [encode(payload), transcript_text(outcome.messages).encode()]
        if header.turns:
            ids, decode = tokens.token_ids, self._sampler.codec.decode
            frames.append(encode([decode(ids[turn.first_token : turn.end]) for turn in turns]))
        return SubmitTrajectory(header=header, score=score), frames


class _Sample:
    """Samples the engine's replies in one trajectory; each call has a seed of its own."""

    def __init__(
        self,
        engine: InferenceEngine,
        seed: int | None,
        lanes: CallLanes,
        conversation: Conversation,
        shown: TrajectoryImages,
        images: LocalImages | None,
    ) -> None:
        self._shown_images = shown
        self._images = images
        self._engine = engine
        self._seed = seed
        self._lanes = lanes
        self._conversation = conversation
        self._num_calls = 0

    async def __call__(self, prompt_ids: list[int], params: SamplingParams) -> Completion:
        seeds = [] if self._seed is None else [self._seed ^ self._num_calls]
        self._num_calls += 1
        prompt = self._shown_images.encoded(prompt_ids)
        async with AsyncExitStack() as stack:
            if self._images is not None and prompt.images:
                digests = [span.digest for span in prompt.images]
                files = await stack.enter_async_context(self._images.files(digests))
                params = replace(params, images=shown(prompt, files))
            await stack.enter_async_context(self._lanes.call())
            replies = await self._engine.sample(prompt.token_ids, params, count=1, seeds=seeds)
        if len(replies) != 1:
            raise EngineError(f"the engine gave {len(replies)} replies to one prompt")
        num_tokens = len(prompt_ids) + len(replies[0].token_ids)
        self._lanes.hold(max(num_tokens, self._conversation.num_tokens))  # it may have branches
        return replies[0]
