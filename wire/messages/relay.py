"""Messages between the learner's rank 0 and its relay, over a Unix socket. No tensor is in them.

Weights are in a memory that the learner owns and the relay maps: some slots of equal size, each for
one version. A slot is written between ``Reserve`` and ``Written`` and at no other time. Everything
carries the learner's epoch: once a newer learner has opened its memory, an older one is refused.

A learner on several hosts has such a memory and such a relay, a part, on each of them. The slots of
all have the same numbers: the head relay chooses one, and each host's first rank tells its part.
"""

from typing import TypeAlias

import msgspec

from slipstream.wire.messages.bounds import Count, Name, Several, Text
from slipstream.wire.messages.manifest import WeightManifest
from slipstream.wire.messages.probe import ProbeLogprobs
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import RelayAddress


class RelayMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=str.lower):
    """Base of all messages between learner and relay."""


class OpenMemory(RelayMessage, frozen=True):
    """Serve the versions written here; ``whole`` names one already present."""

    epoch: Count
    paths: Several[Text]  # path of each slot
    layout: WeightManifest  # names, types, shapes and buckets; its version means nothing
    whole: PolicyVersion | None = None
    slot: Count = 0  # slot of the whole version
    run_id: Name = ""  # id in the run folder's identity.json
    probe: ProbeLogprobs | None = None  # probe of the whole version
    part: Count = 0  # number of the host whose buckets of the layout are in this memory
    part_keys: Several[Name] = ()  # public keys that the relays of parts 1, 2, ... prove


class ServeHead(RelayMessage, frozen=True):
    """To a part relay: the address of the head relay, and the key to prove there."""

    epoch: Count
    head: RelayAddress
    public: Name
    secret: Name


class Writing(RelayMessage, frozen=True):
    """To a part relay: this slot is about to be written, and holds no version any more."""

    epoch: Count
    slot: Count


class Reserve(RelayMessage, frozen=True):
    """Request for the next slot to write."""

    epoch: Count


class Written(RelayMessage, frozen=True):
    """The slot holds the whole version."""

    epoch: Count
    version: PolicyVersion
    slot: Count
    probe: ProbeLogprobs | None = None


class Alive(RelayMessage, frozen=True):
    """Heartbeat of the learner."""


class EndRelay(RelayMessage, frozen=True):
    """No version will follow, and none is needed any more."""

    epoch: Count


class Reserved(RelayMessage, frozen=True):
    """The answer to Reserve."""

    slot: Count


class Ok(RelayMessage, frozen=True):
    """The answer to all other requests; ``error`` is why it was not done."""

    error: Text = ""
    superseded: bool = False  # a newer learner uses this relay
    pid: Count = 0  # process id of the relay
    door: RelayAddress | None = None  # address for other hosts


RelayRequest: TypeAlias = OpenMemory | ServeHead | Writing | Reserve | Written | Alive | EndRelay
RelayAnswer: TypeAlias = Reserved | Ok
