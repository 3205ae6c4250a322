"""One rank of a learner that does a step of two updates, by the experts of the first or not (R2).

Usage: old_routing MODEL_FOLDER WORK_FOLDER RANK WORLD_SIZE LEARNER_JSON
Writes to WORK_FOLDER/RANK.json, by replay, how often a token of the second update had other experts
in a layer than before the first.
"""

from pathlib import Path

import torch
from torch import Tensor

from slipstream.learner.batches.packing import pack
from slipstream.learner.batches.plan import plan_step
from slipstream.learner.model import device
from slipstream.learner.training.algorithm import algorithm_of
from slipstream.learner.training.step import train_step
from slipstream.wire.process.phases import PhaseClock
from slipstream.wire.settings.sections import RoutingReplay
from tests.support.ranks.policy import random_outcomes, train_sequences
from tests.support.ranks.program import finish, join_ranks, run, settings_of
from tests.support.ranks.routing import recorded_maps
from tests.support.ranks.run import section_of

REPLAYS: tuple[RoutingReplay, ...] = ("off", "R2")


def main(folder: Path, work: Path, rank: int, world_size: int, layout: str) -> None:
    learner = section_of(layout, lr=1e-2, dtype="float32", minibatches=2)
    topology = join_ranks(work, rank, world_size, learner)
    from slipstream.learner.starting_policy import build_policy

    everything = train_sequences()
    lengths = [len(one.token_ids) for one in everything]
    first, second = plan_step(lengths, lengths, replicas=1, minibatches=2, max_tokens=sum(lengths))
    report = {}
    for replay in REPLAYS:
        algo = {"anchor": "behavior", "correction": "none"}
        settings = settings_of(folder, learner, algo, replay=replay)
        algorithm = algorithm_of(settings)
        assert not algorithm.needs_proximal, "the first update would have a pass before it"
        policy = build_policy(settings, algorithm, topology)
        minibatches = [
            [pack([everything[i] for i in indices], device.device()) for indices in of_replica]
            for plan in (first, second)
            for of_replica in plan.microbatches
        ]
        maps = recorded_maps(policy.model)
        outcomes = random_outcomes(everything)
        train_step(policy, minibatches, [first, second], outcomes, algorithm, PhaseClock())
        # A forward pass before the second update, the first update, the second; layers that are
        # computed again come after those that are not.
        layers = policy.model.hf_config.num_sparse_layers
        before, updates = maps[:layers], maps[layers:]
        later = [one for one in updates if len(one) == len(before[0])][:layers]
        assert len(updates[0]) != len(before[0]), "both updates are of as many tokens"
        report[replay] = share_of_others(torch.stack(before), torch.stack(later))
    finish(work / f"{rank}.json", report)


def share_of_others(some: Tensor, others: Tensor) -> float:
    """Return the share of tokens in layers whose experts differ, of [L, T, E] bool."""
    return float((some != others).any(-1).double().mean())


if __name__ == "__main__":
    run(main)
