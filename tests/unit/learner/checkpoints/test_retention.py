import pytest

from slipstream.learner.checkpoints.retention import (
    Resumption,
    best_of,
    evaluation_of,
    is_final_save_due,
    is_overtaken,
    is_save_due,
    to_remove,
)
from slipstream.wire.files.checkpoints import CheckpointInfo
from slipstream.wire.messages.status import EvalFigures, EvalPoint
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.settings.sections import CheckpointSection, EvalSection
from tests.support.checkpoint_infos import checkpoint_info

EVERY_10 = EvalSection(file="held_out.jsonl", every_steps=10)


def point(step: int, mean: float, *, epoch: int = 1, pass_at_2: float = 0.0) -> EvalPoint:
    figures = EvalFigures(
        num_problems=4, num_answers=8, num_dropped=0, metrics={"mean@2": mean, "pass@2": pass_at_2}
    )
    return EvalPoint(
        step=step,
        overall=figures,
        by_source={"addition": figures},
        versions=(PolicyVersion(epoch, step),),
    )


def saved(step: int, mean: float | None = None, *, epoch: int = 1) -> CheckpointInfo:
    return checkpoint_info(
        PolicyVersion(epoch, step),
        evaluation=point(step, mean, epoch=epoch) if mean is not None else None,
    )


def removed(infos: list[CheckpointInfo], checkpoint: CheckpointSection) -> list[int]:
    return [info.step for info in to_remove(infos, checkpoint, EVERY_10, resumption=None)]


def test_steps_to_save():
    for checkpoint, steps in [
        (CheckpointSection(), []),
        (CheckpointSection(every_steps=4), [4, 8, 12, 16, 20]),
        (CheckpointSection(keep_best=True), [10, 20]),
        (CheckpointSection(every_steps=8, keep_best=True), [8, 10, 16, 20]),
    ]:
        assert [s for s in range(1, 21) if is_save_due(s, checkpoint, EVERY_10)] == steps


def test_the_end_is_saved_where_asked_or_where_its_evaluation_may_be_the_best():
    assert is_final_save_due(CheckpointSection(), EvalSection())
    no_end = CheckpointSection(at_end=False)
    assert not is_final_save_due(no_end, EVERY_10)
    best = CheckpointSection(at_end=False, keep_best=True)
    assert is_final_save_due(best, EVERY_10)
    assert not is_final_save_due(best, EvalSection())


def test_an_evaluation_belongs_to_the_checkpoint_of_its_step_and_epoch():
    points = [point(10, 0.1), point(20, 0.2), point(20, 0.3, epoch=2)]
    assert evaluation_of(saved(20), points, None) == points[1]
    assert evaluation_of(saved(20, epoch=2), points, None) == points[2]
    assert evaluation_of(saved(10, epoch=2), points, None) is None
    assert evaluation_of(saved(30), points, None) is None


def test_open_evaluation_round_belongs_to_the_checkpoint_resumed_from():
    stopped_at_20 = Resumption(PolicyVersion(1, 20), epoch=2)
    answered = [point(10, 0.1), point(20, 0.2, epoch=2)]
    assert evaluation_of(saved(20), answered, stopped_at_20) == answered[1]
    assert evaluation_of(saved(20), answered, None) is None
    went_back_to_10 = Resumption(PolicyVersion(1, 10), epoch=2)
    assert evaluation_of(saved(20), answered, went_back_to_10) is None
    later_life = Resumption(PolicyVersion(1, 20), epoch=3)
    assert evaluation_of(saved(20), answered, later_life) is None


@pytest.mark.parametrize("metric", ["mean", "addition:mean"])
def test_the_best_is_the_highest_and_of_equals_the_first(metric: str):
    infos = [saved(5), saved(10, 0.4), saved(20, 0.6), saved(30, 0.6), saved(40, 0.5)]
    best = best_of(infos, metric)
    assert best is not None
    assert (best[0].step, best[1]) == (20, 0.6)
    assert best_of([saved(5)], metric) is None
    assert best_of(infos, "subtraction:mean") is None


def test_the_newest_are_kept():
    infos = [saved(step) for step in (5, 15, 25, 35)]
    assert removed(infos, CheckpointSection(keep_last=1)) == [5, 15, 25]
    assert removed(infos, CheckpointSection(keep_last=3)) == [5]
    assert removed(infos[:1], CheckpointSection(keep_last=3)) == []


def test_the_best_is_kept_beside_the_newest():
    infos = [saved(10, 0.4), saved(20, 0.6), saved(30, 0.5), saved(35)]
    assert removed(infos, CheckpointSection(keep_last=1, keep_best=True)) == [10, 30]
    assert removed(infos, CheckpointSection(keep_last=1)) == [10, 20, 30]


def test_a_checkpoint_is_kept_until_its_evaluation_has_come():
    waiting = [saved(10, 0.4), saved(20), saved(25)]
    assert removed(waiting, CheckpointSection(keep_last=1, keep_best=True)) == []
    later = [saved(10, 0.4), saved(20), saved(30, 0.3), saved(35)]
    assert removed(later, CheckpointSection(keep_last=1, keep_best=True)) == [20, 30]


def test_after_going_back_nothing_is_removed_before_the_new_epoch_has_a_checkpoint():
    checkpoint = CheckpointSection(keep_last=1)
    resumption = Resumption(PolicyVersion(1, 40), epoch=3)
    abandoned = [saved(40), saved(50), saved(60, epoch=2)]
    assert to_remove(abandoned, checkpoint, EVERY_10, resumption=resumption) == []
    after = [*abandoned, saved(40, epoch=3)]
    gone = to_remove(after, checkpoint, EVERY_10, resumption=resumption)
    assert [(info.version.epoch, info.step) for info in gone] == [(1, 40), (1, 50), (2, 60)]


def test_going_back_is_distinguished_from_resuming_at_the_newest():
    infos = [saved(40), saved(60)]
    assert is_overtaken(infos, Resumption(PolicyVersion(1, 40), epoch=2))
    assert not is_overtaken(infos, Resumption(PolicyVersion(1, 60), epoch=2))
    assert not is_overtaken([], Resumption(PolicyVersion(1, 60), epoch=2)), "of another run"


def test_after_going_back_the_newer_epoch_is_the_newest():
    infos = [saved(10), saved(40), saved(12, epoch=2)]
    assert removed(infos, CheckpointSection(keep_last=1)) == [10, 40]
