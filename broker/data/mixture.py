"""Pure: the endless sequence of training prompts, as a function of seed and position."""

import hashlib
import random
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, chain

import msgspec

from slipstream.wire.errors import ConfigError
from slipstream.wire.files.row_order import row_order
from slipstream.wire.messages.trajectory import Prompt

BLOCK = 1000  # positions in which weighted sources get their shares exactly


class PromptSource:
    """Prompts by position. The prompt at a position depends on the seed and the position alone.

    Without weights every row comes once per epoch, whatever its source. With weights each
    source has epochs of its own, and every block of positions holds each in its share.
    """

    def __init__(
        self,
        sources: Sequence[Sequence[Prompt]],
        *,
        seed: int,
        weights: Sequence[float] = (),
        shuffle: bool = True,
        num_skipped: int = 0,
    ) -> None:
        self._sources = sources
        self._seed = seed
        self._shuffle = shuffle
        self.num_skipped = num_skipped
        self.num_rows = sum(len(source) for source in sources)
        self._ends = list(accumulate(len(source) for source in sources))
        self._counts = shares(weights, BLOCK) if weights else []
        self._order = lru_cache(maxsize=2 + 2 * len(sources))(self._ordered)
        self._places = lru_cache(maxsize=2)(self._places_of_block)

    def fingerprint(self) -> str:
        """Return a hash of all prompts and of everything that decides their order."""
        order = (self._seed, self._shuffle, self._counts)
        return fingerprint_of([order, *self._sources])

    def rows(self) -> Iterator[Prompt]:
        """Yield every prompt once, one source after the other."""
        return chain.from_iterable(self._sources)

    def at(self, cursor: int) -> Prompt:
        """Return the prompt at a position."""
        if not self._counts:
            epoch, index = divmod(cursor, self.num_rows)
            row = self._order(f"{self._seed}/{epoch}", self.num_rows)[index]
            source = bisect_right(self._ends, row)
            return self._sources[source][row - self._ends[source]]
        block, place = divmod(cursor, BLOCK)
        source, before = self._places(block)[place]
        rows = self._sources[source]
        epoch, index = divmod(block * self._counts[source] + before, len(rows))
        return rows[self._order(f"{self._seed}/{source}/{epoch}", len(rows))[index]]

    def _ordered(self, key: str, size: int) -> Sequence[int]:
        return row_order(key, size, shuffles=self._shuffle)

    def _places_of_block(self, block: int) -> list[tuple[int, int]]:
        """Return (source, how many of it came before in this block) by place."""
        sources = [s for s, count in enumerate(self._counts) for _ in range(count)]
        random.Random(f"{self._seed}/block/{block}").shuffle(sources)  # noqa: S311
        seen = [0] * len(self._counts)
        places = []
        for source in sources:
            places.append((source, seen[source]))
            seen[source] += 1
        return places


def fingerprint_of(values: Iterable[object]) -> str:
    """Return a hash of values that MessagePack can hold."""
    digest = hashlib.sha256()
    for value in values:
        digest.update(msgspec.msgpack.encode(value))
    return digest.hexdigest()[:16]


def shares(weights: Sequence[float], total: int) -> list[int]:
    """Divide ``total`` in proportion to weights; the largest rounding loss gets the rest."""
    whole = sum(weights)
    exact = [total * weight / whole for weight in weights]
    counts = [int(share) for share in exact]
    by_loss = sorted(range(len(weights)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_loss[: total - sum(counts)]:
        counts[i] += 1
    return counts


def checked_weights(weights: dict[str, float], setting: str) -> list[float]:
    """Return the weights, or nothing when no source has one.

    Raises:
        ConfigError: some have one and some do not, or one is too small to count.
    """
    if not any(weights.values()):
        return []
    without = [name for name, weight in weights.items() if weight == 0]
    if without:
        raise ConfigError(
            f"{setting}.{without[0]}.weight is not set, but other sources have a weight: "
            "give one to all or to none"
        )
    for name, count in zip(weights, shares(list(weights.values()), BLOCK), strict=True):
        if count == 0:
            raise ConfigError(
                f"{setting}.{name}.weight = {weights[name]:g} is less than 1/{BLOCK} of the whole"
            )
    return list(weights.values())
