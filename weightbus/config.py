"""Settings of the weight bus."""

from typing import Literal

from wire.run_settings import AtLeast1, Positive
from wire.settings import Section


class WeightBusSection(Section, frozen=True, kw_only=True):
    """[weightbus]: how versions reach the engines.

    `weightbus.host` is the address that the transfer's store listens on and engines connect to.
    """

    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Carries the buckets; auto is NCCL to an engine on a GPU and gloo to one on a CPU."""
    bucket_bytes: AtLeast1 = 32 * 1024 * 1024
    """Tensors travel in buckets of about this size."""
    timeout_s: Positive = 30.0
    """A member that does not carry out a command in this time is left out."""
    member_silence_s: Positive = 10.0
    """A member that sends no heartbeat for this long is left out."""
    host: str = "127.0.0.1"
    """Interface for the transfer's sockets: a trusted network, they know no authentication."""
