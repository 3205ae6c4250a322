from collections.abc import Sequence

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from slipstream.learner.batches.packing import (
    ExpertSizes,
    TrainTrajectory,
    bars_other_ends,
    pack,
    unpack,
)
from slipstream.wire.errors import ProtocolError
from slipstream.wire.messages.arrays import PackedArray
from slipstream.wire.messages.trajectory import (
    Decisions,
    TrajectoryHeader,
    TrajectoryPayload,
    Turn,
    VersionRun,
)
from slipstream.wire.messages.versions import PolicyVersion

VOCAB = 32


def header(num_tokens: int = 4, temperature: float = 0.5) -> TrajectoryHeader:
    return TrajectoryHeader(
        group_id=3,
        sibling=1,
        lease_id=0,
        num_prompt_tokens=2,
        num_tokens=num_tokens,
        version_runs=(VersionRun(2, PolicyVersion(1, 0)),),
        temperature=temperature,
        finish_reason="stop",
    )


def payload(
    logprobs: list[float], *, ids: Sequence[int] = (), mask: Sequence[bool] = ()
) -> TrajectoryPayload:
    count = len(logprobs)
    token_ids = np.array(ids or range(10, 10 + count), "<i4")
    loss_mask = np.array(mask, "?") if mask else np.arange(count) >= 2
    values = np.array(logprobs, "<f4")
    return TrajectoryPayload(
        token_ids=PackedArray("int32", (count,), memoryview(token_ids.tobytes())),
        loss_mask=PackedArray("bool", (count,), memoryview(loss_mask.tobytes())),
        behavior_logprobs=PackedArray("float32", (count,), memoryview(values.tobytes())),
    )


def sequence(*ids: int, temperature: float = 1.0) -> TrainTrajectory:
    count = len(ids)
    mask = np.arange(count) >= 1
    return TrainTrajectory(
        token_ids=np.array(ids, np.int32),
        loss_mask=mask,
        behavior_logprobs=np.where(mask, np.float32(-0.5), np.float32(0.0)),
        temperature=temperature,
    )


def test_sequences_are_laid_end_to_end_without_padding():
    batch = pack(
        [sequence(7, 8, 9, temperature=2.0), sequence(5, 6, temperature=1.0)], torch.device("cpu")
    )
    assert batch.token_ids.tolist() == [7, 8, 9, 5, 6]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 3, 5]
    assert max(batch.lengths) == 3
    assert batch.loss_mask.tolist() == [False, True, True, False, True]
    assert batch.behavior_logprobs.tolist() == [0.0, -0.5, -0.5, 0.0, -0.5]
    assert batch.temperature.tolist() == [2.0] * 3 + [1.0] * 2


def with_prompt(prompt: list[int], response: list[int], branches: int = 1) -> TrainTrajectory:
    ids, mask = [*prompt, *response], [False] * len(prompt) + [True] * len(response)
    count = len(ids) * branches
    return TrainTrajectory(
        token_ids=np.array(ids * branches, np.int32),
        loss_mask=np.array(mask * branches),
        behavior_logprobs=np.zeros(count, np.float32),
        temperature=1.0,
        branches=tuple(range(len(ids), count, len(ids))),
    )


def test_states_before_chosen_tokens_are_listed():
    batch = pack([with_prompt([1, 2], [3, 4]), with_prompt([1], [2])], torch.device("cpu"))
    assert batch.choosing.tolist() == [1, 2, 4]


def test_a_prompt_is_shared_by_those_that_begin_with_all_of_it_and_no_more():
    trajectories = [
        with_prompt([1, 2, 3], [4], branches=2),
        with_prompt([1, 2], [3, 4]),
        with_prompt([1, 2, 3], [4, 5]),
        with_prompt([3, 2, 1], [4]),
        with_prompt([1, 2], [9]),
    ]
    assert pack(trajectories, torch.device("cpu")).shared is None, "nobody asked for it"
    batch = pack(trajectories, torch.device("cpu"), shares_prompts=True)
    assert batch.shared is not None
    assert batch.cu_seqlens.tolist() == [0, 4, 8, 12, 17, 21, 24]
    assert batch.shared.cu_queries.tolist() == [0, 4, 8, 12, 14, 18, 19]
    same = batch.token_ids[batch.shared.computed][batch.shared.places]
    assert same.tolist() == batch.token_ids.tolist()
    positions = batch.position_ids[batch.shared.computed][batch.shared.places]
    assert positions.tolist() == batch.position_ids.tolist()
    assert pack([], torch.device("cpu"), shares_prompts=True).shared is None


def test_every_token_knows_the_step_of_its_policy():
    runs = (VersionRun(2, PolicyVersion(1, 4)), VersionRun(3, PolicyVersion(1, 6)))
    found = header(num_tokens=5)
    first = unpack(replace(found, version_runs=runs), payload([0.0] * 5), vocab_size=VOCAB)
    batch = pack([first, unpack(found, payload([0.0] * 5), vocab_size=VOCAB)], torch.device("cpu"))
    assert batch.version_steps is not None
    assert (
        batch.version_steps.tolist() == [4, 4, 4, 6, 6] + [found.version_runs[0].version.step] * 5
    )


def test_tensors_have_the_types_that_model_and_loss_read():
    batch = pack([sequence(7, 8)], torch.device("cpu"))
    assert (batch.token_ids.dtype, batch.position_ids.dtype) == (torch.int64, torch.int64)
    assert (batch.cu_seqlens.dtype, batch.loss_mask.dtype) == (torch.int32, torch.bool)
    floats = (batch.behavior_logprobs, batch.temperature)
    assert {tensor.dtype for tensor in floats} == {torch.float32}


def test_unpacked_arrays_share_the_memory_of_the_payload():
    arrays = payload([0.0, 0.0, -1.0, -2.0])
    unpacked = unpack(header(), arrays, vocab_size=VOCAB)
    assert unpacked.token_ids.tolist() == [10, 11, 12, 13]
    assert np.shares_memory(unpacked.token_ids, np.frombuffer(arrays.token_ids.data, "<i4"))
    assert unpacked.temperature == 0.5


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 3.0])
def test_logprobs_outside_the_mask_become_zero(garbage: float):
    unpacked = unpack(header(), payload([garbage, garbage, -1.0, -2.0]), vocab_size=VOCAB)
    assert unpacked.behavior_logprobs.tolist() == [0.0, 0.0, -1.0, -2.0]


def test_what_no_policy_can_have_sampled_is_refused():
    for what, message in [
        ({"ids": (10, 11, 12, VOCAB)}, r"token ids from 10 to 32, the vocabulary has 32"),
        ({"ids": (10, 11, -1, 12)}, r"token ids from -1 to 12"),
        ({"ids": (10, 2**31 - 1, 11, 12)}, r"token ids from 10 to 2147483647"),
        ({"mask": (True, True, False, False)}, "the loss mask is not on the 2 response tokens"),
        ({"mask": (False, True, False, True)}, "the loss mask is not on the 2 response tokens"),
        ({"mask": (False, False, True, False)}, "the loss mask is not on the 2 response tokens"),
        ({"logprobs": (0.0, 0.0, 80.0, -1.0)}, "a logprob of 80, above 0"),
        ({"logprobs": (0.0, 0.0, 2e-3, -1.0)}, "a logprob of 0.002, above 0"),
        ({"logprobs": (0.0, 0.0, 1.1e-3, -1.0)}, "a logprob of 0.0011, above 0"),
        ({"logprobs": (0.0, 0.0, -3e38, -1.0)}, r"a logprob of -3e\+38, below -10000"),
        *(
            ({"logprobs": (0.0, 0.0, -1.0, float(value))}, "holds a logprob that is not finite")
            for value in ("nan", "inf", "-inf")
        ),
        # One such temperature made the loss of a whole batch NaN, and all its groups were dropped.
        *(
            ({"of_header": {"temperature": value}}, "was sampled at a temperature of")
            for value in (1e-30, 9e-4, 1.1e3, 1e30)
        ),
        ({"of_header": {"temperature": 0.0}}, "greedily"),
        (
            {"of_header": {"end_token_ids": (5, VOCAB)}},
            r"ends by tokens \(5, 32\), the vocabulary has 32",
        ),
        *(
            (
                {"of_header": {"min_response_tokens": least}},
                f"2 response tokens, of which the first {least} ",
            )
            for least in (-1, 3, 2**40)
        ),
        ({"of_header": {"num_tokens": 5}}, r": header has 5 tokens, payload has \(4,\)"),
    ]:
        given = replace(header(), **what.get("of_header", {}))
        arrays = {name: value for name, value in what.items() if name in ("ids", "mask")}
        logprobs = list(what.get("logprobs", (0.0, 0.0, -1.0, -2.0)))
        with pytest.raises(ProtocolError, match=f"trajectory 3/1.*{message}"):
            unpack(given, payload(logprobs, **arrays), vocab_size=VOCAB)


def test_what_is_longer_than_any_trajectory_of_the_run_is_refused():
    arrays = payload([0.0, 0.0, -1.0, -2.0])
    with pytest.raises(ProtocolError, match="has 4 tokens, one of this run 3 at most"):
        unpack(header(), arrays, vocab_size=VOCAB, longest=3)
    runs, turns = (VersionRun(1, PolicyVersion(1, 0)),), (Turn(1, 1), Turn(3, 1))
    acted = replace(header(), num_prompt_tokens=1, version_runs=runs, turns=turns)
    with pytest.raises(ProtocolError, match="has 2 turns, one of this run 0 at most"):
        unpack(acted, arrays, vocab_size=VOCAB, longest=4, max_turns=0)


def test_a_certain_token_may_have_a_logprob_of_zero_and_rounding():
    certain = payload([0.0, 0.0, 0.0, 9e-4])
    assert unpack(header(), certain, vocab_size=VOCAB).loss_mask.sum() == 2


@pytest.mark.parametrize("temperature", [1e-3, 1.5e-3, 1e3])
def test_a_temperature_that_logits_can_be_divided_by_is_taken(temperature: float):
    arrays = payload([0.0, 0.0, -1.0, -2.0])
    taken = unpack(header(temperature=temperature), arrays, vocab_size=VOCAB)
    assert taken.temperature == temperature


def test_end_tokens_of_sequences_that_bar_none_are_ignored():
    honest = replace(header(), min_response_tokens=1, end_token_ids=(3,))
    other = replace(header(), end_token_ids=(7,))
    arrays = payload([0.0, 0.0, -1.0, -2.0])
    sequences = [unpack(one, arrays, vocab_size=VOCAB) for one in (honest, other)]
    assert pack(sequences, torch.device("cpu")).end_token_ids == (3,)
    assert pack(sequences[1:], torch.device("cpu")).end_token_ids == ()


def test_end_tokens_are_barred_only_in_sequences_that_bar_them():
    barring = replace(header(num_tokens=5), min_response_tokens=2, end_token_ids=(3, 4))
    first = unpack(barring, payload([0.0, 0.0, -1.0, -1.0, -1.0]), vocab_size=VOCAB)
    free = unpack(header(), payload([0.0, 0.0, -1.0, -2.0]), vocab_size=VOCAB)
    assert first.end_barred is not None
    assert first.end_barred.tolist() == [False, False, True, True, False]
    assert free.end_barred is None
    batch = pack([free, first], torch.device("cpu"))
    assert batch.end_barred is not None
    assert batch.end_barred.tolist() == [False] * 4 + [False, False, True, True, False]
    assert batch.end_token_ids == (3, 4)
    assert pack([free, free], torch.device("cpu")).end_barred is None


def test_one_batch_has_one_set_of_end_tokens():
    one = replace(header(), min_response_tokens=1, end_token_ids=(3,))
    arrays = payload([0.0, 0.0, -1.0, -2.0])
    sequences = [
        unpack(replace(one, end_token_ids=ids), arrays, vocab_size=VOCAB) for ids in [(3,), (5,)]
    ]
    with pytest.raises(ProtocolError, match="disagree on the tokens that end a response"):
        pack(sequences, torch.device("cpu"))


def test_only_sequences_with_unusual_end_tokens_are_bad():
    free = header()
    usual = replace(free, min_response_tokens=1, end_token_ids=(2,))
    odd = replace(usual, end_token_ids=(3,))
    batch = [free, usual, odd, usual]
    assert bars_other_ends(batch) == [False, False, True, False]
    assert bars_other_ends([odd, free]) == [False, False]


def kept_of(counts: list[int], ids: list[int]) -> TrajectoryPayload:
    """A trajectory of tokens 10 and 11, then 12 and 13, which were sampled from these."""
    decisions = Decisions(
        kept_counts=PackedArray("uint8", (len(counts),), memoryview(bytes(counts))),
        kept_ids=PackedArray("uint16", (len(ids),), memoryview(np.array(ids, "<u2").tobytes())),
    )
    return replace(payload([0.0, 0.0, -0.5, -0.5]), decisions=decisions)


def test_kept_tokens_are_at_the_token_that_was_sampled_from_them():
    first = unpack(header(), kept_of([3, 1], [12, 5, 31, 13]), vocab_size=VOCAB)
    second = unpack(header(), payload([0.0, 0.0, -0.5, -0.5]), vocab_size=VOCAB)
    assert pack([second], torch.device("cpu")).kept is None
    batch = pack([second, first], torch.device("cpu"))
    assert batch.kept is not None
    assert batch.kept.is_truncated.tolist() == [False] * 6 + [True] * 2
    assert batch.kept.rows.tolist() == [6, 6, 6, 7]
    assert batch.kept.ids.tolist() == [12, 5, 31, 13]


def test_kept_tokens_that_nothing_was_sampled_from_are_refused():
    for counts, ids, why in [
        ([2, 1], [12, 5], r"counts 3 kept tokens, 1 of one token at least, and holds 2"),
        (
            [3, 1],
            [12, 5, 5, 13],
            "token id 5 is twice among those that response token 0 was sampled",
        ),
        ([2, 0], [12, 5], r"counts 2 kept tokens, 0 of one token at least"),
        ([2, 1], [12, VOCAB, 13], r"sampled from token ids from 12 to 32, the vocabulary has 32"),
        ([2, 1], [12, 5, 14], r"response token 1 is not among the 1 that it was sampled from"),
        ([2, 1], [12, 12, 13], r"token id 12 is twice among those that response token 0"),
    ]:
        with pytest.raises(ProtocolError, match=why):
            unpack(header(), kept_of(counts, ids), vocab_size=VOCAB)


SIZES = ExpertSizes(layers=2, experts=4, of_token=2)
CHOSEN = [[[0, 1], [3, 2]], [[1, 2], [2, 3]], [[3, 0], [0, 1]]]  # of the first three of four tokens


def experts_of(chosen: object) -> TrajectoryPayload:
    experts = np.array(chosen, np.uint8)
    packed = PackedArray("uint8", experts.shape, memoryview(experts.tobytes()))
    return replace(payload([0.0, 0.0, -0.5, -0.5]), decisions=Decisions(experts=packed))


def test_experts_are_those_of_every_token_but_the_last_of_a_sequence():
    one = unpack(header(), experts_of(CHOSEN), vocab_size=VOCAB, experts=SIZES)
    batch = pack([one, one], torch.device("cpu"))
    assert batch.experts is not None
    assert batch.experts.dtype == torch.int16
    free = [[[-1, -1], [-1, -1]]]
    assert batch.experts.tolist() == (CHOSEN + free) * 2


def test_experts_that_nothing_chooses_again_are_left_alone():
    one = unpack(header(), experts_of(CHOSEN), vocab_size=VOCAB)
    assert one.experts is None
    assert pack([one], torch.device("cpu")).experts is None


def test_experts_of_another_model_are_refused():
    for chosen, why in [
        ([layers[:1] for layers in CHOSEN], "2 experts of a token in 1 layers, the model 2 in 2"),
        ([[[0], [1]]] * 3, "1 experts of a token in 2 layers, the model 2 in 2"),
        ([[[0, 1], [2, 4]]] * 3, "experts from 0 to 4, the model 4"),
        ([[[0, 1], [2, 2]]] * 3, "a token with the same expert twice"),
    ]:
        with pytest.raises(ProtocolError, match=why):
            unpack(header(), experts_of(chosen), vocab_size=VOCAB, experts=SIZES)


def test_experts_that_are_to_be_chosen_again_must_be_there():
    without = payload([0.0, 0.0, -0.5, -0.5])
    with pytest.raises(ProtocolError, match=r'the experts that run\.routing_replay = "R3" chooses'):
        unpack(header(), without, vocab_size=VOCAB, experts=SIZES)


def of_turns(*turns: tuple[int, int], branches: tuple[int, ...] = ()) -> TrajectoryHeader:
    chosen = tuple(Turn(*turn) for turn in turns)
    return replace(header(num_tokens=chosen[-1].end), turns=chosen, branches=branches)


def mask_of(found: TrajectoryHeader) -> list[bool]:
    places = {at for turn in found.turns for at in range(turn.first_token, turn.end)}
    return [at in places for at in range(found.num_tokens)]


def test_all_turns_of_a_trajectory_are_trained_and_no_context():
    found = of_turns((2, 2), (6, 1), (9, 3))
    logprobs = [-0.5] * 12
    unpacked = unpack(found, payload(logprobs, mask=mask_of(found)), vocab_size=VOCAB)
    assert unpacked.loss_mask.tolist() == mask_of(found)
    assert unpacked.behavior_logprobs.tolist() == [-0.5 * one for one in mask_of(found)]
    assert unpacked.lengths == [12]


@pytest.mark.parametrize("place", [1, 4, 6, 8])
def test_a_mask_on_other_tokens_than_those_of_turns_is_refused(place: int):
    found = of_turns((2, 2), (6, 1), (9, 3))
    mask = mask_of(found)
    mask[place] = not mask[place]
    with pytest.raises(ProtocolError, match="the loss mask is not on the 6 response tokens"):
        unpack(found, payload([0.0] * 12, mask=mask), vocab_size=VOCAB)


def test_each_turn_has_the_versions_that_chose_it():
    runs = (
        VersionRun(2, PolicyVersion(1, 4)),
        VersionRun(6, PolicyVersion(1, 5)),
        VersionRun(10, PolicyVersion(1, 6)),
    )
    found = replace(of_turns((2, 2), (6, 1), (9, 3)), version_runs=runs)
    unpacked = unpack(found, payload([0.0] * 12, mask=mask_of(found)), vocab_size=VOCAB)
    assert unpacked.version_steps is not None
    assert unpacked.version_steps[unpacked.loss_mask].tolist() == [4, 4, 5, 5, 6, 6]


def test_no_turn_could_end_before_its_fewest_tokens():
    found = replace(of_turns((2, 2), (6, 3)), min_response_tokens=2, end_token_ids=(1,))
    unpacked = unpack(found, payload([0.0] * 9, mask=mask_of(found)), vocab_size=VOCAB)
    assert unpacked.end_barred is not None
    assert np.flatnonzero(unpacked.end_barred).tolist() == [2, 3, 6, 7]


def test_a_turn_of_fewer_tokens_than_it_had_to_have_is_refused():
    found = replace(of_turns((2, 2), (6, 1)), min_response_tokens=2, end_token_ids=(1,))
    with pytest.raises(ProtocolError, match="has 1 response tokens, of which the first 2"):
        unpack(found, payload([0.0] * 7, mask=mask_of(found)), vocab_size=VOCAB)


def test_branches_attend_to_themselves_and_are_one_trajectory():
    found = of_turns((2, 2), (6, 1), (9, 3), branches=(7,))
    two = unpack(found, payload([-1.0] * 12, mask=mask_of(found)), vocab_size=VOCAB)
    batch = pack([sequence(7, 8, 9), two, sequence(5, 6)], torch.device("cpu"))
    assert batch.cu_seqlens.tolist() == [0, 3, 10, 15, 17]
    assert batch.cu_trajectories.tolist() == [0, 3, 15, 17]
    assert batch.position_ids.tolist() == [*range(3), *range(7), *range(5), *range(2)]
    assert max(batch.lengths) == 7


def test_of_the_last_token_of_each_branch_no_experts_are_known():
    found = of_turns((2, 2), (6, 1), branches=(4,))
    numbers = np.arange(5, dtype="u1").reshape(5, 1, 1)
    chosen = PackedArray("uint8", (5, 1, 1), memoryview(numbers.tobytes()))
    given = replace(payload([0.0] * 7, mask=mask_of(found)), decisions=Decisions(experts=chosen))
    sizes = ExpertSizes(layers=1, experts=8, of_token=1)
    unpacked = unpack(found, given, vocab_size=VOCAB, experts=sizes)
    assert unpacked.experts is not None
    assert unpacked.experts.flatten().tolist() == [0, 1, 2, -1, 3, 4, -1]
    with pytest.raises(ProtocolError, match="experts of 5 tokens, the engine computed 6"):
        unpack(replace(found, branches=()), given, vocab_size=VOCAB, experts=sizes)
