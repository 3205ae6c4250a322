"""Pure: which steps are saved, which checkpoint is best, which are removed."""

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.wire.files.checkpoints import CheckpointInfo
from slipstream.wire.messages.status import EvalPoint
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.settings.eval_metric import metric_of
from slipstream.wire.settings.sections import CheckpointSection, EvalSection


@dataclass(frozen=True, slots=True)
class Resumption:
    """A learner resumed from a checkpoint."""

    checkpoint: PolicyVersion  # version of the weights it started with
    epoch: int  # epoch granted to it


def is_save_due(step: int, checkpoint: CheckpointSection, evaluation: EvalSection) -> bool:
    """Return True if the policy after ``step`` learner steps is saved during training."""
    if checkpoint.every_steps and step % checkpoint.every_steps == 0:
        return True
    return checkpoint.keep_best and evaluation.is_due(step)


def is_final_save_due(checkpoint: CheckpointSection, evaluation: EvalSection) -> bool:
    """Return True if the policy that the run ends with is saved."""
    return checkpoint.at_end or (checkpoint.keep_best and evaluation.enabled and evaluation.at_end)


def is_overtaken(infos: Sequence[CheckpointInfo], resumption: Resumption) -> bool:
    """Return True if the learner went back: the newest checkpoint is of an abandoned life.

    It stays the newest until the first save of the new epoch.
    """
    newest = max((info.version for info in infos), default=resumption.checkpoint)
    return newest != resumption.checkpoint


def evaluation_of(
    info: CheckpointInfo, points: Sequence[EvalPoint], resumption: Resumption | None
) -> EvalPoint | None:
    """Return the round that evaluated a checkpoint, None if not evaluated yet.

    After a return to an earlier step there may be rounds of the same step but of another epoch:
    other weights answered those. The checkpoint that a learner resumed from has the same weights
    as the first version of the learner's epoch, so a round that was still open is answered in that
    epoch.
    """
    own = {info.version.epoch}
    if resumption is not None and info.version == resumption.checkpoint:
        own.add(resumption.epoch)
    for point in reversed(points):
        epochs = {version.epoch for version in point.versions}
        if point.step == info.step and (not epochs or max(epochs) in own):
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
    resumption: Resumption | None,
) -> list[CheckpointInfo]:
    """Return the checkpoints that no rule keeps.

    Args:
        infos: all checkpoints.
        checkpoint: number of the newest to keep, and whether to keep the best.
        evaluation: metric of the best, and steps at which evaluations are due.
        resumption: checkpoint that this learner resumed from. Until its own epoch has one, nothing
            is removed: the newest may be of an abandoned life.
    """
    in_order = sorted(infos, key=lambda info: info.version)
    if resumption is not None and all(info.version.epoch < resumption.epoch for info in in_order):
        return []
    kept = {info.version for info in in_order[-checkpoint.keep_last :]}
    if checkpoint.keep_best:
        best = best_of(in_order, evaluation.metric)
        if best is not None:
            kept.add(best[0].version)
        evaluated = max((info.version for info in in_order if info.evaluation), default=None)
        kept.update(  # evaluation can still come: rounds end in order
            info.version
            for info in in_order
            if info.evaluation is None
            and evaluation.is_due(info.step)
            and (evaluated is None or info.version > evaluated)
        )
    return [info for info in in_order if info.version not in kept]
