"""Gymnasium environments: one that is played in text, and some that cannot be."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

LETTERS = "abcdefghijklmnopqrstuvwxyz "


class Echo(gymnasium.Env[Any, Any]):
    """Says the seed's word backwards; right is what it says, read backwards."""

    def __init__(self, *, most: int = 3) -> None:
        self.observation_space = spaces.Text(99, charset=LETTERS)
        self.action_space = spaces.Text(20, charset=LETTERS)
        self._left = most

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self._word = (options or {}).get("word") or "".join(self.np_random.choice(list("abc"), 5))
        return f"say {self._word} backwards", {}

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._left -= 1
        is_right = action == self._word[::-1]
        return "no", float(is_right), is_right, self._left == 0, {}


class Pictures(Echo):
    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Dict(
            {"said": self.observation_space, "seen": spaces.Box(0, 255, (8, 8, 3), np.uint8)}
        )


class Lies(Echo):
    """Returns other observations than it declares."""

    def __init__(self, *, with_bytes: bool = False) -> None:
        super().__init__()
        self._lie: Any = b"\xff" if with_bytes else np.zeros((2, 2), np.float32)

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return {"said": "x", "seen": self._lie}, *super().step(action)[1:]


class Continuous(Echo):
    def __init__(self) -> None:
        super().__init__()
        self.action_space = spaces.Box(-1.0, 1.0, (2,))


def not_one() -> str:
    return "no environment"
