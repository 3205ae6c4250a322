"""One rank of a learner of several policies that are adapters of one frozen model.

Usage: neighbors MODEL_FOLDER WORK_FOLDER RANK WORLD_SIZE LEARNER_JSON
Each policy is trained alone, then all are trained in turns. Writes WORK_FOLDER/RANK.json: by
policy, the figures of each step and a digest of this rank's adapters and optimizer, alone and in
turns.
"""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from slipstream.learner.config import LearnerSettings
from slipstream.learner.training.algorithm import algorithm_of
from slipstream.learner.training.step import train_step
from slipstream.wire.process.phases import PhaseClock
from slipstream.wire.settings.lora import LoraSection
from tests.support.ranks.policy import random_outcomes, train_sequences
from tests.support.ranks.program import finish, join_ranks, planned, run, settings_of
from tests.support.ranks.run import section_of

if TYPE_CHECKING:
    from slipstream.learner.model.topology import Topology
    from slipstream.learner.training.policy import Policy

NUM_STEPS = 2


def policies(folder: Path, layout: str) -> dict[str, LearnerSettings]:
    """Return three policies that differ in rank, layers, rate, seed and algorithm."""
    first = section_of(layout, lr=2e-2, adam_epsilon=1e-3)
    second = section_of(layout, lr=5e-2, adam_epsilon=1e-3, clip_grad=0.1)
    everywhere, few = (
        LoraSection(rank=4),
        LoraSection(rank=2, alpha=8.0, targets=("q_proj", "v_proj")),
    )
    kl = {"kl": {"coefficient": 0.1, "name": "full"}}
    return {
        "kl": settings_of(folder, first, kl, seed=3, lora=everywhere),
        "few layers": settings_of(folder, second, {}, seed=4, lora=few),
        "cispo": settings_of(folder, second, {"preset": "cispo"}, seed=5, lora=everywhere),
    }


class Trained:
    """A policy, with what its steps gave."""

    def __init__(self, settings: LearnerSettings, policy: "Policy", topology: "Topology") -> None:
        self.policy = policy
        self.figures: list[dict[str, float]] = []
        self._algorithm = algorithm_of(settings)
        self._everything = train_sequences()[settings.run.seed - 3 :]
        self._plans, self._batches = planned(
            self._everything, settings.learner, topology, minibatches=2, max_tokens=24
        )

    def step(self, number: int) -> None:
        self.policy.attach()
        outcomes = random_outcomes(self._everything, step=number)
        figures, _ = train_step(
            self.policy, self._batches, self._plans, outcomes, self._algorithm, PhaseClock()
        )
        self.policy.end_step()
        self.figures.append(figures)

    def state(self) -> str:
        self.policy.attach()
        digest = hashlib.sha256()
        adapters = self.policy.model.adapters
        assert adapters is not None
        tensors = [tensor for _, tensor, _, _ in adapters.named_tensors()]  # type: ignore[attr-defined]  # of LoRA
        for tensor in (*tensors, *self.policy._optimizer_state()):
            digest.update(tensor.detach().float().numpy().tobytes())
        return digest.hexdigest()


def main(folder: Path, work: Path, rank: int, world_size: int, layout: str) -> None:
    topology = join_ranks(work, rank, world_size, section_of(layout))
    from slipstream.learner.starting_policy import FrozenBase, build_policy

    every = policies(folder, layout)

    def built(names: list[str]) -> dict[str, Trained]:
        base = FrozenBase.load(every[names[0]], topology)
        return {
            name: Trained(
                every[name],
                build_policy(every[name], algorithm_of(every[name]), topology, base),
                topology,
            )
            for name in names
        }

    def report(trained: dict[str, Trained]) -> dict[str, object]:
        return {name: [policy.figures, policy.state()] for name, policy in trained.items()}

    alone: dict[str, object] = {}
    for name in every:
        (trained,) = built([name]).values()
        for number in range(NUM_STEPS):
            trained.step(number)
        alone |= report({name: trained})
    together = built(list(every))
    weights = [p.clone() for n, p in together["kl"].policy.model.named_parameters()]
    for number in range(NUM_STEPS):
        for policy in together.values():
            policy.step(number)
    after = [p for n, p in together["kl"].policy.model.named_parameters()]
    has_moved = not all(map(torch.equal, weights, after))
    finish(
        work / f"{rank}.json",
        {"alone": alone, "in turns": report(together), "base moved": has_moved},
    )


if __name__ == "__main__":
    run(main)
