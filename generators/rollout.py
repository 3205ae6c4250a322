"""Rollouts: a prompt becomes the trajectories of one group."""

import array
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slipstream.generators.engine import Completion, InferenceEngine, PromptImage, SamplingParams
from slipstream.generators.text.codec import TextCodec, sibling_seed
from slipstream.generators.text.images import Encoded
from slipstream.generators.versions.version_runs import version_runs
from slipstream.wire.messages.arrays import DType, PackedArray, narrowest
from slipstream.wire.messages.broker import LeasedGroup, SubmitTrajectory
from slipstream.wire.messages.codec import decode_payload, decode_texts, encode
from slipstream.wire.messages.trajectory import (
    Decisions,
    ItemKind,
    Prompt,
    TrajectoryHeader,
    TrajectoryPayload,
    Transcript,
    transcript_of,
)
from slipstream.wire.messages.versions import PolicyVersion

_LITTLE_ENDIAN = sys.byteorder == "little"
_TYPECODES: dict[DType, str] = {"uint8": "B", "uint16": "H", "int32": "i"}


Submission = tuple[SubmitTrajectory, list[bytes]]
"""One finished sibling, ready to be sent: the message and its frames (payload, response)."""


@dataclass(frozen=True, slots=True)
class Sampler:
    """Turns leased groups into trajectories."""

    engine: InferenceEngine
    codec: TextCodec
    params: dict[ItemKind, SamplingParams]
    run_seed: int | None  # None leaves seeds to the engine


async def run_rollouts(
    sampler: Sampler,
    group: LeasedGroup,
    siblings: Sequence[int],
    prompt: Encoded,
    files: Sequence[Path] = (),
) -> list[Submission]:
    """Sample some siblings of a group; ``files`` are those of the prompt's images, in order."""
    prompt_ids = prompt.token_ids
    params = replace(sampler.params[group.item], images=shown(prompt, files))
    seeds: list[int] = []
    if sampler.run_seed is not None:
        seeds = [sibling_seed(sampler.run_seed, group.item, group.position, s) for s in siblings]
    completions = await sampler.engine.sample(prompt_ids, params, count=len(siblings), seeds=seeds)
    submissions = []
    for sibling, completion in zip(siblings, completions, strict=True):
        header = TrajectoryHeader(
            group_id=group.group_id,
            sibling=sibling,
            lease_id=group.lease_id,
            num_prompt_tokens=len(prompt_ids),
            num_tokens=len(prompt_ids) + len(completion.token_ids),
            version_runs=version_runs(completion.version_starts, num_prompt_tokens=len(prompt_ids)),
            temperature=params.temperature,
            finish_reason=completion.finish_reason,
            min_response_tokens=params.min_new_tokens,
            end_token_ids=sampler.codec.end_token_ids if params.min_new_tokens else (),
        )
        response = sampler.codec.decode(completion.token_ids)
        frames = [encode(pack_payload(prompt, completion)), response.encode()]
        submissions.append((SubmitTrajectory(header=header), frames))
    return submissions


def shown(prompt: Encoded, files: Sequence[Path]) -> tuple[PromptImage, ...]:
    """Return the images of a prompt for an engine."""
    return tuple(PromptImage(span, file) for span, file in zip(prompt.images, files, strict=True))


def submitted_transcript(submission: Submission, prompt: Prompt) -> Transcript:
    """Return a sibling's transcript for a reward function, as the broker would make it."""
    message, frames = submission
    replies = decode_texts(frames[2]) if message.header.turns else ()
    return transcript_of(message.header, prompt, frames[1].decode(), replies)


def newest_version(submissions: Sequence[Submission]) -> PolicyVersion:
    """Return the newest version that chose a token of some siblings."""
    return max(run.version for message, _ in submissions for run in message.header.version_runs)


def decision_bytes(submission: Submission) -> int:
    """Return the size of a sibling's decisions."""
    decisions = decode_payload(submission[1][0]).decisions
    return decisions.num_bytes if decisions is not None else 0


def pack_payload(prompt: Encoded, completion: Completion) -> TrajectoryPayload:
    """Return the arrays of a trajectory; prompt tokens are outside the loss mask."""
    before, response = len(prompt.token_ids), len(completion.token_ids)
    return packed(
        Encoded(prompt.token_ids + completion.token_ids, prompt.images),
        bytes(before) + b"\1" * response,
        [0.0] * before + completion.logprobs,
        kept=completion.kept,
        experts=completion.experts,
    )


def packed(
    tokens: Encoded,
    mask: bytes,
    logprobs: list[float],
    *,
    kept: list[list[int]] | None,
    experts: NDArray[np.int32] | None,
) -> TrajectoryPayload:
    """Return the arrays of a trajectory of T tokens; ``mask`` is 1 at the chosen ones."""
    shape = (len(tokens.token_ids),)
    return TrajectoryPayload(
        token_ids=PackedArray("int32", shape, _packed("i", tokens.token_ids)),
        loss_mask=PackedArray("bool", shape, memoryview(mask)),
        behavior_logprobs=PackedArray("float32", shape, _packed("f", logprobs)),
        decisions=_decisions(kept, experts),
        images=tokens.images,
    )


def _decisions(kept: list[list[int]] | None, experts: NDArray[np.int32] | None) -> Decisions | None:
    if kept is None and experts is None:
        return None
    return Decisions(
        kept_counts=None if kept is None else _numbers([len(ids) for ids in kept]),
        kept_ids=None if kept is None else _numbers([token_id for ids in kept for token_id in ids]),
        experts=None if experts is None else _packed_experts(experts),
    )


def _packed_experts(experts: NDArray[np.int32]) -> PackedArray:
    dtype = narrowest(int(experts.max(initial=0)))
    narrow = np.ascontiguousarray(experts, np.dtype(dtype).newbyteorder("<"))
    return PackedArray(dtype, experts.shape, memoryview(narrow.tobytes()))


def _numbers(values: list[int]) -> PackedArray:
    dtype = narrowest(max(values, default=0))
    return PackedArray(dtype, (len(values),), _packed(_TYPECODES[dtype], values))


def _packed(typecode: str, values: list[int] | list[float]) -> memoryview:
    packed = array.array(typecode, values)
    if not _LITTLE_ENDIAN:
        packed.byteswap()
    return memoryview(packed.tobytes())
