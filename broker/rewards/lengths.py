"""Penalties for long answers, in tokens: rewards of 0.0 and less, to be added to another one.

See ``slipstream.broker.rewards.weighted`` for adding them.
"""

from slipstream.broker.rewards.sdk import Transcript, reward


@reward(version="1")
def linear(
    transcript: Transcript, *, per_token: float, free_tokens: int = 0, most: float = 1.0
) -> float:
    """Return ``-min(most, per_token * max(0, n - free_tokens))`` for n response tokens.

    Args:
        transcript: the answer.
        per_token: penalty of one token past the free ones.
        free_tokens: cost nothing.
        most: the largest penalty.

    Raises:
        ValueError: an option is negative.
    """
    if min(per_token, free_tokens, most) < 0:
        raise ValueError(
            "per_token, free_tokens and most must not be negative, got "
            f"{per_token}, {free_tokens} and {most}"
        )
    over = max(0, transcript.num_response_tokens - free_tokens)
    return -min(most, per_token * over)


@reward(version="1")
def overlong(
    transcript: Transcript, *, max_tokens: int, cache_tokens: int, factor: float = 1.0
) -> float:
    """Soft overlong punishment of DAPO (arXiv 2503.14476, equation 13), times ``factor``.

    With n response tokens, ``L_max = max_tokens`` and ``L_cache = cache_tokens`` it is::

        0                               if n <= L_max - L_cache
        ((L_max - L_cache) - n) / L_cache     if L_max - L_cache < n <= L_max
        -1                              if L_max < n

    Args:
        transcript: the answer.
        max_tokens: Length with the full penalty; at most sampling.max_response_tokens, or it is
            never reached.
        cache_tokens: it grows over this many tokens before that.
        factor: the full penalty.

    Raises:
        ValueError: not 0 < cache_tokens <= max_tokens.
    """
    if not 0 < cache_tokens <= max_tokens:
        raise ValueError(
            "cache_tokens must be more than 0 and at most max_tokens, got "
            f"{cache_tokens} and {max_tokens}"
        )
    over = transcript.num_response_tokens - (max_tokens - cache_tokens)
    return -factor * min(1.0, max(0.0, over / cache_tokens))
