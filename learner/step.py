"""One learner step: delivered groups in, changed weights and figures out.

proximal logprobs -> minibatches of packed microbatches -> optimizer updates.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from algos.advantages import group_relative_advantages
from algos.batch import TrainBatch
from algos.config import AlgoSection
from algos.diagnostics import diagnostic_sums, figures_of
from algos.losses import Clip, decoupled_ppo_loss
from learner.collate import PackedBatch
from learner.orders import NonFiniteError
from wire.control import DeliveredGroup, DeliveredTrajectory
from wire.phases import PhaseClock

if TYPE_CHECKING:
    from learner.policy import Policy

_log = logging.getLogger(__name__)
Sums = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Minibatch:
    """This rank's share of one optimizer update."""

    batches: Sequence[PackedBatch]
    global_num_tokens: int  # over all ranks


def advantages_of(groups: Sequence[DeliveredGroup], algo: AlgoSection) -> list[float]:
    """Return one advantage per trajectory, in the order of groups and siblings."""
    rewards = torch.tensor([[t.reward for t in group.trajectories] for group in groups])
    values: list[float] = (
        group_relative_advantages(rewards, divide_by_std=algo.advantage == "grpo")
        .flatten()
        .tolist()
    )
    return values


@dataclass(frozen=True, slots=True)
class TrainedMinibatch:
    """A minibatch that changed the weights."""

    number: int  # of the minibatch in the step
    proximal: Sequence[Tensor]  # logprobs [T] at the start of the step, by microbatch


def train_step(
    policy: "Policy",
    minibatches: Sequence[Minibatch],
    algo: AlgoSection,
    clock: PhaseClock,
    *,
    step: int = 0,
    num_lags: int = 0,
) -> tuple[dict[str, float], list[TrainedMinibatch]]:
    """Train; return the figures of the step and the minibatches that it was made of.

    The first minibatch is computed with the weights that the step starts from: its proximal
    logprobs are its current ones, and need no forward pass of their own. A minibatch whose loss or
    gradient is not finite is skipped, and is in no figure but ``policy/skipped_minibatches``.

    Args:
        policy: is changed.
        minibatches: this rank's share of the step.
        algo: of the run.
        clock: is told how long the phases take.
        step: of the learner, against which the age of tokens counts.
        num_lags: of the figures by version lag; 0 leaves them out.

    Raises:
        NonFiniteError: all of them were; the weights are as they were.
    """
    with clock.phase("proximal"):
        proximal = [[], *(policy.proximal_logprobs(one.batches) for one in minibatches[1:])]
    clip = Clip(low=algo.clip_low, high=algo.clip_high)
    totals: Sums = {}
    norms: list[float] = []
    trained: list[TrainedMinibatch] = []
    failures: list[NonFiniteError] = []
    with clock.phase("train"):
        for number, (minibatch, anchors) in enumerate(zip(minibatches, proximal, strict=True)):
            loss = _Loss(
                minibatch.global_num_tokens, anchors, clip, algo.max_correction, step, num_lags
            )
            try:
                sums, norm = policy.update(minibatch.batches, loss)
            except NonFiniteError as error:
                _log.warning("minibatch %d of %d is skipped: %s", number, len(minibatches), error)
                failures.append(error)
                continue
            trained.append(TrainedMinibatch(number, anchors))
            norms.append(norm)
            for name, value in sums.items():
                totals[name] = totals.get(name, torch.zeros_like(value)) + value
    if not trained:
        raise failures[0]
    num_tokens = sum(minibatches[one.number].global_num_tokens for one in trained)
    figures = _figures(totals, norms, num_tokens)
    figures["policy/skipped_minibatches"] = float(len(failures))
    return figures, trained


@dataclass(frozen=True, slots=True)
class _Loss:
    global_num_tokens: int
    proximal: list[Tensor]  # by microbatch; filled from the forward passes where it is empty
    clip: Clip
    max_correction: float
    step: int
    num_lags: int

    def __call__(
        self, number: int, batch: PackedBatch, logprobs: Tensor, entropy: Tensor
    ) -> tuple[Tensor, Sums]:
        if number == len(self.proximal):
            self.proximal.append(logprobs.detach())
        train_batch = TrainBatch(
            current_logprobs=logprobs,
            proximal_logprobs=self.proximal[number],
            behavior_logprobs=batch.behavior_logprobs,
            advantages=batch.advantages,
            loss_mask=batch.loss_mask,
            lags=None if batch.version_steps is None else self.step - batch.version_steps,
            global_num_tokens=self.global_num_tokens,
        )
        loss = decoupled_ppo_loss(train_batch, self.clip, max_correction=self.max_correction)
        return loss, diagnostic_sums(train_batch, entropy, self.clip, num_lags=self.num_lags)


def _figures(totals: Sums, norms: Sequence[float], num_tokens: int) -> dict[str, float]:
    loss = float(totals.pop("loss")) / len(norms)
    figures = figures_of({name: float(total) for name, total in totals.items()}, num_tokens)
    figures["policy/loss"] = loss
    figures["policy/grad_norm"] = sum(norms) / len(norms)
    return figures


def batch_figures(trajectories: Sequence[DeliveredTrajectory], step: int) -> dict[str, float]:
    """Return what the headers alone say about a batch."""
    count = len(trajectories)
    headers = [t.header for t in trajectories]
    tokens = sum(h.num_response_tokens for h in headers)
    lag_sum = sum(
        (step - version.step) * n for h in headers for version, n in h.tokens_by_version()
    )
    return {
        "reward/mean": sum(t.reward for t in trajectories) / count,
        "response/tokens": tokens / count,
        "response/truncated": sum(h.finish_reason == "length" for h in headers) / count,
        "staleness/mean": lag_sum / tokens,
        "staleness/oldest": float(max(step - h.oldest_version.step for h in headers)),
    }
