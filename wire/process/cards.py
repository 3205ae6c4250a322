"""What processes on several hosts are called, and compare before they begin."""

import json
from collections.abc import Mapping

_MOST_DIFFERENCES = 3  # in one line


def difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """Return in what another node differs from node 0, the most telling first; empty if in nothing.

    Args:
        ours: of node 0.
        theirs: of the other node.
    """
    names = [*ours, *(name for name in theirs if name not in ours)]
    found = [
        f"{name} is {theirs.get(name, 'unknown') or 'not set'} there, "
        f"expected {ours.get(name, 'nothing') or 'not set'}"
        for name in names
        if ours.get(name) != theirs.get(name)
    ]
    more = len(found) - _MOST_DIFFERENCES
    return "; ".join(found[:_MOST_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")


def flat(name: str, value: object) -> dict[str, str]:
    """Return the values of a section under dotted names."""
    if isinstance(value, dict) and value:
        found: dict[str, str] = {}
        for key in sorted(value):
            found |= flat(f"{name}.{key}", value[key])
        return found
    return {name: value if isinstance(value, str) else json.dumps(value)}


def node_named(node: int, ranks: range, host: str = "") -> str:
    """Return a node as it is called in logs, with its ranks and its host if that is known."""
    first, *others = ranks
    text = f"ranks {first}-{others[-1]}" if others else f"rank {first}"
    return f"node {node} ({f'host {host}, ' if host else ''}{text})"
