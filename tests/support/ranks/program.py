"""What programs of ranks have in common: arguments, a topology, settings, batches, a report."""

import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d as c10d

from slipstream.algos.section import AlgoSection
from slipstream.learner.batches.packing import PackedBatch, TrainTrajectory, pack
from slipstream.learner.batches.plan import MinibatchPlan, plan_step
from slipstream.learner.config import LearnerSection, LearnerSettings
from slipstream.learner.model import device
from slipstream.weightbus.config import WeightBusSection
from slipstream.wire.settings.sections import RoutingReplay, RunSection, SamplingSection
from tests.support.waiting import HANG_S

if TYPE_CHECKING:
    from slipstream.learner.model.topology import Topology


_at_start: dict[str, int] = {}  # uses of groups by their names


def run(main: Callable[..., None]) -> None:
    """Call a program with the words of its command line, as its annotations have them."""
    words = sys.argv[1:]
    parameters = list(inspect.signature(main).parameters.values())
    kinds = [one.annotation for one in parameters]
    kinds += [kinds[-1]] * (len(words) - len(kinds))
    main(*(kind(word) for kind, word in zip(kinds, words, strict=False)))


def join_ranks(work: Path, rank: int, world_size: int, learner: LearnerSection) -> "Topology":
    """Prepare this process for Megatron and join the other ranks through a file in ``work``."""
    device.prepare()
    device.set_threads(1)
    from slipstream.learner.model.topology import init_topology

    topology = init_topology(
        rank=rank,
        world_size=world_size,
        sizes=learner.sizes,
        ranks_per_node=learner.ranks_per_node,
        store=FileStore(str(work / "store"), world_size),
        seed=1,
        timeout_s=HANG_S,
    )
    mark_open()
    return topology


def mark_open() -> None:
    """Take what groups have passed until now for what opened them."""
    _at_start.update(uses_of_groups())


def uses_of_groups() -> dict[str, int]:
    """Return how many collectives each group of several ranks has passed, by its name.

    Groups that are of gloo on a GPU, too, are left out: they connect when they are made.
    """
    groups = [group for group in c10d._world.pg_map if group.size() > 1]
    return {
        f"{group.group_name} {group.group_desc}": group._get_sequence_number_for_group()
        for group in groups
        if not group.group_desc.endswith("_GLOO")
    }


def check_groups() -> None:
    """Check that what was used since the start has been opened there."""
    for name, uses in uses_of_groups().items() if _at_start else ():
        is_open = _at_start.get(name, 0) > 0
        assert is_open or not uses, f"{name} would make a communicator after the start"


def finish(file: Path, report: object) -> None:
    """Write the report of this rank, and end once all ranks have come here."""
    from slipstream.learner.model.topology import destroy_topology

    file.write_text(json.dumps(report))
    check_groups()
    torch.distributed.barrier()
    destroy_topology()


def settings_of(
    folder: Path,
    learner: LearnerSection,
    algo: Mapping[str, object],
    *,
    longest: int = 32,
    seed: int = 0,
    replay: RoutingReplay = "off",
    **sections: object,
) -> LearnerSettings:
    """Return settings of a learner of the model in a folder, with answers of up to ``longest``."""
    return LearnerSettings(
        run=RunSection(model=str(folder), seed=seed, routing_replay=replay),
        learner=learner,
        algo=AlgoSection(**algo),  # type: ignore[arg-type]  # TOML's types
        sampling=SamplingSection(max_response_tokens=longest),
        **{"weightbus": WeightBusSection(), **sections},  # type: ignore[arg-type]
    )


def planned(
    sequences: Sequence[TrainTrajectory],
    learner: LearnerSection,
    topology: "Topology",
    *,
    minibatches: int,
    max_tokens: int,
) -> tuple[list[MinibatchPlan], list[list[PackedBatch]]]:
    """Return the plans of the minibatches of a step, and the microbatches of this replica."""
    lengths = [len(one.token_ids) for one in sequences]
    plans = plan_step(
        lengths,
        lengths,
        replicas=topology.data_parallel,
        minibatches=minibatches,
        max_tokens=max_tokens,
        coupled=learner.sizes.couples_replicas,
        multiple_of=learner.sizes.microbatch_multiple,
    )
    shares = [plan.microbatches[topology.data_parallel_rank] for plan in plans]
    return plans, [
        [pack([sequences[i] for i in indices], device.device()) for indices in share]
        for share in shares
    ]
