from array import array

import pytest
from msgspec.structs import replace

from slipstream.wire.messages.arrays import DType, PackedArray
from slipstream.wire.messages.trajectory import (
    Decisions,
    Score,
    TrajectoryHeader,
    TrajectoryPayload,
    Turn,
    VersionRun,
)
from slipstream.wire.messages.versions import PolicyVersion

OLD, NEW = PolicyVersion(1, 3), PolicyVersion(1, 4)


def make_header(
    *starts: tuple[int, PolicyVersion], num_prompt_tokens: int = 4, num_tokens: int = 10
) -> TrajectoryHeader:
    return TrajectoryHeader(
        group_id=7,
        sibling=1,
        lease_id=3,
        num_prompt_tokens=num_prompt_tokens,
        num_tokens=num_tokens,
        version_runs=tuple(VersionRun(first, version) for first, version in starts),
        temperature=1.0,
        finish_reason="stop",
    )


def zeros(dtype: DType, *shape: int) -> PackedArray:
    item = {"bool": 1, "uint8": 1, "uint16": 2}.get(dtype, 4)
    count = 1
    for size in shape:
        count *= size
    return PackedArray(dtype, shape, memoryview(bytes(count * item)))


def test_an_array_with_the_wrong_number_of_bytes_is_rejected():
    for dtype, shape, num_bytes, needs in [
        ("int32", (2,), 4, 8),
        ("float32", (2, 3), 23, 24),
        ("bool", (3,), 4, 3),
        ("bool", (0,), 1, 0),
    ]:
        with pytest.raises(ValueError, match=f"needs {needs} bytes, got {num_bytes}"):
            PackedArray(dtype, shape, memoryview(bytes(num_bytes)))


def test_an_array_of_negative_size_is_rejected():
    with pytest.raises(ValueError, match=r"shape \(-1, -2\)"):
        PackedArray("int32", (-1, -2), memoryview(bytes(8)))


def test_an_array_is_measured_in_bytes_whatever_the_format_of_its_view():
    view = memoryview(array("i", [1, 2, 3]))
    assert PackedArray("int32", (3,), view).data.nbytes == 12


def test_tokens_by_version_cover_the_response_exactly():
    header = make_header((4, OLD), (6, NEW))
    assert header.tokens_by_version() == [(OLD, 2), (NEW, 4)]
    assert header.num_response_tokens == 6


def test_oldest_version_is_found_in_any_position():
    assert make_header((4, OLD), (6, NEW)).oldest_version == OLD
    assert make_header((4, NEW), (6, OLD)).oldest_version == OLD


def test_runs_that_do_not_divide_the_response_are_rejected():
    for starts in [
        (),
        ((3, OLD),),
        ((5, OLD),),
        ((4, OLD), (4, NEW)),
        ((4, OLD), (8, NEW), (6, OLD)),
        ((4, OLD), (10, NEW)),
        ((4, OLD), (12, NEW)),
    ]:
        with pytest.raises(ValueError, match=r"the response is \[4, 10\)"):
            make_header(*starts)


def test_a_trajectory_without_prompt_or_response_is_rejected():
    for num_prompt_tokens, num_tokens in [(0, 10), (10, 10), (11, 10), (-1, 5)]:
        with pytest.raises(ValueError, match="needs prompt and response tokens"):
            make_header(
                (num_prompt_tokens, OLD), num_prompt_tokens=num_prompt_tokens, num_tokens=num_tokens
            )


def test_arrays_that_do_not_belong_together_are_rejected_by_name():
    for field, packed in [
        ("loss_mask", zeros("bool", 4)),
        ("behavior_logprobs", zeros("int32", 5)),
        ("token_ids", zeros("float32", 5)),
    ]:
        arrays = {
            "token_ids": zeros("int32", 5),
            "loss_mask": zeros("bool", 5),
            "behavior_logprobs": zeros("float32", 5),
        }
        with pytest.raises(ValueError, match=f"{field} is"):
            TrajectoryPayload(**(arrays | {field: packed}))


def test_decisions_that_are_not_about_the_tokens_are_rejected():
    for decisions, why in [
        ({"kept_counts": zeros("uint8", 2)}, "together or not at all"),
        ({"kept_counts": zeros("float32", 2), "kept_ids": zeros("uint8", 2)}, "kept_counts is flo"),
        ({"kept_counts": zeros("uint8", 2), "kept_ids": zeros("int32", 1, 2)}, "with 1 axes"),
        ({"experts": zeros("uint8", 4, 2)}, "with 3 axes"),
        ({"kept_counts": zeros("uint8", 3), "kept_ids": zeros("uint8", 3)}, "chose 2 tokens"),
        ({"experts": zeros("uint8", 5, 2, 2)}, "the engine computed 4 at most"),
    ]:
        with pytest.raises(ValueError, match=why):
            TrajectoryPayload(
                token_ids=zeros("int32", 5),
                loss_mask=PackedArray("bool", (5,), memoryview(b"\0\0\0\1\1")),
                behavior_logprobs=zeros("float32", 5),
                decisions=Decisions(**decisions),
            )


def test_the_size_of_decisions_is_that_of_their_arrays():
    kept = Decisions(kept_counts=zeros("uint8", 2), kept_ids=zeros("uint16", 7))
    assert kept.num_bytes == 2 + 14
    assert Decisions(experts=zeros("uint8", 4, 3, 2)).num_bytes == 24
    assert Decisions().num_bytes == 0


def test_arrays_of_two_axes_are_rejected():
    with pytest.raises(ValueError, match="with 1 axis"):
        TrajectoryPayload(
            token_ids=zeros("int32", 1, 5),
            loss_mask=zeros("bool", 1, 5),
            behavior_logprobs=zeros("float32", 1, 5),
        )


@pytest.mark.parametrize(("reward", "unavailable"), [(None, ""), (0.0, "raised")])
def test_a_score_is_either_a_reward_or_a_reason(reward: float | None, unavailable: str):
    with pytest.raises(ValueError, match="a reward or unavailable"):
        Score(group_id=0, sibling=0, lease_id=0, reward=reward, unavailable=unavailable)


def of_turns(
    turns: list[tuple[int, int]], *, branches: tuple[int, ...] = (), num_tokens: int = 30
) -> TrajectoryHeader:
    header = make_header((4, OLD), num_tokens=num_tokens)
    return replace(header, turns=tuple(Turn(*turn) for turn in turns), branches=branches)


def test_a_trajectory_of_several_turns_counts_the_tokens_that_the_policy_chose():
    header = of_turns([(4, 6), (15, 5), (25, 5)], branches=(20,))
    assert header.num_response_tokens == 16
    assert header.bounds == (0, 20, 30)
    assert [turn.end for turn in header.chosen] == [10, 20, 30]


def test_a_response_is_the_only_turn_of_a_trajectory_without_turns():
    header = make_header((4, OLD))
    assert header.chosen == (Turn(4, 6),)
    assert header.bounds == (0, 10)


def test_versions_count_over_turns_what_they_chose_and_no_context():
    runs = (VersionRun(4, OLD), VersionRun(8, NEW), VersionRun(27, OLD))
    header = replace(of_turns([(4, 6), (15, 5), (25, 5)]), version_runs=runs)
    assert header.tokens_by_version() == [(OLD, 4), (NEW, 9), (OLD, 3)]
    assert sum(count for _, count in header.tokens_by_version()) == header.num_response_tokens


def test_turns_that_do_not_divide_a_trajectory_are_refused():
    for turns in [
        [(5, 25)],  # not after the prompt
        [(4, 6)],  # context follows it
        [(4, 6), (10, 20)],  # nothing between them
        [(4, 6), (9, 21)],
        [(4, 0), (15, 15)],
        [(15, 15), (4, 6)],
        [(4, 6), (15, 16)],
    ]:
        with pytest.raises(ValueError, match="expected context before each, of 4 tokens before"):
            of_turns(turns)


@pytest.mark.parametrize("branches", [(11,), (30,), (20, 10), (10, 10), (0,)])
def test_branches_begin_after_turns(branches: tuple[int, ...]):
    with pytest.raises(ValueError, match="branches start at"):
        of_turns([(4, 6), (15, 5), (25, 5)], branches=branches)


def test_a_trajectory_without_turns_has_no_branches():
    with pytest.raises(ValueError, match="turns are"):
        replace(make_header((4, OLD)), branches=(6,))


@pytest.mark.parametrize("start", [3, 10, 14, 20, 30])
def test_a_version_run_begins_with_a_token_that_was_chosen(start: int):
    runs = tuple(VersionRun(at, OLD) for at in sorted({4, start}))
    with pytest.raises(ValueError, match="version_runs start at"):
        replace(of_turns([(4, 6), (15, 5), (25, 5)]), version_runs=runs)
