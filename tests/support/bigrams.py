"""Tiny policies and critics that learn a step without a model."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream.algos.compose import Algorithm, PolicyOutputs
from slipstream.algos.config import choice_of
from slipstream.algos.diagnostics import Sums, add_sums
from slipstream.algos.section import AlgoSection
from slipstream.learner.batches.orders import NonFiniteError
from slipstream.learner.batches.packing import PackedBatch, TrainTrajectory, pack
from slipstream.learner.batches.plan import MinibatchPlan
from slipstream.learner.training.step import TrainedMinibatch, train_step
from slipstream.learner.training.step_data import StepData, step_data
from slipstream.wire.messages.broker import DeliveredGroup
from slipstream.wire.process.phases import PhaseClock
from tests.support.delivered_groups import trajectory

CPU = torch.device("cpu")
NUM_TOKENS = 7


class Alone:
    """One replica's word is that of all."""

    rank = 0

    def summed(self, values: Tensor) -> Tensor:
        return values

    def gathered(self, values: Tensor) -> Tensor:
        return values


class Bigrams:
    """A policy of one logit per pair of tokens, under plain gradient descent. Updates named in
    ``bad`` are not finite."""

    critic = None
    reference = None
    teacher = None

    def __init__(self, *bad: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.logits = torch.randn(NUM_TOKENS, NUM_TOKENS, generator=generator).requires_grad_()
        self.replicas = Alone()
        self.updates = 0
        self.forwards = 0
        self._bad = bad

    def outputs(self, batch: PackedBatch) -> PolicyOutputs:
        rows = self.logits.log_softmax(-1)[batch.token_ids.roll(1)]
        chosen = rows.gather(-1, batch.token_ids.unsqueeze(-1)).squeeze(-1)
        entropy = -(rows.exp() * rows).sum(-1)
        squares = rows.exp().square().sum(-1)
        masked = [torch.where(batch.loss_mask, v, 0.0) for v in (chosen, entropy, squares)]
        return PolicyOutputs(masked[0], masked[1], squares=masked[2])

    def on_all_stages(self, values: Sequence[Tensor], _like: object) -> list[Tensor]:
        return list(values)

    @torch.no_grad()
    def logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        return [one.logprobs for one in self.proximal(batches)]

    @torch.no_grad()
    def proximal(self, batches: Sequence[PackedBatch]) -> list[PolicyOutputs]:
        self.forwards += len(batches)
        return [self.outputs(batch) for batch in batches]

    def update(
        self,
        batches: Sequence[PackedBatch],
        loss: Callable[[int, PackedBatch, PolicyOutputs], tuple[Tensor, Sums]],
    ) -> tuple[dict[str, float], float]:
        number, self.updates = self.updates, self.updates + 1
        if number in self._bad:
            raise NonFiniteError(f"update {number} is not finite")
        return descend(self.logits, [loss(i, b, self.outputs(b)) for i, b in enumerate(batches)])


class Values:
    """A critic of one value per token. Updates named in ``bad`` are not finite."""

    def __init__(self, *bad: int) -> None:
        self.table = torch.zeros(NUM_TOKENS, requires_grad=True)
        self.updates = 0
        self._bad = bad

    def outputs(self, batch: PackedBatch) -> Tensor:
        return torch.where(batch.loss_mask, self.table[batch.token_ids.roll(1)], 0.0)

    @torch.no_grad()
    def values(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        return [self.outputs(batch) for batch in batches]

    def update(
        self,
        batches: Sequence[PackedBatch],
        loss: Callable[[int, PackedBatch, Tensor], tuple[Tensor, Sums]],
    ) -> tuple[dict[str, float], float]:
        number, self.updates = self.updates, self.updates + 1
        if number in self._bad:
            raise NonFiniteError(f"the critic's update {number} is not finite")
        return descend(self.table, [loss(i, b, self.outputs(b)) for i, b in enumerate(batches)])


def descend(
    parameter: Tensor, results: Sequence[tuple[Tensor, Sums]]
) -> tuple[dict[str, float], float]:
    totals: Sums = {}
    for loss, sums in results:
        add_sums(totals, {**sums, "loss": loss.detach()})
    total = torch.stack([loss for loss, _ in results]).sum()
    (gradient,) = torch.autograd.grad(total, parameter)
    with torch.no_grad():
        parameter -= 0.5 * gradient
    figures = {name: float(total) for name, total in totals.items()}
    return figures, float(gradient.norm())


def algorithm(**settings: object) -> Algorithm:
    section = AlgoSection(**settings)  # type: ignore[arg-type]  # TOML's types
    return Algorithm(choice_of(section), max_response_tokens=6)


def sequences(count: int, step: int = 5) -> list[TrainTrajectory]:
    rng = np.random.default_rng(0)
    mask = np.arange(10) >= 4
    return [
        TrainTrajectory(
            token_ids=rng.integers(0, NUM_TOKENS, 10).astype(np.int32),
            loss_mask=mask,
            behavior_logprobs=np.where(mask, -2.0 + 0.2 * rng.normal(size=10), 0.0).astype("f4"),
            temperature=1.0,
            version_steps=np.full(10, step - i % 2, np.int32),
        )
        for i in range(count)
    ]


class Minibatch(NamedTuple):
    """A minibatch of one replica."""

    batches: list[PackedBatch]
    plan: MinibatchPlan


def minibatches(num: int = 3) -> list[Minibatch]:
    return [minibatch((i, i + 1), (i + 2, i + 3)) for i in range(0, 4 * num, 4)]


def minibatch(*indices: Sequence[int]) -> Minibatch:
    """Make a minibatch of these trajectories of a step, one microbatch of each argument."""
    plan = MinibatchPlan((tuple(map(tuple, indices)),))
    everything = sequences(max(plan.members) + 1)
    return Minibatch(
        batches=[pack([everything[i] for i in share], CPU) for share in indices], plan=plan
    )


def data(num: int = 3, *, step: int = 5) -> StepData:
    delivered = [
        DeliveredGroup(
            group_id=g,
            trajectories=(trajectory(g, 0, g % 2 + 0.5, (4, 5)), trajectory(g, 1, 0.0, (4, 4))),
        )
        for g in range(2 * num)
    ]
    return step_data(delivered, step=step, seed=0)


def train_parts(
    policy: Bigrams, parts: Sequence[Minibatch], given: StepData, chosen: Algorithm
) -> tuple[dict[str, float], list[TrainedMinibatch]]:
    batches, plans = [part.batches for part in parts], [part.plan for part in parts]
    return train_step(policy, batches, plans, given, chosen, PhaseClock())  # type: ignore[arg-type]  # a fake


def train(
    policy: Bigrams,
    chosen: Algorithm,
    given: StepData | None = None,
    parts: Sequence[Minibatch] | None = None,
) -> dict[str, float]:
    figures, _ = train_parts(policy, parts or minibatches(1), given or data(1), chosen)
    return figures


def with_critic(policy: Bigrams, critic: Values) -> Bigrams:
    policy.critic = critic  # type: ignore[assignment]  # a fake
    return policy


def with_reference(policy: Bigrams) -> Bigrams:
    """Give the policy a reference other than itself."""
    reference = Bigrams()
    with torch.no_grad():
        reference.logits += torch.randn(7, 7, generator=torch.Generator().manual_seed(2))
    policy.reference = reference  # type: ignore[assignment]  # a fake
    return policy
