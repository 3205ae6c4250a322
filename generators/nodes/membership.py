"""Membership of a process in an engine on several hosts."""

from pathlib import Path

from slipstream.generators.config import GeneratorSettings
from slipstream.generators.nodes.card import facts_of
from slipstream.weightbus.hosts.membership import HostPlace, Membership
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.keys import read_client_key
from slipstream.wire.settings.rendezvous import parse_rendezvous


def membership_of(settings: GeneratorSettings, name: str, place: HostPlace) -> Membership:
    """Return what a process brings to the meeting of its engine's hosts.

    Raises:
        ConfigError: there is no usable key.
    """
    return Membership(
        place=place,
        facts=facts_of(settings, name),
        key=read_client_key(Path(settings.run.key_file)),
        section="generators",
        option="--follow",
        refusal="be a node of the engine of",
        advice="start it with --follow, the same --name, the same --rendezvous and the same key "
        "(run.key_file)",
        key_source="run.key_file",
        rendezvous_timeout_s=settings.generators.rendezvous_timeout_s,
        silence_s=settings.generators.node_silence_s,
    )


def place_of(
    settings: GeneratorSettings, follow: int | None, rendezvous: str | None
) -> HostPlace | None:
    """Return the place that a command line names; None for an engine on one host.

    Raises:
        ConfigError: the options do not fit the settings.
    """
    generators, run = settings.generators, settings.run
    nodes = generators.nodes
    if nodes == 1:
        if follow is not None or rendezvous is not None:
            option = "--follow" if follow is not None else "--rendezvous"
            raise ConfigError(
                f"{option} is for an engine on several hosts, and generators.nodes is 1"
            )
        return None
    if rendezvous is None:
        raise ConfigError(
            f"generators.nodes = {nodes} needs --rendezvous HOST:PORT, an address of node 0, and "
            f"on each other host --follow N, from 1 to {nodes - 1}"
        )
    if follow is not None and not 0 < follow < nodes:
        raise ConfigError(
            f"--follow is {follow}, expected 1 to {nodes - 1} (generators.nodes = {nodes})"
        )
    if not (run.broker and run.key_file):
        missing = "run.broker" if not run.broker else "run.key_file"
        raise ConfigError(
            f"generators.nodes = {nodes} needs {missing}: the hosts of an engine prove one key, to "
            "each other and to the learner"
        )
    address = parse_rendezvous(rendezvous)
    return HostPlace(follow or 0, nodes, generators.ranks_per_node, address)
