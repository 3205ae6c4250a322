"""One learner step: delivered groups in, changed weights and figures out.

forward passes and advantages -> minibatches of packed microbatches -> optimizer updates.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from slipstream.algos.compose import Algorithm, PolicyOutputs
from slipstream.algos.critic import value_loss
from slipstream.algos.diagnostics import Sums, added, critic_figures, critic_sums, figures_of
from slipstream.algos.reduce import reduced
from slipstream.learner.batches.orders import NonFiniteError
from slipstream.learner.batches.packing import PackedBatch
from slipstream.learner.batches.plan import MinibatchPlan
from slipstream.learner.training.prepare import PreparedMinibatch, prepare
from slipstream.learner.training.step_data import StepData
from slipstream.wire.process.phases import PhaseClock

if TYPE_CHECKING:
    from slipstream.learner.training.policy import Policy

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrainedMinibatch:
    """A minibatch that was trained."""

    number: int  # number of the minibatch in the step
    proximal: Sequence[Tensor]  # logprobs [T] at the start of the step, by microbatch


def train_step(
    policy: "Policy",
    batches: Sequence[Sequence[PackedBatch]],
    plans: Sequence[MinibatchPlan],
    data: StepData,
    algorithm: Algorithm,
    clock: PhaseClock,
    *,
    num_lags: int = 0,
) -> tuple[dict[str, float], list[TrainedMinibatch]]:
    """Train; return the figures of the step and the minibatches trained.

    The critic, if any, learns last, from the values at the start of the step: a batch that the
    policy refuses changes nothing. A minibatch whose loss or gradient is not finite is skipped, and
    counts in no figure except ``policy/skipped_minibatches`` (``critic/skipped_minibatches``). A
    minibatch without a token to train makes no update.

    ``batches`` are this rank's microbatches, by minibatch; ``plans`` and ``data`` are equal on all
    ranks. ``num_lags`` is the number of lags in the figures by version lag; 0 leaves them out.

    Raises:
        NonFiniteError: every minibatch was skipped; no weight has changed.
    """
    trains_policy = algorithm.trains_policy(data.step)
    with clock.phase("proximal"):
        shaped = algorithm.prepared(data.outcomes, data.is_truncated, data.step_generator())
        minibatches = prepare(policy, batches, plans, data, shaped, algorithm)
    figures = {"policy/trained_share": float((shaped.copies > 0).double().mean())}
    if trains_policy:
        with clock.phase("train"):
            more, trained = _train_policy(policy, minibatches, algorithm, num_lags)
        figures |= more
    else:
        trained = [
            TrainedMinibatch(i, minibatch.proximal) for i, minibatch in enumerate(minibatches)
        ]
    if (critic := policy.critic) is not None:
        with clock.phase("critic"):
            figures |= _updated(
                "critic",
                minibatches,
                lambda _, given: critic.update(given.batches, _CriticLoss(given, algorithm)),
                critic_figures,
                is_alone=not trains_policy,
            )
    return figures, trained


def _updated(
    name: str,
    minibatches: Sequence[PreparedMinibatch],
    update: Callable[[int, PreparedMinibatch], tuple[dict[str, float], float]],
    figures_of_sums: Callable[[dict[str, float]], dict[str, float]],
    *,
    is_alone: bool,
) -> dict[str, float]:
    """Update a model with each minibatch; if it is trained alone, one of them must succeed.

    ``update`` returns sums and the norm of the gradient.
    """
    sums_of: list[dict[str, float]] = []
    norms: list[float] = []
    failures: list[NonFiniteError] = []
    for number, minibatch in enumerate(minibatches):
        if minibatch.is_empty:
            continue
        try:
            sums, norm = update(number, minibatch)
        except NonFiniteError as error:
            _log.warning(
                "the %s skips minibatch %d of %d: %s", name, number, len(minibatches), error
            )
            failures.append(error)
            continue
        norms.append(norm)
        sums_of.append(sums)
    if is_alone and failures and not norms:
        raise failures[0]
    figures = {f"{name}/skipped_minibatches": float(len(failures))}
    if norms:
        totals = added(sums_of)
        figures[f"{name}/loss"] = totals.pop("loss") / len(norms)
        figures[f"{name}/grad_norm"] = sum(norms) / len(norms)
        figures |= figures_of_sums(totals)
    return figures


def _train_policy(
    policy: "Policy", minibatches: Sequence[PreparedMinibatch], algorithm: Algorithm, num_lags: int
) -> tuple[dict[str, float], list[TrainedMinibatch]]:
    trained: list[TrainedMinibatch] = []

    def update(number: int, minibatch: PreparedMinibatch) -> tuple[dict[str, float], float]:
        loss = _PolicyLoss(minibatch, algorithm, num_lags)
        updated = policy.update(minibatch.batches, loss)
        proximal = minibatch.proximal
        if minibatch.is_at_start:
            trained_batches = [microbatch.batch for microbatch in minibatch.microbatches]
            proximal = policy.on_all_stages(loss.logprobs, trained_batches)
        trained.append(TrainedMinibatch(number, proximal))
        return updated

    return _updated("policy", minibatches, update, figures_of, is_alone=True), trained


@dataclass(frozen=True, slots=True)
class _PolicyLoss:
    """The loss of each microbatch of a minibatch."""

    minibatch: PreparedMinibatch
    algorithm: Algorithm
    num_lags: int
    logprobs: list[Tensor] = field(default_factory=list)  # [T] before the update, by microbatch

    def __call__(
        self, number: int, _batch: PackedBatch, outputs: PolicyOutputs
    ) -> tuple[Tensor, Sums]:
        self.logprobs.append(outputs.logprobs.detach())
        given = self.minibatch.microbatches[number]
        return self.algorithm.loss(given, outputs, num_lags=self.num_lags)


@dataclass(frozen=True, slots=True)
class _CriticLoss:
    """Mean squared error per token, clipped around the values at the start of the step."""

    minibatch: PreparedMinibatch
    algorithm: Algorithm

    def __call__(self, number: int, batch: PackedBatch, values: Tensor) -> tuple[Tensor, Sums]:
        given, options = self.minibatch.microbatches[number], self.algorithm.choice.critic
        before, returns = given.values, given.returns
        if before is None or returns is None:
            part = self.algorithm.choice.advantage.part
            raise ValueError(f"algo.advantage = {part.name!r} gives no returns to its critic")
        returns = returns.to(values)
        per_token, clipped = value_loss(
            values, returns, before, clip=options.clip, huber=options.huber, mask=batch.loss_mask
        )
        loss = reduced(per_token, given.packing, given.denominators, "token-mean", given.copies)
        return loss, critic_sums(
            mask=given.trained, values=before, returns=returns, is_clipped=clipped
        )
