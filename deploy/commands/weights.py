"""`slipstream weights`: what the publish of a version costs, in seconds, bytes and messages.

Computed from sizes and rates that are given, not measured (deploy/predict/laws/publish_cost.py):
what a network allows at its full rate. Hosts of the learner hold equal parts of a version. Columns
are sizes of a version; rows name their unit.
"""

import argparse
import math
from collections.abc import Callable, Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from slipstream.deploy.commands.options import add_json
from slipstream.deploy.predict.laws.publish_cost import Cost, Setup, cost_of
from slipstream.deploy.terminal.console import make_console
from slipstream.wire.errors import ConfigError
from slipstream.wire.process.command_line import print_json

EXAMPLES = """examples:
  slipstream weights                                   three sizes, 16 hosts to 32, one NIC each
  slipstream weights --nics 8 --fanout 2               a NIC per GPU, two chains
  slipstream weights --gigabytes 3.2 --learner-hosts 1 --engine-hosts 4 --nic-gb-s 0.125
"""
GB = 1e9
SIZES = {"8B bf16": 16.0, "235B bf16": 470.0, "671B bf16": 1342.0, "671B fp8": 671.0}  # GB
_ROWS: tuple[tuple[str, Callable[[Cost], float]], ...] = (
    ("learner's stall, s", lambda c: c.stall_s),
    ("until the last engine has it, s", lambda c: c.receive_s),
    ("an engine's pause, s", lambda c: c.pause_s),
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("--gigabytes", type=float, nargs="+", help="sizes of a version, 10^9 bytes")
    parser.add_argument(
        "--learner-hosts", type=int, default=16, help="hosts of the learner, default 16"
    )
    parser.add_argument("--engine-hosts", type=int, default=32, help="hosts of engines, default 32")
    parser.add_argument("--nics", type=int, default=1, help="network cards of each host, default 1")
    parser.add_argument(
        "--nic-gb-s", type=float, default=50.0, help="GB/s of each card, default 50"
    )
    parser.add_argument("--gpus", type=int, default=8, help="GPUs of each host, default 8")
    parser.add_argument(
        "--pcie-gb-s", type=float, default=50.0, help="GB/s between a GPU and its host, default 50"
    )
    parser.add_argument("--fanout", type=int, default=0, help="weightbus.fanout, default 0: a star")
    parser.add_argument(
        "--bucket-mib", type=float, default=64.0, help="weightbus.bucket_bytes in MiB, default 64"
    )
    parser.add_argument(
        "--connections", type=int, default=4, help="weightbus.connections, default 4"
    )
    parser.add_argument(
        "--delta",
        type=float,
        default=1.0,
        help="share of the bytes that travel as deltas, default 1",
    )
    parser.add_argument(
        "--in-place", action="store_true", help="write into paused engines, instead of staging"
    )
    add_json(parser)


def main(arguments: argparse.Namespace) -> int:
    """Run the command."""
    found = columns(arguments)
    if arguments.json:
        print_json(found)
    else:
        print_costs(found, make_console())
    return 0


def columns(arguments: argparse.Namespace) -> list[Column]:
    """Return the cost at each size.

    Raises:
        ConfigError: a number is not above 0, or no finite one; ``--fanout`` may be 0.
    """
    for name, value in vars(arguments).items():
        least = 0 if name == "fanout" else 1e-9
        numbers = value if isinstance(value, list) else [value]
        figures = [one for one in numbers if isinstance(one, int | float) and one is not False]
        if not all(least <= one < math.inf for one in figures):
            raise ConfigError(
                f"--{name.replace('_', '-')} is {value}: expected finite numbers above 0"
            )
    given: Sequence[float] | None = arguments.gigabytes
    sizes = {f"{size:g} GB": size for size in given} if given else SIZES
    return [
        Column(name=name, version_bytes=size * GB, cost=cost_of(setup_of(arguments, size * GB)))
        for name, size in sizes.items()
    ]


def setup_of(arguments: argparse.Namespace, version_bytes: float) -> Setup:
    """Return the hosts that the options describe."""
    return Setup(
        version_bytes=version_bytes,
        learner_hosts=arguments.learner_hosts,
        engine_hosts=arguments.engine_hosts,
        nics=arguments.nics,
        nic_bytes_s=arguments.nic_gb_s * GB,
        gpus=arguments.gpus,
        pcie_bytes_s=arguments.pcie_gb_s * GB,
        fanout=arguments.fanout,
        bucket_bytes=arguments.bucket_mib * 2**20,
        connections=arguments.connections,
        is_staged=not arguments.in_place,
        delta_share=arguments.delta,
    )


def print_costs(found: Sequence[Column], console: Console) -> None:
    """Print a row for each figure."""
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for column in found:
        table.add_column(column.name, justify="right", no_wrap=True)
    for what, figure in _ROWS:
        table.add_row(what, *(_short(figure(column.cost)) for column in found))
    console.print(table)


def _short(value: float) -> str:
    """Return three digits of a number, or all of a whole one."""
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
