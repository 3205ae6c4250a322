"""Pure: counts of updates in the loaded state of several optimizers."""

from typing import Any

_COUNT = "common_step"  # name in the state that Megatron writes


def share_steps(state: dict[Any, Any]) -> None:
    """Give all of a loaded chain of optimizers the count of updates that the first rank wrote.

    It writes none for experts if none of its layers has any.
    """
    parts = [state] if {"state", "optimizer"} & state.keys() else state.values()
    states = [part.get("optimizer", part).get("state", {}) for part in parts]
    counts = [of_part[_COUNT] for of_part in states if _COUNT in of_part]
    for of_part in states:
        if of_part and counts:
            of_part.setdefault(_COUNT, counts[0])
