"""A generator's interface to an inference engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from slipstream.weightbus.agent.engine import EngineWeights
from slipstream.wire.messages.images import ImageSpan
from slipstream.wire.messages.trajectory import FinishReason, Json
from slipstream.wire.messages.versions import PolicyVersion


class ExpertLayers(NamedTuple):
    """Numbers of layers of a model with experts in some layers."""

    total: int
    dense: int  # first layers, without experts


class PromptImage(NamedTuple):
    """An image of a prompt, and the tokens that stand for it there."""

    span: ImageSpan
    file: Path  # its bytes, on the host of the engine


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one response."""

    temperature: float  # 0.0 is greedy
    max_new_tokens: int
    min_new_tokens: int = 0
    top_p: float = 1.0
    top_k: int = -1  # -1 is all
    min_p: float = 0.0
    max_kept: int = 0  # above 0: record at most this number of kept tokens at each step
    experts_of: ExpertLayers | None = None  # record the experts of each token in these layers
    experts_from: int = 0  # first token whose experts are recorded; at most the prompt's length
    stop: tuple[str, ...] = ()  # a response ends after any of these texts
    stop_token_ids: tuple[int, ...] = ()  # further tokens besides the model's own
    images: tuple[PromptImage, ...] = ()  # the prompt's, in order
    session: str = ""  # trajectory of several turns, whose prefixes stay until ``end_session``


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One response, as the engine reports it."""

    token_ids: list[int]  # N chosen tokens, the end of sequence included
    logprobs: list[float]  # N, of the tempered distribution they were sampled from; see ``kept``
    version_starts: list[tuple[int, PolicyVersion]]  # (index of first token, version), in order
    finish_reason: FinishReason
    kept: list[list[int]] | None = None
    """N sets of token ids that each token was sampled from; ``logprobs`` are then of the
    distribution over these alone. None if they were not requested: ``logprobs`` are then over the
    whole vocabulary, whatever part of it was sampled from."""
    experts: NDArray[np.int32] | None = None
    """[P + N - 1 - experts_from, layers with experts, experts of a token], for each token of prompt
    and response from ``experts_from`` on but the last, for which nothing was computed. None if they
    were not requested."""


class Scores(NamedTuple):
    """Log-probabilities that an engine computes of given tokens."""

    version: PolicyVersion | None  # None: the sequences were computed under several
    logprobs: list[list[float]]  # each sequence's tokens after its context, at temperature 1
    num_cached: int  # most tokens of one sequence in the prefix cache


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """Load of an engine; some of it may be a few tokens old."""

    num_running: int  # sequences that are being generated
    num_waiting: int  # queued sequences, which hold no keys and values
    used_tokens: int  # tokens of running sequences in the cache, without cached prefixes
    capacity_tokens: int  # capacity of the cache
    num_retractions: int  # sequences whose keys and values were given up for lack of memory

    @property
    def kv_use(self) -> float:
        """Share of the cache that is in use, 0 to 1."""
        return self.used_tokens / self.capacity_tokens


class InferenceEngine(EngineWeights, Protocol):
    """An engine that samples, and whose weights can be replaced meanwhile."""

    async def sample(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        count: int,
        seeds: Sequence[int] = (),
    ) -> list[Completion]:
        """Return ``count`` independent responses to one prompt, when all are finished.

        ``seeds`` are 63-bit, one per response, or none.

        Raises EngineError if the engine fails. Cancelling the call ends the generation.
        """
        ...

    def end_session(self, session: str) -> None:
        """Release the prefixes of a trajectory, which gets no more responses; waits for nothing.

        Until then the cache gives up prefixes without a session first. It keeps no session alive:
        one that does not fit is computed again. A failure is logged.
        """
        ...

    async def tool_calls(
        self, text: str, tools: Sequence[Json], parser: str
    ) -> tuple[str, list[dict[str, Json]], int]:
        """Return a reply's text without its calls of tools, and those as of OpenAI's API.

        The third value is how many calls remain in the text, because the parser cannot read them;
        names need not be those of the tools. Raises EngineError if there is no such parser.
        """
        ...

    async def separate_reasoning(self, text: str, parser: str) -> tuple[str, str]:
        """Return the thought that a reply begins with, and the rest of it.

        Raises EngineError if there is no such parser.
        """
        ...

    async def load(self) -> EngineLoad:
        """Return the engine's load without delay, even while it is paused.

        Sequences that a pause gives up are not retractions. Raises EngineError without an answer.
        """
        ...
