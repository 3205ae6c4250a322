"""One rank of a learner that saves a checkpoint, or reads those that other layouts saved.

Usage: reshard MODEL_FOLDER WORK_FOLDER RANK WORLD_SIZE LEARNER_JSON [FOLDER...]
Without folders it trains two steps, saves to WORK_FOLDER/checkpoints and trains one more. With the
work folders of others it reads the checkpoint of each, and trains one step from it. Rank 0 writes
the models as they were saved or read, and after the next step: WORK_FOLDER/saved, WORK_FOLDER/next,
WORK_FOLDER/from-NAME and WORK_FOLDER/from-NAME-next.
"""

from pathlib import Path

import torch

from slipstream.learner.training.algorithm import algorithm_of
from slipstream.learner.training.step import train_step
from slipstream.wire.files.checkpoints import read_checkpoint_info
from slipstream.wire.process.phases import PhaseClock
from tests.support.ranks.policy import checkpoint_info, random_outcomes, train_sequences
from tests.support.ranks.program import join_ranks, planned, run, settings_of
from tests.support.ranks.run import section_of
from tests.support.waiting import HANG_S


def main(folder: Path, work: Path, rank: int, world_size: int, layout: str, *others: Path) -> None:
    learner = section_of(layout, lr=1e-2, adam_epsilon=1e-3)
    topology = join_ranks(work, rank, world_size, learner)
    from slipstream.learner.checkpoints.files import Save, prepare_folder
    from slipstream.learner.checkpoints.loading import load_checkpoint
    from slipstream.learner.model.topology import destroy_topology
    from slipstream.learner.model.weights.hf_weights import save_hf_folder
    from slipstream.learner.starting_policy import build_policy
    from slipstream.learner.training.policy import Policy
    from slipstream.learner.training.trainable import Trainable

    Trainable.bucket_parameters = 20_000  # a tiny model fits into one bucket of the usual size
    algo = {"preset": "vapo", "critic": {"warmup_steps": 0, "lr": 1e-2}}
    settings = settings_of(folder, learner, algo)
    algorithm = algorithm_of(settings)
    everything = train_sequences()
    plans, batches = planned(everything, learner, topology, minibatches=1, max_tokens=48)

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
        saved = work / "checkpoints"
        Save(policy, topology, saved, info, lambda: b"ledger", timeout_s=HANG_S).wait()
        train(policy, 1, "next")
    torch.distributed.barrier()
    destroy_topology()


if __name__ == "__main__":
    run(main)
