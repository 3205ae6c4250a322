"""One rank of a learner that saves a checkpoint, or reads those that other layouts saved.

Usage: reshard MODEL_FOLDER WORK_FOLDER RANK WORLD_SIZE LEARNER_JSON [FOLDER...]
Without folders it trains two steps, saves to WORK_FOLDER/checkpoints and trains one more. With the
work folders of others it reads the checkpoint of each, and trains one step from it. Rank 0 writes
the models as they were saved or read, and after the next step: WORK_FOLDER/saved, WORK_FOLDER/next,
WORK_FOLDER/from-NAME and WORK_FOLDER/from-NAME-next.
"""

import sys
from pathlib import Path

import torch

from slipstream.algos.section import AlgoSection
from slipstream.learner.batches.packing import pack
from slipstream.learner.batches.plan import plan_step
from slipstream.learner.config import LearnerSettings
from slipstream.learner.model import device
from slipstream.learner.training.algorithm import algorithm_of
from slipstream.learner.training.step import train_step
from slipstream.weightbus.config import WeightBusSection
from slipstream.wire.files.checkpoints import read_checkpoint_info
from slipstream.wire.process.phases import PhaseClock
from slipstream.wire.settings.sections import RunSection, SamplingSection
from tests.support.ranks.policy import checkpoint_info, join_ranks, random_outcomes, train_sequences
from tests.support.ranks.run import section_of


def main(
    folder: Path, work: Path, rank: int, world_size: int, layout: str, others: list[Path]
) -> None:
    learner = section_of(layout, lr=1e-2, adam_epsilon=1e-3)
    topology = join_ranks(work, rank, world_size, learner)
    from slipstream.learner.checkpoints.files import prepare_folder, save_checkpoint
    from slipstream.learner.checkpoints.loading import load_checkpoint
    from slipstream.learner.model.hf_weights import save_hf_folder
    from slipstream.learner.model.topology import destroy_topology
    from slipstream.learner.starting_policy import build_policy
    from slipstream.learner.training.policy import Policy

    settings = LearnerSettings(
        run=RunSection(model=str(folder)),
        learner=learner,
        algo=AlgoSection(preset="vapo", critic={"warmup_steps": 0, "lr": 1e-2}),
        weightbus=WeightBusSection(),
        sampling=SamplingSection(max_response_tokens=32),
    )
    algorithm = algorithm_of(settings)
    everything = train_sequences()
    plans = plan_step(
        [len(s.token_ids) for s in everything],
        replicas=topology.data_parallel,
        minibatches=1,
        max_tokens=48,
        coupled=learner.sizes.couples_replicas,
        multiple_of=learner.sizes.microbatch_multiple,
    )
    batches = [
        [pack([everything[i] for i in indices], device.device()) for indices in share]
        for share in (plan.microbatches[topology.data_parallel_rank] for plan in plans)
    ]

    def train(policy: Policy, times: int, name: str) -> None:
        for _ in range(times):
            data = random_outcomes(everything)
            train_step(policy, batches, plans, data, algorithm, PhaseClock())
        policy.bring_weights()
        save_hf_folder(policy.model, work / name, folder)

    for other in others:
        policy = build_policy(settings, algorithm, topology)
        (saved,) = (other / "checkpoints").iterdir()
        info = read_checkpoint_info(saved)
        load_checkpoint(policy, topology, saved, info)
        train(policy, 0, f"from-{other.name}")
        train(policy, 1, f"from-{other.name}-next")
    if not others:
        policy = build_policy(settings, algorithm, topology)
        train(policy, 2, "saved")
        if rank == 0:
            prepare_folder(work / "checkpoints")
        torch.distributed.barrier()
        info = checkpoint_info(policy, settings, topology, has_critic=True)
        save_checkpoint(policy, topology, work / "checkpoints", info, lambda: b"ledger")
        train(policy, 1, "next")
    torch.distributed.barrier()
    destroy_topology()


if __name__ == "__main__":
    main(
        *map(Path, sys.argv[1:3]),
        *map(int, sys.argv[3:5]),
        sys.argv[5],
        [Path(other) for other in sys.argv[6:]],
    )
