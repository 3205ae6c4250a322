"""An environment whose module has started threads: those of a library of linear algebra."""

import numpy as np

from slipstream.generators.environments.sdk import Environment, Reply, Step
from slipstream.wire.messages.trajectory import Prompt

SIZE = 700
ONES = np.ones((SIZE, SIZE))
PRODUCT = ONES @ ONES


class Multiplies(Environment):
    """Multiplies matrices that are large enough for threads."""

    async def reset(self, prompt: Prompt) -> str:
        return prompt.text

    async def step(self, reply: Reply) -> Step:
        return Step(
            done=True, reward=float(bool(reply.text) and np.array_equal(ONES @ ONES, PRODUCT))
        )
