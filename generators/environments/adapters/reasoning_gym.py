"""Problems of reasoning-gym in several tries, each scored by the data set's own scorer.

[data.sources.sums]
reasoning_gym = "chain_sum"

[environment]
function = "slipstream.generators.environments.adapters.reasoning_gym:Tries"
options = { tries = 3, discount = 0.8 }
"""

from typing import Any

from typing_extensions import override

from slipstream.broker.data.gym import ENTRY_KEY, NAME_KEY, verifier
from slipstream.broker.rewards.reasoning_gym import score
from slipstream.generators.environments.sdk import Environment, Messages, Prompt, Reply, Step

_RIGHT = 0.999
_ANY_DATA_SET = "chain_sum"  # any name imports the library
_FEEDBACK = "That is not right. Try again: {left} more."


class Tries(Environment):
    """One problem, answered until an answer is right or there are no more tries."""

    def __init__(
        self,
        *,
        tries: int = 3,
        discount: float = 1.0,
        enough: float = 1.0,
        feedback: str = _FEEDBACK,
    ) -> None:
        """Prepare.

        Args:
            tries: Most answers.
            discount: Factor of the last answer's score for each answer before it.
            enough: Score that ends the trajectory.
            feedback: Text after a lower score; ``{left}`` is the number of remaining tries and
                ``{score}`` the score.

        Raises:
            ValueError: an option is out of its range.
            KeyError: ``feedback`` names something else.
        """
        if tries < 1:
            raise ValueError(f"tries: expected 1 or more, got {tries}")
        if not 0.0 < discount <= 1.0:
            raise ValueError(f"discount: expected more than 0, at most 1, got {discount}")
        feedback.format(left=1, score=0.0)
        self._left, self._discount = tries, discount
        self._enough, self._feedback = min(enough, _RIGHT), feedback
        self._num_tries = 0

    @classmethod
    @override
    def prepare(cls, **options: Any) -> None:
        """Check the options, and import the library."""
        cls(**options)
        verifier(_ANY_DATA_SET, {})

    @override
    async def reset(self, prompt: Prompt) -> Messages:
        """Ask the question.

        Raises:
            ValueError: the prompt is not from reasoning-gym.
        """
        if not {NAME_KEY, ENTRY_KEY} <= prompt.extra_info.keys():
            raise ValueError(
                f"extra_info of the prompt holds no {NAME_KEY} and {ENTRY_KEY}: expected one of "
                "a source with data.sources.NAME.reasoning_gym"
            )
        self._prompt = prompt
        return await super().reset(prompt)

    @override
    async def step(self, reply: Reply) -> Step:
        """Score an answer."""
        asked = self._prompt
        scored = score(asked.data_source, reply.text, asked.ground_truth, asked.extra_info)
        value = scored["score"]
        self._num_tries += 1
        self._left -= 1
        parts = {"tries": float(self._num_tries), "score": value}
        if value < self._enough and self._left > 0:
            feedback = self._feedback.format(left=self._left, score=value)
            return Step(messages=feedback, reward=0.0, parts=parts)
        discounted = value * self._discount ** (self._num_tries - 1)
        return Step(reward=discounted, done=True, parts=parts)
