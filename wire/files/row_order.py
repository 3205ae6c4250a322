"""The order in which rows of a file are taken, epoch by epoch."""

import random
from collections.abc import Sequence


def row_order(key: str, size: int, *, shuffles: bool) -> Sequence[int]:
    """Return the rows of an epoch in their order; the key, such as SEED/EPOCH, decides it."""
    if not shuffles:
        return range(size)
    order = list(range(size))
    random.Random(key).shuffle(order)  # noqa: S311 not for secrets
    return order
