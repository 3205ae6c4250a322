from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.generators.engine import Completion
from slipstream.generators.turns.conversation import Conversation, TrajectoryLimitError
from slipstream.wire.messages.trajectory import FinishReason, TrajectoryHeader, Turn, VersionRun
from slipstream.wire.messages.versions import PolicyVersion

V0, V1 = PolicyVersion(1, 0), PolicyVersion(1, 1)


def reply(
    *ids: int,
    versions: Sequence[tuple[int, PolicyVersion]] = ((0, V0),),
    finish_reason: FinishReason = "stop",
    prompt: int = 0,
    expert: int = 0,
) -> Completion:
    return Completion(
        token_ids=list(ids),
        logprobs=[-float(one) for one in ids],
        version_starts=list(versions),
        finish_reason=finish_reason,
        kept=[[one, one + 1] for one in ids],
        experts=np.full((prompt + len(ids) - 1, 1, 1), expert, np.int32) if prompt else None,
    )


def conversation(max_turns: int = 9, max_tokens: int = 99) -> Conversation:
    return Conversation(max_turns=max_turns, max_tokens=max_tokens)


def header_of(it: Conversation) -> TrajectoryHeader:
    """Return a header, which refuses what is none."""
    return TrajectoryHeader(
        group_id=0,
        sibling=0,
        lease_id=0,
        num_prompt_tokens=it.turns[0].first_token,
        num_tokens=it.num_tokens,
        version_runs=it.version_runs,
        temperature=1.0,
        finish_reason=it.finish_reason,
        turns=it.turns,
        branches=it.branches,
    )


def test_a_prompt_that_begins_with_everything_so_far_continues_it():
    it = conversation()
    it.add([1, 2], reply(3, 4))
    it.add([1, 2, 3, 4, 5], reply(6))
    assert it.token_ids == [1, 2, 3, 4, 5, 6]
    assert it.turns == (Turn(2, 2), Turn(5, 1))
    assert it.branches == ()
    assert it.logprobs == [0.0, 0.0, -3.0, -4.0, 0.0, -6.0]
    assert it.kept == [[3, 4], [4, 5], [6, 7]]


def test_of_two_equal_branches_a_prompt_continues_the_newest():
    it = conversation()
    it.add([1, 2], reply(3))
    it.add([1, 2], reply(3))
    it.add([1, 2, 3, 4], reply(5))
    assert it.token_ids == [1, 2, 3, 1, 2, 3, 4, 5]
    assert (it.branches, it.turns) == ((3,), (Turn(2, 1), Turn(5, 1), Turn(7, 1)))


def test_numbers_of_replies_go_to_the_turns_that_they_are_part_of():
    it = conversation()
    gone = reply(8)
    it.add([1, 2], reply(3))  # 0: branch 0
    it.add([7], reply(5))  # 1: branch 1
    it.add([7, 5, 9], gone)  # nobody got it
    it.add([1, 2, 3, 4], reply(6))  # 2: branch 0 again, after branch 1
    it.add([1, 2, 3, 4, 6], reply(6))  # 3: goes on with the turn before it
    it.withdraw(gone)
    it.add([7, 5, 2], reply(1))  # 4: branch 1
    assert it.turns == (Turn(2, 1), Turn(4, 2), Turn(7, 1), Turn(9, 1))
    assert it.by_turn([1.0, 2.0, 4.0, 8.0, 16.0]) == (1.0, 12.0, 2.0, 16.0)
    assert header_of(it).chosen == it.turns
    with pytest.raises(ValueError, match="shorter"):
        it.by_turn([1.0])


def test_any_other_prompt_begins_a_branch_in_which_only_its_reply_is_chosen():
    for prompt in [
        [1, 2, 3, 9],  # the reply was cut
        [1, 9, 3, 4, 5],  # what came before it was edited
        [7, 8],  # compacted
        [1, 2],  # asked again
    ]:
        it = conversation()
        it.add([1, 2], reply(3, 4))
        it.add(prompt, reply(6))
        assert it.token_ids == [1, 2, 3, 4, *prompt, 6]
        assert it.branches == (4,)
        assert it.turns == (Turn(2, 2), Turn(4 + len(prompt), 1))
        header_of(it)


def test_a_response_that_goes_on_is_one_turn():
    it = conversation()
    it.add([1, 2], reply(3, finish_reason="length"))
    it.add([1, 2, 3], reply(4, 5, versions=[(0, V1)]))
    assert it.turns == (Turn(2, 3),)
    assert it.version_runs == (VersionRun(2, V0), VersionRun(3, V1))
    header_of(it)


def test_version_runs_are_of_chosen_tokens_across_turns_and_branches():
    it = conversation()
    it.add([1, 2], reply(3, 4, versions=[(0, V0), (1, V1)]))
    it.add([1, 2, 3, 4, 5], reply(6, versions=[(0, V1)]))
    it.add([9], reply(8, versions=[(0, V1)]))
    header = header_of(it)
    assert header.version_runs == (VersionRun(2, V0), VersionRun(3, V1), VersionRun(7, V1))
    assert header.tokens_by_version() == [(V0, 1), (V1, 2), (V1, 1)]
    assert it.newest_version == V1


def test_experts_are_those_of_the_call_that_computed_a_token_first():
    it = conversation()
    it.add([1, 2], reply(3, 4, prompt=2, expert=5))
    it.add([1, 2, 3, 4, 5], reply(6, prompt=5, expert=6))
    it.add([9], reply(8, prompt=1, expert=7))
    assert it.experts is not None
    assert it.experts.flatten().tolist() == [5, 5, 5, 6, 6, 7]


def test_a_reply_records_experts_from_the_first_token_that_its_branch_does_not_know():
    it = conversation()
    it.add([1, 2], reply(3, 4, prompt=2, expert=5))
    assert [len(part) for part in it.known_experts([1, 2, 3, 4, 5])] == [3]
    assert it.known_experts([1, 2, 3, 9]) == ()  # of another history
    with it.room([1, 2, 3, 4, 5], most=9):
        assert it.known_experts([1, 2, 3, 4, 5]) == ()  # it will begin a branch


@pytest.mark.parametrize("lost", ["its reply before", "its branch"])
def test_experts_are_complete_where_a_branch_changed_under_a_reply(lost: str):
    it = conversation()
    it.add([1, 2], reply(3, 4, prompt=2, expert=5))
    before = reply(6, prompt=5, expert=6)
    it.add([1, 2, 3, 4, 5], before)
    prompt = [1, 2, 3, 4, 5, 6, 7]
    known = it.known_experts(prompt)
    assert sum(map(len, known)) == 5
    late = reply(8, prompt=2, expert=7)  # those of tokens 5 and 6
    if lost == "its branch":
        with it.room(prompt, most=9):
            it.add(prompt, late, known)
        assert it.branches == (6,)
    else:
        assert it.withdraw(before)
        it.add(prompt, late, known)
        assert it.branches == ()
    assert it.experts is not None
    assert it.experts.flatten().tolist()[-7:] == [5, 5, 5, 6, 6, 7, 7]


def test_experts_that_one_call_did_not_tell_are_not_known():
    it = conversation()
    it.add([1, 2], reply(3, 4, prompt=2))
    it.add([9], reply(8))
    assert it.experts is None


def test_a_response_that_nobody_got_is_taken_back_with_its_prompt():
    it = conversation()
    it.add([1, 2], reply(3))
    lost, kept = reply(5), reply(6)
    it.add([1, 2, 3, 4], lost)
    it.withdraw(lost)
    assert it.token_ids == [1, 2, 3]
    it.add([1, 2, 3, 4], kept)
    assert it.token_ids == [1, 2, 3, 4, 6]
    alone = reply(7)
    it.add([9], alone)
    it.withdraw(alone)
    assert it.branches == ()
    header_of(it)


def test_calls_that_would_go_on_from_one_branch_have_a_branch_each():
    it = conversation(max_tokens=100, max_turns=9)
    it.add([1, 2], reply(3, 4))
    with it.room([1, 2, 3, 4, 5], most=10), it.room([1, 2, 3, 4, 5], most=200) as second:
        assert second == 100 - 4 - (1 + 10) - 5
    assert room(it, [1, 2, 3, 4, 5]) == 95


def room(it: Conversation, prompt_ids: list[int]) -> int:
    with it.room(prompt_ids, most=1_000) as found:
        return found


def test_a_trajectory_has_no_more_turns_than_it_may():
    it = conversation(max_turns=1)
    it.add([1], reply(2))
    with pytest.raises(TrajectoryLimitError, match="1 turns at most"):
        room(it, [1, 2, 3])


def test_tokens_that_a_branch_has_already_take_no_room():
    it = conversation(max_tokens=10)
    assert room(it, [1, 2]) == 8
    it.add([1, 2], reply(3, 4))
    assert room(it, [1, 2, 3, 4, 5]) == 5
    assert room(it, [1, 2, 3]) == 3  # a branch of its own
    with pytest.raises(TrajectoryLimitError, match=r"a prompt of 6 tokens, 6 of them new, after 4"):
        room(it, [9, 9, 9, 9, 9, 9])


def test_calls_under_way_side_by_side_have_no_more_than_there_is():
    it = conversation(max_tokens=20, max_turns=3)
    with it.room([1, 2], most=5) as one, it.room([1, 2], most=5) as other:
        assert (one, other) == (5, 5)
        with it.room([1, 2], most=9) as third:
            assert third == 4
            with pytest.raises(TrajectoryLimitError, match="3 turns at most"):
                room(it, [1, 2])
        with pytest.raises(TrajectoryLimitError, match="20 at most"):
            room(it, [1, 2, 3, 4, 5, 6])
    assert room(it, [1, 2]) == 18


@given(st.data())
def test_every_chosen_token_is_in_the_loss_once_as_it_was_chosen(data: st.DataObject):
    """Histories are continued, cut, edited and begun anew in any order."""
    it = conversation(max_turns=1_000, max_tokens=100_000)
    token = st.integers(0, 3)
    said: list[tuple[list[int], list[int]]] = []
    for _ in range(data.draw(st.integers(1, 12))):
        prompt: list[int] = []
        if said:
            before, answer = data.draw(st.sampled_from(said))
            prompt = [*before, *answer][: data.draw(st.integers(0, len(before) + len(answer)))]
        prompt += data.draw(st.lists(token, min_size=int(not prompt), max_size=3))
        answer = data.draw(st.lists(token, min_size=1, max_size=3))
        it.add(prompt, reply(*answer))
        said.append((prompt, answer))
    header = header_of(it)
    chosen = [it.token_ids[one.first_token : one.end] for one in header.turns]
    assert sorted(t for one in chosen for t in one) == sorted(t for _, one in said for t in one)
    assert header.num_response_tokens == sum(len(answer) for _, answer in said)
    # Each is after the prompt that it was chosen after.
    bounds = header.bounds
    for turn in header.turns:
        start = max(bound for bound in bounds if bound <= turn.first_token)
        text = it.token_ids[start : turn.end]
        assert any(
            text[: len(prompt)] == prompt and text[len(prompt) :][: len(answer)] == answer
            for prompt, answer in said
        )


@given(st.data())
def test_experts_are_the_same_whether_each_is_recorded_once_or_at_every_turn(data: st.DataObject):
    """Histories are continued, cut, edited, begun anew and taken back in any order."""
    once, always = conversation(1_000, 100_000), conversation(1_000, 100_000)
    said: list[list[int]] = []
    for number in range(data.draw(st.integers(1, 12))):
        before = data.draw(st.sampled_from(said)) if said else []
        prompt = before[: data.draw(st.integers(0, len(before)))]
        prompt += data.draw(st.lists(st.integers(0, 3), min_size=int(not prompt), max_size=3))
        whole = reply(*data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3)))
        rows = np.full((len(prompt) + len(whole.token_ids) - 1, 1, 1), number, np.int32)
        rows[:, 0, 0] += 100 * np.arange(len(rows), dtype=np.int32)
        known = once.known_experts(prompt)
        rest = replace(whole, experts=rows[sum(map(len, known)) :])
        whole = replace(whole, experts=rows)
        once.add(prompt, rest, known)
        always.add(prompt, whole)
        if data.draw(st.booleans()):
            assert once.withdraw(rest) is always.withdraw(whole) is True
        else:
            said.append([*prompt, *whole.token_ids])
        assert (once.token_ids, once.branches) == (always.token_ids, always.branches)
        if once.experts is None or always.experts is None:
            assert once.experts is always.experts is None
        else:
            assert np.array_equal(once.experts, always.experts)


def test_replies_side_by_side_take_no_more_than_their_room():
    """The first to end does not take the branch that another one goes on with."""
    it = Conversation(max_turns=9, max_tokens=1_000)
    it.add(list(range(300)), reply(*range(300, 400)))
    prompt = [*it.token_ids, *range(2_000, 2_010)]
    with it.room(prompt, most=100) as first:
        with it.room(prompt, most=80) as second:
            assert (first, second) == (100, 80)
        it.add(prompt, reply(*range(7_000, 7_000 + second)))
        with pytest.raises(TrajectoryLimitError, match="after 890 tokens"):
            room(it, list(range(5_000, 5_300)))
    it.add(prompt, reply(*range(8_000, 8_000 + first)))
    assert it.num_tokens == it.max_tokens
