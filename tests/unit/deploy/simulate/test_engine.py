"""An engine in closed form, against one that is stepped token by token."""

import math

import pytest

from slipstream.deploy.simulate.engine import SimulatedEngine
from slipstream.deploy.simulate.laws import EngineLaw

LAW = EngineLaw(base_s=0.004, weights_s=0.003, sequence_s=0.0001, context_s=2e-6, prefill_s=1e-4)


def stepped(law: EngineLaw, prompt: int, lengths: dict[int, int]) -> dict[int, float]:
    """Return when each sequence ends, by decode steps one after the other."""
    now, left, done = prompt * law.prefill_s, dict(lengths), {}
    context = prompt * len(lengths)
    for step in range(1, max(lengths.values()) + 1):
        now += law.step_s(len(left), context)
        context += len(left)
        for sibling in [s for s, length in left.items() if length == step]:
            done[sibling] = now
            context -= prompt + left.pop(sibling)
    return done


def ends(engine: SimulatedEngine, until_s: float = math.inf) -> dict[int, float]:
    done: dict[int, float] = {}
    while (at_s := engine.next_end_s()) < until_s:
        engine.advance(at_s)
        done |= {one.sibling: at_s for one in engine.take_ended()}
    return done


def test_ends_are_those_of_single_steps():
    lengths = {0: 400, 1: 37, 2: 1000, 3: 400, 4: 250}
    engine = SimulatedEngine(LAW, "e", 0, 0.0)
    engine.admit(7, 1, 50, lengths)
    closed, exact = ends(engine), stepped(LAW, 50, lengths)
    assert closed == pytest.approx(exact, rel=1e-3)  # a half token of context in each step
    assert engine.num_generated == pytest.approx(sum(lengths.values()))
    assert (engine.num_sequences, engine.context) == (0, 0.0)


def test_looking_in_between_changes_nothing():
    once, often = (SimulatedEngine(LAW, "e", 0, 0.0) for _ in range(2))
    for engine in (once, often):
        engine.admit(1, 1, 10, {0: 300, 1: 200})
    for tick in range(1, 50):
        often.advance(tick * 0.02)
    assert ends(often) == pytest.approx(ends(once))


def test_work_that_comes_later_slows_what_is_there():
    engine = SimulatedEngine(LAW, "e", 0, 0.0)
    engine.admit(1, 1, 10, {0: 300})
    alone_s = engine.next_end_s()
    engine.advance(0.5)
    engine.admit(2, 2, 10, {0: 300, 1: 300, 2: 300})
    assert engine.next_end_s() > alone_s + 10 * LAW.prefill_s


def test_a_pause_delays_every_end_by_itself_and_what_is_computed_again():
    engine = SimulatedEngine(LAW, "e", 0, 0.0)
    engine.admit(1, 1, 10, {0: 300, 1: 200})
    engine.advance(1.0)
    before_s = engine.next_end_s()
    engine.stall(2.0, recomputes=True)
    again_s = engine.context * LAW.prefill_s
    assert engine.next_end_s() == pytest.approx(before_s + 2.0 + again_s)
    engine.advance(2.0)
    assert engine.stalled_s == pytest.approx(1.0 + 10 * LAW.prefill_s)


def test_versions_of_an_answer_begin_at_the_tokens_that_followed_an_adoption():
    engine = SimulatedEngine(EngineLaw(base_s=0.1), "e", 3, 0.0)
    engine.admit(1, 1, 5, {0: 10, 1: 30})
    engine.advance(0.95)  # nine tokens and a half
    engine.adopt(4)
    engine.advance(2.0)
    engine.adopt(5)
    engine.adopt(6)  # nothing was sampled by 5
    versions = {}
    while (at_s := engine.next_end_s()) < math.inf:
        engine.advance(at_s)
        versions |= {one.sibling: one.versions for one in engine.take_ended()}
    assert versions == {0: ((5, 3),), 1: ((5, 3), (15, 4), (25, 6))}


def test_a_cancelled_group_leaves_the_others_alone():
    engine = SimulatedEngine(LAW, "e", 0, 0.0)
    engine.admit(1, 1, 10, {0: 300, 1: 20})
    engine.admit(2, 2, 10, {0: 100})
    engine.advance(0.05)
    engine.cancel(1)
    engine.cancel(1)
    engine.cancel(99)
    assert engine.num_sequences == 1
    engine.advance(engine.next_end_s())
    assert [one.group_id for one in engine.take_ended()] == [2]
    assert engine.next_end_s() == math.inf


@pytest.mark.parametrize(
    "wrong", [{"base_s": -1.0}, {"expert_share": 0.0}, {"base_s": 0.0}, {"context_s": math.nan}]
)
def test_a_law_that_is_none_is_refused(wrong: dict[str, float]):
    with pytest.raises(ValueError, match=r"expected|no time"):
        EngineLaw(**wrong)


def test_few_tokens_meet_few_experts():
    law = EngineLaw(experts_s=1.0, expert_share=8 / 128)
    assert law.flat_s(1) == pytest.approx(8 / 128)
    assert law.flat_s(2) == pytest.approx(1 - (120 / 128) ** 2)
    assert law.flat_s(1000) == pytest.approx(1.0)
