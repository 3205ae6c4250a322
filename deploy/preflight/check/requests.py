"""Requests to a host's program, and its answers: one line of JSON each."""

from typing import Literal, TypeAlias

import msgspec

from slipstream.deploy.preflight.check.facts import Fact

Way = Literal["gloo", "nccl", "tcp", "disk"]  # transport of tensors


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The run, and which of its processes are to be on this host. Comes first."""

    settings: str  # all settings, in TOML, as the processes there read them
    roles: tuple[str, ...]
    keys_by_run: bool = False  # the run makes the keys of its hosts
    receives: bool = False  # Receive follows: torch is loaded before any deadline runs


class Observe(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Look at the host. Answered with Observed."""


class ReadClock(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answered with Clock."""


class Listen(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Listen for one other host, which is to get weights. Answered with Invitation."""

    way: Way
    address: str  # address of this host
    public_key: str  # key of the other host; unused by gloo and NCCL


class Send(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Send to the one that was invited. Answered with Passage."""


class Receive(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Receive from the host that sent the invitation. Answered with Passage."""

    way: Way
    invitation: "Invitation"
    public_key: str
    secret_key: str


Request: TypeAlias = Begin | Observe | ReadClock | Listen | Send | Receive


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """Properties in which the hosts of a run are compared."""

    device: Literal["cpu", "cuda"]
    libraries: dict[str, str]  # versions by package, without missing ones
    model: dict[str, str]  # digests by part


class Observed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All about one host."""

    hostname: str
    facts: tuple[Fact, ...]
    card: Card | None = None  # None if the settings cannot be used there


class Clock(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The time of the host's clock."""

    unix_s: float


class Invitation(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Where a host listens."""

    address: str
    port: int
    key: str = ""  # key that the host proves


class Passage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How sending or receiving went."""

    interface: str  # interface towards the other host
    num_bytes: int = 0
    seconds: float = 0.0
    failure: str = ""  # empty on success


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Why there is no other answer."""

    why: str


Answer: TypeAlias = Observed | Clock | Invitation | Passage | Refused
