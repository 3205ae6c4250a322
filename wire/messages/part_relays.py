"""Messages between the head relay and the part relays of a learner on several hosts. Over CURVE.

Every host of the learner has the tensors that it writes in a memory of its own, and a part relay
that serves them. The head, on the first host, alone runs transactions: a version exists when every
part has reported it whole. Before a transaction the head holds the version at every part.
"""

from typing import Annotated, TypeAlias

import msgspec

from slipstream.wire.messages.bounds import ById, ByName, Count, Name, Several, Text
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import BulkDoor, NumRanks

PartNumber = Annotated[int, msgspec.Meta(ge=1, le=100_000)]  # 0 is the head's own
Word = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]


class PartMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=str.lower):
    """Base of all messages between head and parts."""


# ---- part to head ------------------------------------------------------------


class PartState(PartMessage, frozen=True):
    """A part and the versions that are whole there; its heartbeat, and sent when one is."""

    part: PartNumber
    epoch: Count  # epoch of the learner that writes there
    incarnation: Name  # differs after each restart of the part relay
    door: BulkDoor  # address of its buckets
    whole: Several[PolicyVersion]
    keys_digest: Name = ""  # digest of its admitted keys; empty before the first PartHeard
    held: Several[PolicyVersion] = ()  # versions held for the head that it heard last


class PartHeld(PartMessage, frozen=True):
    """The answer to Hold, once the digests of the part's tensors are known."""

    command_id: Count
    error: Text = ""  # it is not whole there, or no longer
    digests: ByName[Name] = {}  # digests of the part's tensors, by name


class HashPart(msgspec.Struct, frozen=True, kw_only=True):
    """Share of a run of bytes in an engine's checksum: few numbers, whatever their length."""

    total: Count  # bytes of the engine's tensor
    num_bytes: Count  # bytes that are here
    # Upper and lower word of tiles with all their words, mixed and added (version/gpu_hash.py).
    whole: tuple[Word, Word]
    edges: ById[tuple[Word, Word]] = {}  # both sums of the words of other tiles, by their index
    cut: ById[Word] = {}  # bytes that are here of words that are not whole, by their number


class PartHashed(PartMessage, frozen=True):
    """The answer to Hash."""

    command_id: Count
    error: Text = ""  # it is not held there, or could not be computed
    hashes: ByName[Several[HashPart]] = {}  # runs of bytes by the checksum's name


# ---- head to part ------------------------------------------------------------


class PartHeard(PartMessage, frozen=True):
    """The answer to a heartbeat."""

    relay: Name  # differs after each restart of the head
    # Digest of the admitted keys; empty until this head has heard from the broker.
    keys_digest: Name = ""
    # Those, public key -> name, where the part reported another digest; None: it has them.
    generator_keys: ByName[Name] | None = None


class Hold(PartMessage, frozen=True):
    """Keep a version until it is released: engines are about to fetch it."""

    command_id: Count
    epoch: Count
    version: PolicyVersion


class Hash(PartMessage, frozen=True):
    """Compute this part's share in what engines on GPUs must hold of a version that it holds."""

    command_id: Count
    version: PolicyVersion
    num_ranks: NumRanks  # ranks that share an engine's tensors
    attention_groups: NumRanks
    expert_groups: NumRanks | msgspec.UnsetType = msgspec.UNSET  # unset is one


class Release(PartMessage, frozen=True):
    """No engine fetches this version any more."""

    epoch: Count
    version: PolicyVersion


PartReport: TypeAlias = PartState | PartHeld | PartHashed
HeadCommand: TypeAlias = PartHeard | Hold | Hash | Release
