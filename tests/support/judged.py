"""Transcripts, and what a built-in reward makes of them."""

import asyncio
from collections.abc import Awaitable

from slipstream.broker.rewards.loading import load_function
from slipstream.broker.rewards.outcomes import RewardOutcome, failure, outcome_of
from slipstream.broker.rewards.sdk import Transcript
from slipstream.wire.messages.trajectory import Json, Prompt

WEIGHTED = "slipstream.broker.rewards.weighted:Weighted"
RIGHT = {"function": "slipstream.broker.rewards.numeric:score"}


LONG = {
    "function": "slipstream.broker.rewards.lengths:overlong",
    "weight": 0.5,
    "options": {"max_tokens": 10, "cache_tokens": 10},
}


def transcript(response: str, truth: Json = "", *, tokens: int = 10) -> Transcript:
    return Transcript(
        prompt=Prompt(prompt="how much?", ground_truth=truth),
        response=response,
        num_response_tokens=tokens,
        finish_reason="stop",
    )


def outcome(name: str, answer: Transcript, **options: Json) -> RewardOutcome:
    """Load a reward as a child does, and call it."""
    function = load_function(name, options)
    try:
        result = function.call([answer])
        if isinstance(result, Awaitable):
            result = asyncio.run(_awaited(result))
        return outcome_of(result, len(answer.turns))
    except Exception as error:  # noqa: BLE001 as a child
        return failure(error)


async def _awaited(result: Awaitable[object]) -> object:
    return await result
