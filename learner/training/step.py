"""One learner step: delivered groups in, changed weights and figures out.

forward passes and advantages -> minibatches of packed microbatches -> optimizer updates.
"""

import hashlib
import logging
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slipstream.algos.advantages import Outcomes
from slipstream.algos.compose import Algorithm, LossInputs
from slipstream.algos.critic import value_loss
from slipstream.algos.diagnostics import Sums, add_sums, critic_figures, critic_sums, figures_of
from slipstream.algos.reduce import reduced
from slipstream.learner.batches.orders import NonFiniteError
from slipstream.learner.batches.packing import PackedBatch
from slipstream.learner.training.outputs import Said
from slipstream.learner.training.prepare import Minibatch, Ready, ready
from slipstream.wire.messages.broker import DeliveredGroup
from slipstream.wire.process.phases import PhaseClock

if TYPE_CHECKING:
    from slipstream.learner.training.critic import Critic
    from slipstream.learner.training.policy import Policy

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrainedMinibatch:
    """A minibatch that was trained."""

    number: int  # of the minibatch in the step
    proximal: Sequence[Tensor]  # logprobs [T] at the start of the step, by microbatch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepData:
    """What the headers of a step say, equal on all ranks. Shapes: N trajectories."""

    outcomes: Outcomes
    is_truncated: Tensor  # [N] bool
    step: int  # of the learner, against which the age of tokens counts
    seed: int  # of the run


def step_data(groups: Sequence[DeliveredGroup], *, step: int, seed: int) -> StepData:
    """Return the outcomes of delivered trajectories, in the order of groups and siblings."""
    trajectories = [t for group in groups for t in group.trajectories]
    sizes = torch.tensor([len(group.trajectories) for group in groups])
    return StepData(
        outcomes=Outcomes(
            rewards=torch.tensor([t.reward for t in trajectories], dtype=torch.float64),
            groups=torch.arange(len(groups)).repeat_interleave(sizes),
            num_groups=len(groups),
            lengths=torch.tensor([t.header.num_response_tokens for t in trajectories]),
            parts={
                name: torch.tensor(
                    [t.parts.get(name, math.nan) for t in trajectories], dtype=torch.float64
                )
                for name in sorted({name for t in trajectories for name in t.parts})
            },
        ),
        is_truncated=torch.tensor([t.header.finish_reason == "length" for t in trajectories]),
        step=step,
        seed=seed,
    )


def train_step(
    policy: "Policy",
    minibatches: Sequence[Minibatch],
    data: StepData,
    algorithm: Algorithm,
    clock: PhaseClock,
    *,
    num_lags: int = 0,
) -> tuple[dict[str, float], list[TrainedMinibatch]]:
    """Train; return the figures of the step and the minibatches that it was made of.

    The critic, where there is one, learns last, from what it expected at the start of the step: a
    batch that the policy refuses changes nothing. A minibatch whose loss or gradient is not finite
    is skipped, and is in no figure but ``policy/skipped_minibatches``
    (``critic/skipped_minibatches``); one that holds nothing to train makes no update.

    Args:
        policy: is changed.
        minibatches: this rank's share of the step.
        data: what all ranks know of the step.
        algorithm: of the run.
        clock: is told how long the phases take.
        num_lags: of the figures by version lag; 0 leaves them out.

    Raises:
        NonFiniteError: all of them were; no weight has changed.
    """
    trains_policy = algorithm.trains_policy(data.step)
    with clock.phase("proximal"):
        prepared = algorithm.prepared(data.outcomes, data.is_truncated, lots(data))
        share = ready(
            policy,
            minibatches,
            data.outcomes,
            prepared,
            algorithm,
            step=data.step,
            trains_policy=trains_policy,
        )
    figures = {"policy/trained_share": float((prepared.copies > 0).double().mean())}
    trained = [TrainedMinibatch(i, _proximal(one)) for i, one in enumerate(share)]
    if trains_policy:
        with clock.phase("train"):
            more, trained = _train_policy(policy, share, algorithm, num_lags)
        figures |= more
    if policy.critic is not None:
        with clock.phase("critic"):
            figures |= _train_critic(policy.critic, share, algorithm, is_alone=not trains_policy)
    return figures, trained


def lots(data: StepData) -> torch.Generator:
    """Return what decides chance in this step: equal on all ranks, and when it is trained again."""
    text = hashlib.blake2b(f"{data.seed}/{data.step}".encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(text, "little"))


def _proximal(share: Ready) -> list[Tensor]:
    return [one.proximal for one in share.microbatches if one.proximal is not None]


def _train_policy(
    policy: "Policy", share: Sequence[Ready], algorithm: Algorithm, num_lags: int
) -> tuple[dict[str, float], list[TrainedMinibatch]]:
    totals: Sums = {}
    norms: list[float] = []
    trained: list[TrainedMinibatch] = []
    failures: list[NonFiniteError] = []
    for number, minibatch in enumerate(share):
        if minibatch.is_empty:
            continue
        loss = _PolicyLoss(minibatch, algorithm, num_lags)
        try:
            sums, norm = policy.update(minibatch.batches, loss)
        except NonFiniteError as error:
            _log.warning("minibatch %d of %d is skipped: %s", number, len(share), error)
            failures.append(error)
            continue
        trained.append(TrainedMinibatch(number, _proximal(minibatch)))
        norms.append(norm)
        add_sums(totals, sums)
    skipped = {"policy/skipped_minibatches": float(len(failures))}
    if not trained:
        if failures:
            raise failures[0]
        return skipped, []
    loss_sum = float(totals.pop("loss"))
    figures = figures_of({name: float(total) for name, total in totals.items()})
    figures["policy/loss"] = loss_sum / len(norms)
    figures["policy/grad_norm"] = sum(norms) / len(norms)
    return figures | skipped, trained


@dataclass(frozen=True, slots=True)
class _PolicyLoss:
    """The loss of each microbatch of a minibatch; keeps its first logprobs as the proximal ones."""

    minibatch: Ready
    algorithm: Algorithm
    num_lags: int

    def __call__(self, number: int, batch: PackedBatch, said: Said) -> tuple[Tensor, Sums]:
        one = self.minibatch.microbatches[number]
        if one.proximal is None:
            one.proximal = said.logprobs.detach()
        return self.algorithm.loss(
            LossInputs(
                current=said.logprobs,
                proximal=one.proximal,
                behavior=batch.behavior_logprobs,
                advantages=one.advantages,
                entropy=said.entropy,
                packing=one.packing,
                denominators=self.minibatch.denominators,
                kept=self.minibatch.kept,
                reference=one.reference,
                full_kl=said.kl,
                teacher=one.teacher,
                lags=one.lags,
                copies=one.copies,
                right=one.right,
                minibatch=self.minibatch.whole,
                correction=one.correction,
            ),
            num_lags=self.num_lags,
        )


def _train_critic(
    critic: "Critic", share: Sequence[Ready], algorithm: Algorithm, *, is_alone: bool
) -> dict[str, float]:
    """Train the critic; where nothing else is trained, a step without any update is none."""
    totals: Sums = {}
    norms: list[float] = []
    failures: list[NonFiniteError] = []
    for minibatch in share:
        if minibatch.is_empty:
            continue
        try:
            sums, norm = critic.update(minibatch.batches, _CriticLoss(minibatch, algorithm))
        except NonFiniteError as error:
            _log.warning("the critic skips a minibatch: %s", error)
            failures.append(error)
            continue
        norms.append(norm)
        add_sums(totals, sums)
    if is_alone and failures and not norms:
        raise failures[0]
    figures = {"critic/skipped_minibatches": float(len(failures))}
    if norms:
        loss_sum = float(totals.pop("loss"))
        figures |= critic_figures({name: float(total) for name, total in totals.items()})
        figures["critic/loss"] = loss_sum / len(norms)
        figures["critic/grad_norm"] = sum(norms) / len(norms)
    return figures


@dataclass(frozen=True, slots=True)
class _CriticLoss:
    """The mean of squared errors per token, clipped around what was expected before the step."""

    minibatch: Ready
    algorithm: Algorithm

    def __call__(self, number: int, batch: PackedBatch, values: Tensor) -> tuple[Tensor, Sums]:
        one, options = self.minibatch.microbatches[number], self.algorithm.choice.critic
        if one.values is None or one.returns is None:
            part = self.algorithm.choice.advantage.part
            raise ValueError(f"algo.advantage = {part.name!r} gives no returns to its critic")
        mask, returns = batch.loss_mask, one.returns.to(values)
        per_token, clipped = value_loss(
            values, returns, one.values, clip=options.clip, huber=options.huber, mask=mask
        )
        loss = reduced(
            per_token, one.packing, self.minibatch.denominators, "token-mean", one.copies
        )
        return loss, critic_sums(
            mask=one.trained, values=one.values, returns=returns, is_clipped=clipped
        )


def batch_figures(
    groups: Sequence[DeliveredGroup], step: int, *, num_lags: int = 0
) -> dict[str, float]:
    """Return what the headers alone say about a batch.

    The variance of rewards within a group (population) is there once more by the lag of the
    group's oldest token; older ones count to the last.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    count = len(trajectories)
    headers = [t.header for t in trajectories]
    tokens = sum(h.num_response_tokens for h in headers)
    lag_sum = sum(
        (step - version.step) * n for h in headers for version, n in h.tokens_by_version()
    )
    variances: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        rewards = torch.tensor([t.reward for t in group.trajectories], dtype=torch.float64)
        variance = float(rewards.var(unbiased=False))
        variances["reward/group_variance"].append(variance)
        oldest = max(step - t.header.oldest_version.step for t in group.trajectories)
        if num_lags:
            variances[f"reward/group_variance@lag{min(oldest, num_lags - 1)}"].append(variance)
    return {
        "reward/mean": sum(t.reward for t in trajectories) / count,
        "response/tokens": tokens / count,
        "response/truncated": sum(h.finish_reason == "length" for h in headers) / count,
        "staleness/mean": lag_sum / tokens,
        "staleness/oldest": float(max(step - h.oldest_version.step for h in headers)),
        **{name: sum(values) / len(values) for name, values in variances.items()},
    }
