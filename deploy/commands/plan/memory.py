"""Memory of each of the learner's ranks, estimated or measured.

The estimate has a column for each pipeline stage, kind by kind with its formula. To measure, the
ranks are started on this host's CPU: they build model and optimizer with random weights as the
settings divide them, and do one update. Generators are not covered: `slipstream run --dry-run`.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import psutil
from rich.console import Console

from slipstream.deploy.config import RunConfig
from slipstream.deploy.launch.ranks import run_ranks
from slipstream.deploy.predict.memory.gpu import GIB
from slipstream.deploy.predict.memory.learner_rank import (
    HOST_OPTIMIZER,
    TENSORS,
    MemoryPart,
    learner_stages,
    total_bytes,
)
from slipstream.deploy.predict.size.options import policies_beside, run_and_shape
from slipstream.deploy.terminal.console import make_console, plain_table
from slipstream.learner.model.division import refuse_policy
from slipstream.wire.errors import ConfigError
from slipstream.wire.models.hf_config import HfConfig
from slipstream.wire.process.command_line import print_json

if TYPE_CHECKING:
    from slipstream.learner.tools.measure import Measured

RSS = "process (RSS)"
_LETTERS = (
    "N parameters of the rank: D without experts, E of experts; d, d' ranks that share the state "
    "of one replica's optimizer; T tokens of a microbatch, L layers of the rank, a passes in "
    "flight, A elements that a layer keeps of a token, h hidden size"
)
_PROCESS_BYTES = 700 * 2**20  # libraries of a rank, without a model


class MeasuredRank(msgspec.Struct, frozen=True, kw_only=True):
    """Estimate and measurement of one rank, in bytes."""

    rank: int
    stage: int
    estimated: dict[str, float]
    measured: dict[str, float]


def main(arguments: argparse.Namespace) -> int:
    """Print the memory; the exit code is 1 if a rank does not fit its GPU."""
    config, hf = run_and_shape(arguments)
    refuse_policy(hf, config.learner)
    console = make_console()
    if arguments.measure:
        overrides = [*arguments.overrides, f"run.model={config.run.model}"]
        ranks = measured(config, hf, arguments.config, overrides)
        if arguments.json:
            return print_json({"ranks": ranks})
        print_measured(ranks, console)
        return 0
    frozen, has_critic = policies_beside(config)
    on_gpu = config.generators.device != "cpu"
    stages = learner_stages(hf, config.learner, on_gpu=on_gpu, frozen=frozen, has_critic=has_critic)
    available = config.deploy.gpu_memory_gib * GIB
    fits = not on_gpu or max(map(total_bytes, stages)) <= available
    if arguments.json:
        print_json({"fits": fits, "stages": stages})
    else:
        print_stages(hf, stages, console)
        if on_gpu:
            verdict = "fits" if fits else "does NOT fit"
            most = max(map(total_bytes, stages)) / GIB
            console.print(
                f"{verdict}: {most:.1f} GiB at most, deploy.gpu_memory_gib = {available / GIB:g}",
                style="green" if fits else "bold red",
            )
    return 0 if fits else 1


def print_stages(hf: HfConfig, stages: Sequence[Sequence[MemoryPart]], console: Console) -> None:
    """Print the parts of each stage, then their formulas."""
    console.print(
        f"GiB of each rank by pipeline stage, for a policy of {hf.num_parameters:,} parameters"
    )
    table = plain_table("part", *map(str, range(len(stages))))
    table.add_column("bytes, of stage 0")
    for same in zip(*stages, strict=True):
        sizes = [f"{part.num_bytes / GIB:.3f}" for part in same]
        table.add_row(same[0].what, *sizes, same[0].formula)
    table.add_row("in all", *(f"{total_bytes(parts) / GIB:.3f}" for parts in stages), style="bold")
    console.print(table)
    console.print(f"{_LETTERS}; reasons: deploy/predict/memory/learner_rank.py\n", style="dim")


def print_measured(ranks: Sequence[MeasuredRank], console: Console) -> None:
    """Print each rank's estimate and its measurement."""
    titles = ("rank", "stage", "kind", "estimated MiB", "measured MiB", "measured / estimated")
    table = plain_table(*titles, left=3)
    for rank in ranks:
        for kind, estimate in rank.estimated.items():
            held = rank.measured[kind]
            share = f"{held / estimate:.3f}" if estimate else "-"
            row = (f"{estimate / 2**20:.2f}", f"{held / 2**20:.2f}", share)
            table.add_row(str(rank.rank), str(rank.stage), kind, *row)
    console.print(table)


def measured(
    config: RunConfig, hf: HfConfig, settings: Path, overrides: Sequence[str]
) -> list[MeasuredRank]:
    """Start all ranks here, wait for them, and return what each holds; of the policy alone.

    Raises:
        ConfigError: this host's memory is too small for them.
        SlipstreamError: a rank failed.
    """
    from slipstream.learner.tools.measure import Measured  # torch

    stages = learner_stages(hf, config.learner, on_gpu=False)
    num_ranks = config.learner.learner.ranks
    refuse_too_large(stages, num_ranks, int(psutil.virtual_memory().available))
    with tempfile.TemporaryDirectory(prefix="slipstream-memory-") as name:
        folder = Path(name)
        run_ranks("slipstream.learner.tools.measure", folder, settings, overrides, num_ranks)
        found = [
            msgspec.json.decode((folder / f"{rank}.json").read_bytes(), type=Measured)
            for rank in range(num_ranks)
        ]
    return [with_estimate(rank, holdings, stages) for rank, holdings in enumerate(found)]


def with_estimate(
    rank: int, found: "Measured", stages: Sequence[Sequence[MemoryPart]]
) -> MeasuredRank:
    """Return the measurement of a rank, joined with the estimate of its stage."""
    parts = {part.what: part.num_bytes for part in stages[found.stage]}
    held = {kind: parts[kind] for kind in TENSORS}  # what is measured tensor by tensor
    process = found.rss_before + sum(held.values()) + parts.get(HOST_OPTIMIZER, 0.0)
    return MeasuredRank(
        rank=rank,
        stage=found.stage,
        estimated={**held, RSS: process},
        measured={**found.tensors, RSS: found.rss_after},
    )


def refuse_too_large(
    stages: Sequence[Sequence[MemoryPart]], ranks: int, available_bytes: int
) -> None:
    """Refuse to measure what this host cannot hold.

    Raises:
        ConfigError: naming both numbers.
    """
    of_stage = ranks // len(stages)
    needed = sum(of_stage * total_bytes(parts) for parts in stages) + ranks * _PROCESS_BYTES
    if needed > available_bytes:
        raise ConfigError(
            f"--measure needs about {needed / GIB:.1f} GiB of this host for learner.ranks = "
            f"{ranks}, and {available_bytes / GIB:.1f} GiB are free: name a smaller run.model"
        )
