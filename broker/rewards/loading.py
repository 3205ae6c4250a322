"""Find a reward function by name, and turn what it returns into a score that can be trusted."""

import importlib
import importlib.util
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from wire.control import ScoringItem
from wire.errors import ConfigError
from wire.trajectory import Json, Score, Transcript

RewardResult = float | int | bool | Mapping[str, float]
RewardFunction = Callable[[str, str, Json, Mapping[str, Json]], RewardResult]


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward function and its identity, which goes on every score."""

    name: str
    function: RewardFunction

    def score(self, item: ScoringItem, transcript: Transcript) -> Score:
        """Score one trajectory. Whatever goes wrong is ``unavailable``, never a reward of 0."""
        prompt = transcript.prompt
        try:
            result = self.function(
                prompt.data_source, transcript.response, prompt.ground_truth, prompt.extra_info
            )
        except (Exception, SystemExit) as error:  # noqa: BLE001 foreign code may raise anything
            return self._unavailable(item, f"raised {type(error).__name__}: {error}")
        parts: dict[object, object] = {}
        value: object = result
        if isinstance(result, Mapping):
            parts.update(result)
            value = parts.get("score")
        reward = _finite(value)
        if reward is None:
            return self._unavailable(item, f"invalid: returned {result!r}"[:500])
        numbers = {name: _finite(part) for name, part in parts.items() if isinstance(name, str)}
        return Score(
            group_id=item.group_id,
            sibling=item.sibling,
            lease_id=item.lease_id,
            reward=reward,
            parts={name: part for name, part in numbers.items() if part is not None},
            function=self.name,
        )

    def _unavailable(self, item: ScoringItem, reason: str) -> Score:
        return Score(
            group_id=item.group_id,
            sibling=item.sibling,
            lease_id=item.lease_id,
            unavailable=reason,
            function=self.name,
        )


def _finite(value: object) -> float | None:
    """Return a number as a float; None for anything else, NaN, infinities and what overflows."""
    if not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def load_reward(name: str) -> Reward:
    """Return the function that ``MODULE:FUNCTION`` or ``FILE.py:FUNCTION`` names.

    Raises:
        ConfigError: there is no such module, file or function.
    """
    where, colon, attribute = name.rpartition(":")
    if not (colon and where and attribute):
        raise ConfigError(f"reward.function {name!r} is not MODULE:FUNCTION or FILE.py:FUNCTION")
    try:
        module = _load_file(Path(where)) if where.endswith(".py") else _load_module(where)
        function = getattr(module, attribute)
    except Exception as error:
        raise ConfigError(
            f"cannot load reward.function {name!r}: {type(error).__name__}: {error}"
        ) from error
    if not callable(function):
        raise ConfigError(f"reward.function {name!r} is not callable")
    return Reward(name, function)


def _load_module(name: str) -> ModuleType:
    return importlib.import_module(name)


def _load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
