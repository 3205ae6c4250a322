"""Ranks of a learner that a command starts for a question (`deploy/launch/ranks.py`)."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from slipstream.learner.config import LearnerSettings, learner_settings
from slipstream.learner.model import device
from slipstream.wire.settings.load import load_table

if TYPE_CHECKING:
    from slipstream.learner.model.topology import Topology


@contextmanager
def topology_of(settings: LearnerSettings, folder: Path, rank: int) -> Iterator["Topology"]:
    """Divide the ranks by the settings; they meet in a folder, and leave together."""
    from slipstream.learner.model.topology import destroy_topology, init_topology

    learner = settings.learner
    yield init_topology(
        rank=rank,
        world_size=learner.ranks,
        sizes=learner.sizes,
        store=FileStore(str(folder / "store"), learner.ranks),
        seed=settings.run.seed,
        timeout_s=learner.timeout_s,
    )
    torch.distributed.barrier()
    destroy_topology()


def main(work: Callable[[LearnerSettings, Path, int], None]) -> None:
    """Run one rank of a program: SETTINGS.toml FOLDER RANK [section.key=value ...]."""
    file, folder, rank, *overrides = sys.argv[1:]
    device.prepare()
    settings = learner_settings(load_table(Path(file), overrides))
    device.set_threads(settings.learner.threads)
    work(settings, Path(folder), int(rank))
