"""Cost of publishing a version of some GB, in seconds, bytes and messages.

Computed from sizes, from links at their full rate, and from what digests and sockets were measured
to do on a CPU; loads and checks of a GPU are assumed (deploy/predict/laws/publish_cost.py). Hosts
of the learner hold equal parts of a version. Columns are sizes of a version; rows name their unit.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import replace

import msgspec

from slipstream.deploy.predict.laws.publish_cost import Cost, Rates, Setup, cost_of
from slipstream.deploy.predict.size.options import refuse_numbers
from slipstream.deploy.terminal.console import make_console, plain_table
from slipstream.weightbus.config import WeightBusSection
from slipstream.weightbus.transports import TRANSPORTS, check_transport, chosen
from slipstream.wire.errors import ConfigError
from slipstream.wire.process.command_line import print_json
from slipstream.wire.settings.load import load_table, section

GB = 1e9
SIZES = {  # GB
    "8B bf16": 16.0,
    "70B bf16": 141.0,
    "235B bf16": 470.0,
    "671B bf16": 1342.0,
    "671B fp8": 671.0,
}
_ROWS: tuple[tuple[str, Callable[[Cost], float]], ...] = (
    ("learner's stall, s", lambda c: c.stall_s),
    ("digests of a learner host, s", lambda c: c.digest_s),
    ("until the last engine has it, s", lambda c: c.receive_s),
    ("what engines must hold, s", lambda c: c.expect_s),
    ("an engine's load, s", lambda c: c.load_s),
    ("an engine's check, s", lambda c: c.check_s),
    ("an engine's pause, s", lambda c: c.pause_s),
    ("its pause with a second copy, s", lambda c: c.copy_s),
    ("until the last engine runs it, s", lambda c: c.total_s),
    ("digests of an engine host, core-s", lambda c: c.digest_core_s),
    ("slots of a learner host, GB", lambda c: c.slot_bytes / GB),
    ("from each learner host, GB", lambda c: c.learner_host_bytes / GB),
    ("from all learner hosts, GB", lambda c: c.relayed_bytes / GB),
    ("from all engine hosts, GB", lambda c: c.forwarded_bytes / GB),
    ("copies within engine hosts, GB", lambda c: c.copied_bytes / GB),
    ("commands to agents", lambda c: float(c.commands)),
    ("requests for buckets", lambda c: float(c.bucket_requests)),
)


class Column(msgspec.Struct, frozen=True, kw_only=True):
    """One size of a version, and what its publish costs."""

    name: str
    version_bytes: float
    cost: Cost


def add_hosts(parser: argparse.ArgumentParser) -> None:
    """Add sizes of a version, numbers of hosts and the share of bytes that travels."""
    text = "with --publish: size of a version, 10^9 bytes; may be given several times"
    parser.add_argument("--version-gb", type=float, action="append", default=[], help=text)
    text = "with --publish: of the learner, default 16"
    parser.add_argument("--learner-hosts", type=int, default=16, help=text)
    text = "with --publish: of engines, default 32"
    parser.add_argument("--engine-hosts", type=int, default=32, help=text)
    text = "with --publish: share sent as deltas, default 1"
    parser.add_argument("--delta", type=float, default=1.0, help=text)


def main(arguments: argparse.Namespace) -> int:
    """Print the costs."""
    costs = columns(arguments)
    if arguments.json:
        return print_json(costs)
    table = plain_table("", *(column.name for column in costs))
    for what, figure in _ROWS:
        table.add_row(what, *(_short(figure(column.cost)) for column in costs))
    make_console().print(table)
    return 0


def columns(arguments: argparse.Namespace) -> list[Column]:
    """Return the cost at each size.

    Raises:
        ConfigError: A number is not finite or not above 0, or [weightbus] is wrong.
    """
    refuse_numbers(arguments)
    if not all(0 < size < math.inf for size in arguments.version_gb):
        raise ConfigError(f"--version-gb is {arguments.version_gb}: expected numbers above 0")
    bus = section(load_table(arguments.config, arguments.overrides), "weightbus", WeightBusSection)
    transport = chosen(bus.transport)
    check_transport(transport)
    setup = Setup(
        version_bytes=0.0,
        learner_hosts=arguments.learner_hosts,
        engine_hosts=arguments.engine_hosts,
        nics=arguments.nics,
        nic_bytes_s=arguments.nic_gb_s * GB,
        gpus=arguments.gpus_per_node or 8,
        pcie_bytes_s=arguments.pcie_gb_s * GB,
        fanout=bus.fanout,
        bucket_bytes=bus.bucket_bytes,
        connections=bus.connections or Setup.connections,
        is_staged=not TRANSPORTS[transport].writes_live,
        delta_share=arguments.delta,
        rates=Rates.of(bus),
    )
    sizes = {f"{size:g} GB": size for size in arguments.version_gb} or SIZES
    return [
        Column(
            name=name,
            version_bytes=size * GB,
            cost=cost_of(replace(setup, version_bytes=size * GB)),
        )
        for name, size in sizes.items()
    ]


def _short(value: float) -> str:
    """Return three digits of a number, or all of a whole one."""
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
