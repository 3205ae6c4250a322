"""Settings of the weight bus."""

from typing import Literal

from wire.run_settings import AtLeast0, AtLeast1, Positive
from wire.settings import Section


class WeightBusSection(Section, frozen=True, kw_only=True):
    """[weightbus]: how versions reach the engines.

    A generator chooses its own `weightbus.transport`, so that one run may mix them.
    `weightbus.host` is the address that a collective's store listens on and engines connect to.
    See [weight-bus.md](weight-bus.md).
    """

    transport: Literal["collective", "tcp", "disk"] = "collective"
    """collective writes into the engine while it is paused; tcp and disk load a version that
    was received and checked before."""
    in_flight: Literal["retract", "in_place"] = "retract"
    """What a pause does to answers in the making: retract computes their keys and values again
    under the new weights, in_place keeps them and turns the prefix cache off."""
    engine_check_every: AtLeast0 = 1
    """Compare every tensor in an engine with the learner's before every Nth version is committed;
    0 is never."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Carries the buckets of a collective; auto is NCCL to an engine on a GPU and gloo to one on
    a CPU."""
    engines_per_group: AtLeast1 = 1
    """Engines that share one collective; with 1, a death concerns nobody else."""
    bucket_bytes: AtLeast1 = 64 * 1024 * 1024
    """Tensors travel in buckets of about this size."""
    timeout_s: Positive = 30.0
    """A member that does not carry out a command in this time is left out."""
    receive_timeout_s: Positive = 300.0
    """A member that has not received a whole version in this time, by tcp or from disk, or not
    loaded it, is left out."""
    member_silence_s: Positive = 10.0
    """A member that sends no heartbeat for this long is left out."""
    host: str = "127.0.0.1"
    """Interface of a collective's sockets: a trusted network, they know no authentication."""
    listen: str = ""
    """Where the relay listens for generators on other hosts, tcp://ADDRESS:PORT; buckets take the
    port after it. They need keys. Empty is nowhere."""
    folder: str = ""
    """Where the disk transport writes versions, in a folder of the run's name, seen by every host;
    empty is DIR/NAME/weights."""
    linger_s: Positive = 60.0
    """The relay outlives a learner that died for so long."""
