"""`slipstream plan`: how many GPUs a run needs, in which layout and split, with each number's law.

Prints parameters, the memory of a GPU by kind for the settings as they are, the learner's layouts
that fit (only those that it accepts), the seconds of the best one, what a publish costs, and how to
split the GPUs between learner and generators. Nothing is measured: laws with their letters are in
deploy/predict/, rates are those of data sheets. It needs the model's config.json, and no weights.

--memory prints what a rank of each pipeline stage of the learner holds, kind by kind, and whether
it fits deploy.gpu_memory_gib. --measure starts the ranks on this host's CPU, with random weights,
and prints what they hold after an update next to the estimate. --publish computes what publishing
a version costs at the rates of the options and [weightbus]. --advise fits laws on the newest steps
of a run, under way or ended, and plays it in virtual time with one change at a time.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path

from slipstream.deploy.commands.options import (
    RUNS,
    add_config,
    add_json,
    add_overrides,
    take_config,
)
from slipstream.deploy.commands.plan import advice, memory, publish, sizing
from slipstream.deploy.predict.memory.gpu import RESERVE_GIB
from slipstream.deploy.predict.size.options import add_hardware, add_model
from slipstream.wire.errors import ConfigError

EXAMPLES = """examples:
  slipstream plan run.toml                                 on the GPUs that the file names
  slipstream plan run.toml --gpus 64 --gpu H100            what to do with 64 of them
  slipstream plan run.toml --gpus 256 --gpu H20 --model DeepSeek-V3
  slipstream plan run.toml --gpu 40 --mean-response 900    any GPU by its GiB, shorter answers
  slipstream plan run.toml --memory learner.pipeline_parallel=2
  slipstream plan run.toml --measure                       a small model, on this host's CPU
  slipstream plan --publish                                three sizes, 16 hosts to 32
  slipstream plan --publish --version-gb 3.2 --learner-hosts 1 --engine-hosts 4 --nic-gb-s 0.125
  slipstream plan --advise                                 the newest run
"""
_SETTINGS = frozenset({"config", "overrides"})
_HOSTS = frozenset({"gpus_per_node", "nics", "nic_gb_s", "pcie_gb_s"})
_GPUS = frozenset({"gpus", "gpu", "mfu", "engine_share", "engine_base_ms"})
_ANSWERS = frozenset({"mean_prompt", "mean_response", "reserve_gib", "host_gb"})
_VERSIONS = frozenset({"version_gb", "learner_hosts", "engine_hosts", "delta"})
# Arguments that each subject reads; without the option of one, the whole run is planned.
_READS: Mapping[str, frozenset[str]] = {
    "": _SETTINGS | _HOSTS | _GPUS | _ANSWERS | {"model"},
    "--memory": _SETTINGS | {"model"},
    "--measure": _SETTINGS | {"model"},
    "--publish": _SETTINGS | _HOSTS | _VERSIONS,
    "--advise": frozenset(),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    add_config(parser, required=False)
    subject = parser.add_mutually_exclusive_group()
    subject.add_argument(
        "--memory", action="store_true", help="the learner's memory alone, by pipeline stage"
    )
    subject.add_argument(
        "--measure", action="store_true", help="the same, measured: its ranks start on this CPU"
    )
    subject.add_argument("--publish", action="store_true", help="the cost of a publish alone")
    subject.add_argument(
        "--advise",
        type=Path,
        nargs="?",
        const=RUNS,
        metavar="RUN",
        help="advice on a run; default: the newest one in runs/",
    )
    text = "GPUs of all pools; default those of the file's roles"
    parser.add_argument("--gpus", type=int, help=text)
    add_model(parser)
    add_hardware(parser)
    text = f"GiB of each GPU for CUDA and NCCL, default {RESERVE_GIB:g}"
    parser.add_argument("--reserve-gib", type=float, default=RESERVE_GIB, help=text)
    text = "memory of a host, default 0: no limit"
    parser.add_argument("--host-gb", type=float, default=0.0, help=text)
    publish.add_hosts(parser)
    add_json(parser)
    add_overrides(parser)


def main(arguments: argparse.Namespace) -> int:
    """Run the command."""
    refuse_unread(arguments)
    if arguments.advise is not None:
        return advice.main(arguments)
    named = any(word.endswith(".toml") and "=" not in word for word in arguments.overrides)
    arguments.needs_config = named or not arguments.publish
    take_config(arguments.parser, arguments)
    if arguments.publish:
        return publish.main(arguments)
    if arguments.memory or arguments.measure:
        return memory.main(arguments)
    return sizing.main(arguments)


def refuse_unread(arguments: argparse.Namespace) -> None:
    """Refuse what the chosen subject does not read.

    Raises:
        ConfigError: An argument is given that belongs to another subject.
    """
    subject = next((name for name in _READS if name and getattr(arguments, name[2:])), "")
    for name in sorted(frozenset[str]().union(*_READS.values()) - _READS[subject]):
        value = getattr(arguments, name)
        if value in (arguments.parser.get_default(name), []):
            continue
        shown = value[0] if name == "overrides" else f"--{name.replace('_', '-')}"
        owners = [f"slipstream plan {other}".strip() for other in _READS if name in _READS[other]]
        also = f"is not read with {subject}" if subject else "nothing else reads it"
        raise ConfigError(f"{shown} goes with {' or '.join(owners)}, and {also}")
