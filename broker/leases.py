"""What leases of generation and of scoring have in common."""

from collections.abc import Iterable, Mapping
from typing import Protocol


class Held(Protocol):
    """Work in somebody's hands until a deadline."""

    holder: str
    expires_s: float


def extend(
    leases: Mapping[int, Held], holder: str, lease_ids: Iterable[int], *, expires_s: float
) -> list[int]:
    """Move the deadline of a holder's leases; return those that it no longer has."""
    lost = []
    for lease_id in lease_ids:
        lease = leases.get(lease_id)
        if lease is None or lease.holder != holder:
            lost.append(lease_id)
        else:
            lease.expires_s = expires_s
    return lost
