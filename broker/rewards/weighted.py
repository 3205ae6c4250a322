"""A sum of several rewards, each with a weight and each a metric.

[reward]
function = "slipstream.broker.rewards.weighted:Weighted"

[reward.options]
shaping = ["overlong"]

[reward.options.parts.right]
function = "slipstream.broker.rewards.numeric:score"

[reward.options.parts.overlong]
function = "slipstream.broker.rewards.lengths:overlong"
weight = 0.5
options = { max_tokens = 4096, cache_tokens = 512 }
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from slipstream.broker.rewards.loading import RewardFunction, load_function, load_reader
from slipstream.broker.rewards.outcomes import RewardOutcome, failure, outcome_of
from slipstream.broker.rewards.sdk import Reader, Transcript, Unavailable, reward
from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.trajectory import Json

_RESERVED = ("score", "unshaped", "turn_rewards")
_Sum = dict[str, float | list[float]]
_SETTING = "reward.options.parts"
_VERSION_DIGITS = 12


class PartTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One reward of the sum."""

    function: str  # MODULE:NAME or FILE.py:NAME; takes answers
    weight: float = 1.0
    options: dict[str, Json] = {}  # keyword arguments


@dataclass(frozen=True, slots=True)
class _Part:
    name: str
    weight: float
    function: RewardFunction


@reward()
class Weighted:
    """The reward is the sum of ``weight * part``.

    Metrics: every part by its name and without its weight, the parts of a part as
    ``name.its_part``, and ``unshaped``, the sum without the ones that ``shaping`` names:
    ``broker.zero_variance_of = "unshaped"`` keeps penalties from hiding that all siblings are
    right, or wrong. Rewards of turns are those of the parts that give any, added with their
    weights; what the sum has beyond them belongs to no turn. While one part is unavailable, the sum
    is. Its version is a hash of the names, versions and weights of its parts.
    """

    score: Callable[[Transcript], _Sum | Awaitable[_Sum]]

    def __init__(
        self,
        *,
        parts: Mapping[str, Mapping[str, Json]],
        shaping: Sequence[str] = (),
        sandbox: str = "namespaces",
    ) -> None:
        """Load the parts.

        Args:
            parts: Tables by name: function, weight (1.0) and options.
            shaping: names of parts that are penalties or the like.
            sandbox: reward.sandbox, for parts that run code.

        Raises:
            ConfigError: a part cannot be loaded, or ``shaping`` names none.
        """
        if not parts:
            raise ConfigError(f"{_SETTING} is empty: name at least one reward")
        unknown = set(shaping) - set(parts)
        if isinstance(shaping, str) or unknown:
            raise ConfigError(
                f"reward.options.shaping must be a list of names out of {sorted(parts)}, "
                f"got {shaping!r}"
            )
        self._shaping = frozenset(shaping)
        self._parts = [_load(name, table, {"sandbox": sandbox}) for name, table in parts.items()]
        described = [
            (part.name, part.function.info.name, part.function.info.version, part.weight)
            for part in self._parts
        ]
        digest = hashlib.sha256(msgspec.json.encode(described)).hexdigest()
        self.version = digest[:_VERSION_DIGITS]
        is_async = any(part.function.is_async for part in self._parts)
        self.score = self._score_together if is_async else self._score_in_turn

    @classmethod
    def reader(cls, *, parts: Mapping[str, Mapping[str, Json]], **_: Json) -> Reader:
        """Return what reads a row for all parts."""
        readers = []
        for name, part in parts.items():
            setting = f"{_SETTING}.{name}"
            table = _table(part, setting)
            readers.append(load_reader(table.function, table.options, setting=setting))
        return lambda prompt: [read(prompt) for read in readers if read is not None]

    async def close(self) -> None:
        """Close all parts."""
        for part in self._parts:
            result = part.function.close()
            if isinstance(result, Awaitable):
                await result

    def _score_in_turn(self, transcript: Transcript) -> _Sum:
        outcomes = []
        for part in self._parts:
            try:
                outcome = outcome_of(part.function.call([transcript]), len(transcript.turns))
            except Exception as error:  # noqa: BLE001 foreign code may raise anything
                outcome = failure(error)
            _check(part, outcome)
            outcomes.append(outcome)
        return self._sum(outcomes)

    async def _score_together(self, transcript: Transcript) -> _Sum:
        outcomes = await asyncio.gather(*(_outcome(part, transcript) for part in self._parts))
        for part, outcome in zip(self._parts, outcomes, strict=True):
            _check(part, outcome)
        return self._sum(outcomes)

    def _sum(self, outcomes: Sequence[RewardOutcome]) -> _Sum:
        total = unshaped = 0.0
        values: dict[str, float] = {}
        details: dict[str, float] = {}
        for part, outcome in zip(self._parts, outcomes, strict=True):
            value = outcome.reward if outcome.reward is not None else 0.0  # checked before
            total += part.weight * value
            if part.name not in self._shaping:
                unshaped += part.weight * value
            inner = outcome.parts.items()
            details |= {f"{part.name}.{key}": number for key, number in inner if key != "score"}
            values[part.name] = value
        # In this order: of very many parts the first are kept.
        found: _Sum = {"score": total, "unshaped": unshaped, **values}
        found |= {key: number for key, number in details.items() if key not in values}
        by_turn = [
            [part.weight * reward for reward in outcome.turn_rewards]
            for part, outcome in zip(self._parts, outcomes, strict=True)
            if outcome.turn_rewards
        ]
        if by_turn:
            found["turn_rewards"] = [sum(rewards) for rewards in zip(*by_turn, strict=True)]
        return found


async def _outcome(part: _Part, transcript: Transcript) -> RewardOutcome:
    try:
        result = part.function.call([transcript])
        value = await result if isinstance(result, Awaitable) else result
        return outcome_of(value, len(transcript.turns))
    except Exception as error:  # noqa: BLE001 foreign code may raise anything
        return failure(error)


def _check(part: _Part, outcome: RewardOutcome) -> None:
    if outcome.reward is None:
        raise Unavailable(f"{part.name}: {outcome.unavailable}")


def _load(name: str, given: Any, offered: Mapping[str, Json]) -> _Part:  # noqa: ANN401
    setting = f"{_SETTING}.{name}"
    if name in _RESERVED:
        raise ConfigError(f"{setting}: a part must not be called {' or '.join(_RESERVED)}")
    table = _table(given, setting)
    function = load_function(table.function, table.options, setting=setting, offered=offered)
    if function.info.takes != "answer":
        raise ConfigError(
            f"{setting}.function {table.function!r} takes a {function.info.takes}, "
            "expected one that takes an answer"
        )
    return _Part(name, table.weight, function)


def _table(given: Any, setting: str) -> PartTable:  # noqa: ANN401
    try:
        return msgspec.convert(given, PartTable)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{setting}: {error}") from error
