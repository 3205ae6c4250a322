"""An engine in closed form, against one that is stepped token by token."""

import math
from dataclasses import replace

import pytest

from slipstream.deploy.predict.laws.engine_law import EngineLaw
from slipstream.deploy.predict.simulate.engine import SimulatedEngine

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


def test_a_recurrent_state_is_read_with_every_token_and_takes_its_room():
    law = replace(LAW, state_tokens=300.0, max_cached_tokens=1600.0)
    engine = SimulatedEngine(law, "e", 0, 0.0)
    engine.admit(7, 1, 50, {0: 40})
    assert engine.context == 350.0
    (end_s,) = ends(engine).values()
    reads = 40 * 300.0 * law.context_s
    assert end_s == pytest.approx(stepped(LAW, 50, {0: 40})[0] + reads, rel=1e-3)
    for group in range(4):  # a fifth of the cache each, and a tenth is spare
        engine.admit(group, group, 20, {0: 400})
    assert engine.num_sequences == 4
    assert engine.context == pytest.approx(4 * 320.0)
    engine.admit(9, 9, 20, {0: 400})
    assert engine.context == pytest.approx(4 * 320.0)


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
    assert versions == {0: [(5, 3)], 1: [(5, 3), (15, 4), (25, 6)]}


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


def test_a_full_cache_retracts_what_was_begun_last_and_computes_it_again():
    law = replace(LAW, max_cached_tokens=1000.0)
    full, ample = (SimulatedEngine(one, "e", 0, 0.0) for one in (law, LAW))
    for engine in (full, ample):
        for group in range(4):
            engine.admit(group, group, 100, {0: 400})
    assert full.has_room
    ended: list[int] = []
    while (at_s := full.next_end_s()) < math.inf:
        full.advance(at_s)
        ended += [one.group_id for one in full.take_ended()]
        assert full.context <= 1000.0 + 1e-3
    # Four of 250 tokens fill it: the last two give way, one after the other.
    assert (ended, full.num_retractions) == ([0, 1, 2, 3], 2)
    assert full.num_generated == pytest.approx(1600)
    assert (full.num_sequences, full.context) == (0, 0.0)
    while (late_s := ample.next_end_s()) < math.inf:
        ample.advance(late_s)
        ample.take_ended()
    again = 252 + 336  # about: tokens that the two had
    assert full.now_s > ample.now_s
    assert full.stalled_s - ample.stalled_s == pytest.approx(again * LAW.prefill_s, rel=0.1)


def test_nothing_new_begins_while_something_is_retracted():
    engine = SimulatedEngine(replace(LAW, max_cached_tokens=500.0), "e", 0, 0.0)
    engine.admit(1, 1, 10, {0: 400, 1: 400})
    engine.advance(engine.next_end_s())
    assert engine.take_ended() == []
    assert engine.context < 300
    assert not engine.has_room
    assert engine.num_sequences == 2
    engine.cancel(1)
    assert engine.has_room
    assert engine.next_end_s() == math.inf


def test_a_retracted_answer_has_the_versions_of_its_tokens():
    law = EngineLaw(base_s=0.1, max_cached_tokens=100.0)
    engine = SimulatedEngine(law, "e", 3, 0.0)
    engine.admit(1, 1, 10, {0: 60})
    engine.admit(2, 2, 10, {0: 60})
    engine.advance(2.05)
    engine.adopt(4)
    versions = {}
    while (at_s := engine.next_end_s()) < math.inf:
        engine.advance(at_s)
        versions |= {one.group_id: one.versions for one in engine.take_ended()}
        if engine.num_retractions and engine.step == 4:
            engine.adopt(5)
    assert versions[1] == [(10, 3), (31, 4), (50, 5)]
    # Retracted after 40 of its tokens, before the adoption; went on after it.
    assert versions[2] == [(10, 3), (31, 4), (50, 5)]


def test_what_has_no_room_waits_without_a_charge_and_a_prompt_is_computed_once():
    engine = SimulatedEngine(replace(LAW, max_cached_tokens=1000.0), "e", 0, 0.0)
    engine.admit(1, 1, 200, dict.fromkeys(range(8), 50))
    assert (engine.num_sequences, engine.context) == (8, 800)
    assert engine.debt_s == pytest.approx(200 * LAW.prefill_s)
    assert not engine.has_room
    assert len(ends(engine)) == 8
    assert engine.num_retractions == 0
    # The second four begin when the first have gone, with their prompt.
    assert engine.stalled_s == pytest.approx(2 * 200 * LAW.prefill_s)


def test_a_group_that_is_partly_ended_and_partly_retracted_is_given_up_whole():
    engine = SimulatedEngine(replace(LAW, max_cached_tokens=400.0), "e", 0, 0.0)
    engine.admit(1, 1, 10, {0: 300})
    engine.admit(2, 2, 10, {0: 20, 1: 300})
    while not engine.num_retractions:
        engine.advance(engine.next_end_s())
        engine.take_ended()
    assert (engine.num_sequences, engine.num_behind) == (2, 1)
    engine.cancel(2)
    assert (engine.num_sequences, engine.num_behind) == (1, 0)
    assert list(ends(engine)) == [0]


@pytest.mark.parametrize("at_s", [0.0, 1e9])
def test_a_full_cache_is_left_behind_however_late_it_is(at_s: float):
    law = EngineLaw(base_s=1e-4, max_cached_tokens=700.3)
    engine = SimulatedEngine(law, "e", 0, at_s)
    for group in range(5):
        engine.admit(group, group, 7, {0: 311})
    events = 0
    while (next_s := engine.next_end_s()) < math.inf:
        engine.advance(next_s)
        engine.take_ended()
        events += 1
        assert events < 100
    assert engine.num_sequences == 0


def test_one_answer_may_be_longer_than_the_cache():
    engine = SimulatedEngine(replace(LAW, max_cached_tokens=50.0), "e", 0, 0.0)
    engine.admit(1, 1, 10, {0: 400})
    assert ends(engine)
    assert engine.num_retractions == 0


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
