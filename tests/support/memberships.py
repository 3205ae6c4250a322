"""Memberships of hosts that meet in tests."""

from collections.abc import Mapping

from slipstream.weightbus.hosts.membership import HostPlace, Membership
from slipstream.wire.files.keys import ClientKey
from slipstream.wire.settings.rendezvous import Address
from tests.support.bus.remote import client_key
from tests.support.waiting import NEVER_S

KEY = client_key("gpu-7")


def membership(
    node: int,
    nodes: int = 2,
    ranks: int = 1,
    *,
    facts: Mapping[str, str],
    address: Address = Address("10.0.0.1", 29500),  # noqa: B008 a tuple
    key: ClientKey = KEY,
    silence_s: float = NEVER_S,
    rendezvous_timeout_s: float = NEVER_S,
) -> Membership:
    """Return a membership of an engine's host."""
    return Membership(
        place=HostPlace(node, nodes, ranks, address),
        facts=facts,
        key=key,
        section="generators",
        option="--follow",
        refusal="be a node of the engine of",
        advice="start it",
        key_source="run.key_file",
        rendezvous_timeout_s=rendezvous_timeout_s,
        silence_s=silence_s,
    )
