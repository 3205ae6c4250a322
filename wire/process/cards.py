"""Names of processes on several hosts, and their comparison before they begin."""

import json
from collections.abc import Mapping

_MOST_DIFFERENCES = 3  # in one line


def difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """Return how another node differs from node 0, most telling first; empty if it does not.

    Args:
        ours: Settings of node 0.
        theirs: Settings of the other node.
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
    """Return a node's name for logs, with its ranks and, if known, its host."""
    first, *others = ranks
    text = f"ranks {first}-{others[-1]}" if others else f"rank {first}"
    return f"node {node} ({f'host {host}, ' if host else ''}{text})"
