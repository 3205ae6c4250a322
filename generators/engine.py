"""What a generator needs from an inference engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from weightbus.engine import EngineWeights
from wire.trajectory import FinishReason
from wire.versions import PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one response is sampled."""

    temperature: float  # 0.0 is greedy
    max_new_tokens: int
    min_new_tokens: int = 0
    top_p: float = 1.0
    top_k: int = -1  # -1 is all
    stop: tuple[str, ...] = ()  # a response ends after any of these texts
    stop_token_ids: tuple[int, ...] = ()  # besides the model's own


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One response, as the engine reports it."""

    token_ids: list[int]  # N chosen tokens, the end of sequence included
    logprobs: list[float]  # N, of the tempered distribution they were sampled from
    version_starts: list[tuple[int, PolicyVersion]]  # (index of first token, version), in order
    finish_reason: FinishReason
    num_retractions: int = 0  # times its keys and values were given up for want of memory


class InferenceEngine(EngineWeights, Protocol):
    """An engine that samples, and whose weights can be exchanged while it does."""

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

        Raises EngineError when the engine gives none. Cancelling the call ends the generation.
        """
        ...
