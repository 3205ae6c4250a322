"""What a generator sends is what the learner reads: header, payload and transcript agree."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.generators.engine import Completion, PromptImage, SamplingParams
from slipstream.generators.rollout import (
    Sampler,
    Submission,
    decision_bytes,
    pack_payload,
    run_rollouts,
    submitted_transcript,
)
from slipstream.generators.text.codec import TextCodec, sibling_seed
from slipstream.generators.text.images import Encoded
from slipstream.learner.batches.packing import pack, unpack
from slipstream.wire.messages.arrays import PackedArray
from slipstream.wire.messages.broker import LeasedGroup
from slipstream.wire.messages.codec import decode_payload
from slipstream.wire.messages.images import ImageSpan
from slipstream.wire.messages.trajectory import Decisions, Prompt, VersionRun
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.settings.sections import SamplingSection
from tests.support.blank_model import write_blank_model
from tests.support.canned_engine import FIRST, CannedEngine, completion

OLD, NEW = FIRST, PolicyVersion(1, 4)
GROUP = LeasedGroup(
    group_id=5,
    lease_id=11,
    item="train",
    position=40,
    prompt=Prompt(prompt="1+1=", ground_truth="2"),
    siblings=(0, 2),
)
PARAMS = SamplingParams(temperature=0.5, max_new_tokens=4)


@pytest.fixture
def codec(tmp_path: Path) -> TextCodec:
    write_blank_model(tmp_path, hidden=16, layers=1)
    return TextCodec(tmp_path, SamplingSection(stop_token_ids=(16,)))


def run(
    codec: TextCodec,
    engine: CannedEngine,
    params: SamplingParams = PARAMS,
    run_seed: int | None = 3,
) -> list[Submission]:
    sampler = Sampler(engine, codec, {"train": params}, run_seed)
    return asyncio.run(run_rollouts(sampler, GROUP, GROUP.siblings, codec.encode(GROUP.prompt)))


def rollouts(codec: TextCodec) -> tuple[list[Submission], CannedEngine]:
    engine = CannedEngine(completion(5, 2), completion(4, 5, 2, starts=[(0, OLD), (1, NEW)]))
    return run(codec, engine), engine


def test_each_completion_becomes_the_sibling_it_was_asked_for(codec: TextCodec):
    results, engine = rollouts(codec)
    seeds = [sibling_seed(3, "train", 40, sibling) for sibling in (0, 2)]
    assert engine.asked == [([4, 13, 4, 16], PARAMS, 2, seeds)]
    headers = [message.header for message, _ in results]
    assert [(h.group_id, h.sibling, h.lease_id) for h in headers] == [(5, 0, 11), (5, 2, 11)]
    assert [(h.num_prompt_tokens, h.num_tokens) for h in headers] == [(4, 6), (4, 7)]
    assert headers[1].version_runs == (VersionRun(4, OLD), VersionRun(5, NEW))
    assert [h.temperature for h in headers] == [0.5, 0.5]
    assert [header.num_response_tokens for header in headers] == [2, 3]


def test_an_engine_that_seeds_by_itself_is_given_no_seeds(codec: TextCodec):
    engine = CannedEngine(completion(5, 2), completion(4))
    run(codec, engine, run_seed=None)
    assert engine.asked[0][3] == []


def test_a_minimum_length_travels_with_all_tokens_that_it_bars(codec: TextCodec):
    engine = CannedEngine(completion(5, 2), completion(4))
    params = SamplingParams(temperature=1.0, max_new_tokens=4, min_new_tokens=1)
    headers = [message.header for message, _ in run(codec, engine, params)]
    assert [h.end_token_ids for h in headers] == [(2, 16)] * 2, "<eos> and sampling.stop_token_ids"
    assert [h.min_response_tokens for h in headers] == [1, 1]


def test_a_transcript_holds_the_answer_without_special_tokens(codec: TextCodec):
    results, _ = rollouts(codec)
    transcripts = [submitted_transcript(result, GROUP.prompt) for result in results]
    assert [frames[1] for _, frames in results] == [b"2", b"12"]
    assert [t.response for t in transcripts] == ["2", "12"]
    assert transcripts[1].prompt == GROUP.prompt
    assert transcripts[1].num_response_tokens == 3


def test_the_learner_reads_the_arrays_that_the_generator_packed(codec: TextCodec):
    results, _ = rollouts(codec)
    sequences = [
        unpack(message.header, decode_payload(frames[0]), vocab_size=32)
        for message, frames in results
    ]
    batch = pack(sequences, torch.device("cpu"))
    assert batch.token_ids.tolist() == [4, 13, 4, 16, 5, 2, 4, 13, 4, 16, 4, 5, 2]
    assert batch.loss_mask.tolist() == [False] * 4 + [True] * 2 + [False] * 4 + [True] * 3
    assert batch.behavior_logprobs.tolist() == [0.0] * 4 + [-0.25, -0.5] + [0.0] * 4 + [
        -0.25,
        -0.5,
        -0.75,
    ]
    assert batch.cu_seqlens.tolist() == [0, 6, 13]


def test_more_or_fewer_completions_than_siblings_are_an_error(codec: TextCodec):
    engine = CannedEngine(completion(5))
    with pytest.raises(ValueError, match="zip"):
        run(codec, engine)


def test_a_payload_whose_logprobs_do_not_match_its_tokens_is_not_sent():
    broken = Completion(
        token_ids=[5, 2], logprobs=[-0.5], version_starts=[(0, OLD)], finish_reason="stop"
    )
    with pytest.raises(ValueError, match="needs 16 bytes, got 12"):
        pack_payload(Encoded([4, 13]), broken)


def test_images_reach_the_engine_as_files_and_the_learner_as_places(codec: TextCodec):
    engine = CannedEngine(completion(5), completion(4, 2))
    spans = (ImageSpan("a" * 64, 1, 2, 4, 2), ImageSpan("b" * 64, 3, 1, 2, 2))
    prompt, files = Encoded([3, 7, 7, 7, 9], spans), [Path("a"), Path("b")]
    sampler = Sampler(engine, codec, {"train": PARAMS}, None)
    submissions = asyncio.run(run_rollouts(sampler, GROUP, GROUP.siblings, prompt, files))
    ((ids, params, _, _),) = engine.asked
    assert ids == prompt.token_ids
    assert params.images == tuple(map(PromptImage, spans, files))
    for _, frames in submissions:
        assert decode_payload(frames[0]).images == spans
    with pytest.raises(ValueError, match="shorter"):
        asyncio.run(run_rollouts(sampler, GROUP, GROUP.siblings, prompt, files[:1]))


def test_kept_tokens_travel_in_the_narrowest_types(codec: TextCodec):
    kept = replace(completion(5, 2), kept=[[5, 9, 4], [2]])
    wide = replace(completion(5, 2), kept=[[5, *range(300, 600)], [2]])
    results = run(codec, CannedEngine(kept, wide))
    first, second = (decode_payload(frames[0]).decisions for _, frames in results)
    assert first == Decisions(
        kept_counts=PackedArray("uint8", (2,), memoryview(b"\3\1")),
        kept_ids=PackedArray("uint8", (4,), memoryview(b"\5\11\4\2")),
    )
    assert [decision_bytes(result) for result in results] == [6, 4 + 2 * 302]
    assert second is not None
    assert second.kept_counts is not None
    assert second.kept_ids is not None
    assert (second.kept_counts.dtype, second.kept_ids.dtype) == ("uint16", "uint16")
    assert second.kept_ids.data.tobytes()[:4] == b"\5\0\x2c\1"


def test_experts_travel_in_the_narrowest_type(codec: TextCodec):
    for largest, dtype, size in [(255, "uint8", 1), (256, "uint16", 2)]:
        experts = np.arange(5 * 3 * 2, dtype=np.int32).reshape(5, 3, 2)
        experts[4, 2, 1] = largest
        chosen = replace(completion(5, 2), experts=experts)
        submission, _ = run(codec, CannedEngine(chosen, chosen))
        decisions = decode_payload(submission[1][0]).decisions
        assert decisions is not None
        assert decisions.experts is not None
        assert (decisions.experts.dtype, decisions.experts.shape) == (dtype, (5, 3, 2))
        assert decisions.experts.data.tobytes() == experts.astype(f"<u{size}").tobytes()
        assert decision_bytes(submission) == 30 * size
        assert decisions.kept_ids is None


def test_a_payload_without_decisions_is_the_one_of_before_there_were_any(codec: TextCodec):
    first, _ = run(codec, CannedEngine(completion(5, 2), completion(4)))
    assert b"decisions" not in first[1][0]
    assert decision_bytes(first) == 0
