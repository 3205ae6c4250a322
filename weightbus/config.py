"""Settings of the weight bus."""

from ipaddress import IPv4Address, ip_address
from typing import Annotated, Literal

import msgspec

from slipstream.weightbus.transports import AUTO, TRANSPORTS, check_transport
from slipstream.wire.errors import ConfigError
from slipstream.wire.settings.load import Section, Table, section
from slipstream.wire.settings.lora import lora_section
from slipstream.wire.settings.sections import AtLeast0, AtLeast1, NotNegative

# Libraries hold times in 64 bits, in nanoseconds or finer.
Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
NumConnections = Annotated[int, msgspec.Meta(ge=0, le=256)]  # each has a thread
ProbeTokens = Annotated[int, msgspec.Meta(ge=8)]
_TCP = "tcp://"
_MAX_PORT = 65_534  # buckets take the one after it


class WeightBusSection(Section, frozen=True, kw_only=True):
    """[weightbus]: how versions reach the engines.

    A generator chooses its own `weightbus.transport`, so that one run may mix them.
    `weightbus.host` is the address that a collective's store listens on and engines connect to.
    See [weight-bus.md](weight-bus.md).
    """

    transport: str = AUTO
    """`auto` is tcp. `collective` writes into the engine while it is paused; `tcp` and `disk` load
    a version that was received and checked before, for which the engine's host needs memory."""
    precision: Literal["trained", "fp8"] = "trained"
    """Weights of the engines: as the learner trains them, or the matrices of its layers in fp8, in
    blocks of 128 x 128 (e4m3), quantized as a version is written: half of the bytes to send and to
    hold. Engines then sample from another policy than is trained, which importance weights correct:
    see `staleness/mismatch_kl@lag0`."""
    in_flight: Literal["retract", "in_place"] = "retract"
    """Effect of a pause on unfinished answers: retract recomputes their keys and values under the
    new weights, in_place keeps them and disables the prefix cache."""
    engine_check_every: AtLeast0 = 1
    """Compare every tensor in an engine with the learner's before every Nth version is committed;
    0 is never."""
    probe_every: AtLeast0 = 1
    """Publish every Nth version with the learner's logprobs of a few fixed sequences, and compare
    those of each engine that adopts it; 0 is never."""
    probe_sequences: AtLeast1 = 4
    """Sequences of a probe."""
    probe_tokens: ProbeTokens = 48
    """Random tokens of each, or as many as the model has positions; half of them are context."""
    probe_limit: NotNegative = 0.0
    """Mean difference of logprobs, in nats, that is never taken for noise: 0 is 0.02 in float32,
    0.3 in bfloat16 and 0.5 in fp8."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Carries the buckets of a collective; auto is NCCL to an engine on a GPU and gloo to one on
    a CPU."""
    engines_per_group: AtLeast1 = 1
    """Engines that share one collective; with 1, a death affects no other engine."""
    encoding: Literal["auto", "full", "delta"] = "auto"
    """What a generator fetches over tcp: `full` is every byte of a version, `delta` what changed
    since the version that it has, exactly; auto is delta to a generator on another host."""
    delta_versions: AtLeast0 = 8
    """How many versions a generator may be behind and still fetch deltas; 0 disables them."""
    delta_bytes: AtLeast1 = 4 * 1024 * 1024 * 1024
    """Memory of a relay for deltas. Beside it is a copy of one version, while any are fetched."""
    bucket_bytes: AtLeast1 = 64 * 1024 * 1024
    """Tensors travel in buckets of about this size."""
    timeout_s: Seconds = 120.0
    """A member that does not carry out a command in this time is left out."""
    receive_timeout_s: Seconds = 1200.0
    """A member that has not received a whole version in this time, by tcp or from disk, or not
    loaded it, is left out."""
    member_silence_s: Seconds = 30.0
    """A member that sends no heartbeat for this long is left out."""
    host: str = "127.0.0.1"
    """Interface of a collective's sockets; nothing authenticates there, so its network must be
    trusted."""
    listen: str = ""
    """Where the relay listens for generators on other hosts, tcp://ADDRESS:PORT; buckets take the
    port after it. They need keys. Empty disables it."""
    connections: NumConnections = 0
    """Connections over which an agent fetches buckets from each place that has some, and threads of
    a relay for them, as one core encrypts a connection. 0 is 1 on the learner's host; between hosts
    it is an eighth of the cores, at least 4 and at most 16."""
    forward: str = ""
    """Where a generator on another host serves buckets that it received to the next one, as
    `weightbus.fanout` has it: tcp://ADDRESS:PORT, 0 for any port. Empty: nobody fetches from it."""
    fanout: AtLeast0 = 0
    """Generators with `weightbus.forward` that fetch from the relay itself; the others stand behind
    them in chains, each fetching from the one before. 0: all fetch from the relay."""
    bulk: Literal["encrypted", "plain"] = "encrypted"
    """How the side that serves buckets to other hosts does so, a relay or a generator with
    `weightbus.forward`. plain encrypts nothing, for about half of the CPU time: who can listen in
    that network reads the weights. Commands, manifests and digests stay encrypted, and keys are
    proved for each request."""
    digests: Literal["auto", "xxh3", "keyed", "blake2b"] = "auto"
    """Of each tensor, computed by the relay and checked where it is received. xxh3 finds accidents;
    keyed also what strangers in a network without encryption made up, as its keys come encrypted;
    blake2b also what a hostile generator made up, which knows these. The first two cost little,
    blake2b a core for about 1 GB/s. auto is blake2b with chains (`weightbus.fanout`), which take
    nothing else; without them xxh3, or keyed where `weightbus.bulk` is plain, which takes no
    xxh3."""
    parts: Literal["auto", "off"] = "auto"
    """Of a learner on several hosts: with auto each keeps and serves the tensors that it writes,
    over tcp; with off the first host keeps all of them, for every transport."""
    folder: str = ""
    """Where the disk transport writes versions, in a folder of the run's name, seen by every host;
    empty is DIR/NAME/weights."""
    linger_s: Seconds = 60.0
    """How long the relay outlives a learner that died."""

    @property
    def is_fp8(self) -> bool:
        """True if engines hold the matrices of layers in fp8."""
        return self.precision == "fp8"

    @property
    def digest_kind(self) -> Literal["xxh3", "keyed", "blake2b"]:
        """How digests are computed."""
        if self.digests != "auto":
            return self.digests
        if self.fanout:
            return "blake2b"
        return "xxh3" if self.bulk == "encrypted" else "keyed"


def weightbus_section(table: Table) -> WeightBusSection:
    """Return [weightbus], checked.

    Raises:
        ConfigError: there is no such transport, it carries no adapters, or others could not
            connect to `weightbus.listen` or `weightbus.forward`.
    """
    found = section(table, "weightbus", WeightBusSection)
    if found.transport != AUTO:
        check_transport(found.transport)
    is_live = found.transport != AUTO and TRANSPORTS[found.transport].writes_live
    if is_live and lora_section(table).is_named:
        others = " or ".join(
            f'"{name}"' for name, entry in TRANSPORTS.items() if not entry.writes_live
        )
        raise ConfigError(
            f'weightbus.transport = "{found.transport}" writes into the weights of a paused '
            f"engine, and with lora.rank versions are adapters beside them: set {others}, or "
            'lora.publish = "merged"'
        )
    if found.is_fp8 and is_live:
        raise ConfigError(
            f'weightbus.precision = "fp8" with weightbus.transport = "{found.transport}": a '
            'collective carries no such numbers; set "tcp" or "disk"'
        )
    if found.is_fp8 and lora_section(table).is_named:
        raise ConfigError(
            'weightbus.precision = "fp8" with lora.rank: versions are adapters of weights that '
            'engines have already; set lora.publish = "merged"'
        )
    if found.fanout and found.digest_kind != "blake2b":
        raise ConfigError(
            f'weightbus.digests = "{found.digests}" with weightbus.fanout = {found.fanout}: what '
            'comes from another generator is checked by "blake2b" (or "auto") alone, since that '
            "generator could make other bytes with such a digest"
        )
    if found.bulk == "plain" and found.digests == "xxh3":
        raise ConfigError(
            'weightbus.digests = "xxh3" with weightbus.bulk = "plain": whoever can write in that '
            'network could change weights unnoticed; set "auto", "keyed" or "blake2b"'
        )
    for name, address in (("listen", found.listen), ("forward", found.forward)):
        if address and (why := _why_no_address(address)):
            raise ConfigError(f"weightbus.{name} is {address!r}: {why}")
    return found


def _why_no_address(listen: str) -> str:
    host, colon, port = listen.removeprefix(_TCP).rpartition(":")
    if not (
        listen.startswith(_TCP)
        and colon
        and port.isascii()
        and port.isdecimal()
        and int(port) <= _MAX_PORT
    ):
        return f"expected tcp://ADDRESS:PORT with a port up to {_MAX_PORT}"
    try:
        address = ip_address(host)
    except ValueError:
        return "expected an IPv4 address, as in tcp://10.0.0.1:5600: a name may mean several"
    if not isinstance(address, IPv4Address):
        return "expected an IPv4 address, as in tcp://10.0.0.1:5600"
    if address.is_unspecified:
        return "name the address at which generators find this host"
    return ""
