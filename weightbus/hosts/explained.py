"""Waits for a better reason than its own, once a part of a host has failed."""

from dataclasses import replace

from slipstream.weightbus.hosts.follower import HostFollower
from slipstream.weightbus.hosts.leader import HostLeader
from slipstream.weightbus.hosts.verdict import (
    EXPLAIN_S,
    SETTLE_S,
    HostEnd,
    HostView,
    is_of_peers,
    verdict_of,
)
from slipstream.wire.process.patience import Patience


async def explained(link: HostLeader | HostFollower, own: str, failed: str) -> HostEnd:
    """Return the end that made a part of this host fail.

    Args:
        link: Link to the other nodes.
        own: Reason that the part gives.
        failed: What failed, for a node that is silent.
    """
    is_caused = is_of_peers(own)
    limit_s = SETTLE_S + (EXPLAIN_S if is_caused else 0.0)
    patience = Patience("a reason of another node", limit_s)

    def view() -> HostView:
        return replace(link.view(failed), own=own, own_is_caused=is_caused, is_final=True)

    while not (patience.is_over() or view().known or view().reported or view().silent):
        await link.next_change()
    return verdict_of(view()) or HostEnd(view().node, own)
