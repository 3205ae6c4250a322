"""An environment that answers a fixed number of times, each after a while."""

import asyncio

from typing_extensions import override

from slipstream.generators.environments.sdk import Environment, Reply, Step


class Scripted(Environment):
    """Answers ``turns - 1`` times, then ends."""

    def __init__(self, turns: int, latency_s: float) -> None:
        """Let each answer take ``latency_s``."""
        self._left = turns
        self._latency_s = latency_s

    @override
    async def step(self, reply: Reply) -> Step:
        self._left -= 1
        await asyncio.sleep(self._latency_s)
        return Step(messages="12+34=", reward=0.0, done=not self._left)
