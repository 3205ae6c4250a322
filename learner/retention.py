"""Pure: which steps are saved, which checkpoint is the best, which ones are removed."""

from collections.abc import Sequence

from wire.checkpoints import CheckpointInfo
from wire.eval_metric import metric_of
from wire.run_settings import CheckpointSection, EvalSection
from wire.status import EvalPoint
from wire.versions import PolicyVersion


def is_save_due(step: int, checkpoint: CheckpointSection, evaluation: EvalSection) -> bool:
    """Tell whether the policy after ``step`` learner steps is saved while training goes on."""
    if checkpoint.every_steps and step % checkpoint.every_steps == 0:
        return True
    return checkpoint.keep_best and evaluation.is_due(step)


def is_final_save_due(checkpoint: CheckpointSection, evaluation: EvalSection) -> bool:
    """Tell whether the policy that the run ends with is saved."""
    return checkpoint.at_end or (checkpoint.keep_best and evaluation.enabled and evaluation.at_end)


def evaluation_of(info: CheckpointInfo, points: Sequence[EvalPoint]) -> EvalPoint | None:
    """Return the round that evaluated a checkpoint, None if there is none yet.

    After going back to an earlier step there may be rounds of the same step but an older epoch;
    those were answered by other weights.
    """
    for point in reversed(points):
        epochs = {version.epoch for version in point.versions}
        if point.step == info.step and (not epochs or max(epochs) == info.version.epoch):
            return point
    return None


def best_of(infos: Sequence[CheckpointInfo], metric: str) -> tuple[CheckpointInfo, float] | None:
    """Return the checkpoint with the highest figure and that figure; of equals, the first."""
    best: tuple[CheckpointInfo, float] | None = None
    for info in infos:
        value = metric_of(info.evaluation, metric) if info.evaluation is not None else None
        if value is not None and (best is None or value > best[1]):
            best = (info, value)
    return best


def to_remove(
    infos: Sequence[CheckpointInfo],
    checkpoint: CheckpointSection,
    evaluation: EvalSection,
    *,
    resumed_from: PolicyVersion | None,
) -> list[CheckpointInfo]:
    """Return the checkpoints that no rule keeps.

    Args:
        infos: all there are.
        checkpoint: says how many of the newest to keep, and whether the best one.
        evaluation: says what is best, and whose evaluation is still to come.
        resumed_from: the version that this learner started from, which stays until there is a
            newer one.
    """
    in_order = sorted(infos, key=lambda info: info.version)
    kept = {info.version for info in in_order[-checkpoint.keep_last :]}
    if in_order and resumed_from == in_order[-1].version:
        return []
    if checkpoint.keep_best:
        best = best_of(in_order, evaluation.metric)
        if best is not None:
            kept.add(best[0].version)
        kept.update(info.version for info in in_order if _is_awaited(info, in_order, evaluation))
    return [info for info in in_order if info.version not in kept]


def _is_awaited(
    info: CheckpointInfo, infos: Sequence[CheckpointInfo], evaluation: EvalSection
) -> bool:
    """Tell whether the evaluation of a checkpoint can still come: rounds end in order."""
    later = any(other.version > info.version and other.evaluation for other in infos)
    return info.evaluation is None and evaluation.is_due(info.step) and not later
