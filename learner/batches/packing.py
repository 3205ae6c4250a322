"""Trajectories laid end to end: the packed tensors of one microbatch.

Shapes: T tokens of B trajectories laid end to end, C of them chosen by the policy; their branches
are S >= B sequences.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.algos.logprobs.sampling import Kept
from slipstream.learner.model.shared_prompts import SharedPrompts
from slipstream.learner.model.vision.images import PackedImages
from slipstream.wire.errors import ProtocolError
from slipstream.wire.messages.arrays import DType, PackedArray
from slipstream.wire.messages.images import ImageSpan
from slipstream.wire.messages.trajectory import (
    MAX_TOKENS,
    Decisions,
    TrajectoryHeader,
    TrajectoryPayload,
)
from slipstream.wire.models.image_law import positions_of

_LOGPROB_ROUNDING = 1e-3  # nats: rounding error of the logprob of a certain token
_LEAST_LOGPROB = -1e4  # nats: squares stay finite in float32, and no token is drawn at e^-100
_TEMPERATURES = (1e-3, 1e3)  # range in which divided logits stay finite
_NUMPY: dict[DType, np.dtype[Any]] = {
    "int32": np.dtype("<i4"),
    "float32": np.dtype("<f4"),
    "bool": np.dtype("?"),
    "uint8": np.dtype("u1"),
    "uint16": np.dtype("<u2"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainTrajectory:
    """One trajectory before packing. Shapes: [number of its tokens]."""

    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    behavior_logprobs: NDArray[np.float32]  # 0.0 outside the mask
    temperature: float
    version_steps: NDArray[np.int32] | None = None  # step of the policy that chose each token
    end_barred: NDArray[np.bool_] | None = None  # True where no end token could be chosen
    end_token_ids: tuple[int, ...] = ()
    kept: "KeptTokens | None" = None
    experts: NDArray[np.int16] | None = None  # [length, layers with experts, experts of a token]
    branches: tuple[int, ...] = ()  # first tokens of the second and further branches
    images: tuple["SeenImage", ...] = ()  # in order

    @property
    def lengths(self) -> list[int]:
        """Numbers of tokens of its branches."""
        return [end - start for start, end in pairwise((0, *self.branches, len(self.token_ids)))]


class SeenImage(NamedTuple):
    """An image of a trajectory."""

    span: ImageSpan
    merge: int  # patches of a token each way
    pixels: NDArray[np.float32] | None  # [rows * columns, C]; None on a rank without a vision tower

    @property
    def key(self) -> tuple[str, int, int]:
        """What its tokens depend on, and nothing else."""
        return self.span.digest, self.span.rows, self.span.columns


class KeptTokens(NamedTuple):
    """Candidates that each token was sampled from, where the sampler left some out."""

    counts: NDArray[np.int64]  # [tokens of the trajectory], 0 where no candidate was left out
    ids: NDArray[np.int64]  # [sum of counts], token by token


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """Inputs of the model and of the loss per token. Index t is the token at t."""

    token_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64, from 0 in each sequence
    cu_seqlens: Tensor  # [S + 1] int32, bounds of sequences in attention
    lengths: tuple[int, ...]  # S tokens of each sequence
    cu_trajectories: Tensor  # [B + 1] int32
    loss_mask: Tensor  # [T] bool
    choosing: Tensor  # [C] int64, tokens before those of the mask: their states chose these
    choosing_on_host: NDArray[np.int64]  # the same, for numbers that depend on it
    behavior_logprobs: Tensor  # [T] float32, 0.0 outside the mask
    temperature: Tensor  # [T] float32
    version_steps: Tensor | None = None  # [T] int32, learner steps of the token's policy
    end_barred: Tensor | None = None  # [T] bool, True where no end token could be chosen
    end_token_ids: tuple[int, ...] = ()
    kept: Kept | None = None  # candidates of each token; None: nothing was left out
    kept_on_host: NDArray[np.int64] | None = None  # [T + 1], first candidate of each token, and K
    experts: Tensor | None = None  # [T, L, k] int16, chosen by the engine; -1 where it chose none
    shared: SharedPrompts | None = None  # prompts that are computed once
    images: PackedImages | None = None  # None: all tokens are text
    spans: tuple[tuple[ImageSpan, ...], ...] = ()  # images of each trajectory
    chosen_before: dict[int, Tensor] = field(default_factory=dict)
    """Choices of this rank's routers before the step's first update, by layer with experts."""

    @property
    def num_computed(self) -> int:
        """Number of tokens that the model computes."""
        return len(self.token_ids if self.shared is None else self.shared.computed)

    def choosing_in(self, runs: Sequence[tuple[int, int]]) -> Tensor:
        """Return the tokens of ``choosing`` by their places in runs of tokens laid end to end.

        A run is its first and last token (exclusive). The device is not waited for.
        """
        parts, at = [self.choosing[:0]], 0
        for first, end in runs:
            start, stop = np.searchsorted(self.choosing_on_host, (first, end)).tolist()
            parts.append(self.choosing[start:stop] + (at - first))
            at += end - first
        return torch.cat(parts)

    def kept_after(self, runs: Sequence[tuple[int, int]]) -> list[slice]:
        """Return where the candidates are for the tokens after those of each run."""
        if self.kept_on_host is None:
            return []
        firsts, most = self.kept_on_host, len(self.token_ids)
        return [slice(*(int(firsts[min(i + 1, most)]) for i in run)) for run in runs]


class ExpertSizes(NamedTuple):
    """Numbers of experts in a model."""

    layers: int  # layers with experts
    experts: int  # experts of such a layer
    of_token: int  # experts chosen for a token


def unpack(
    header: TrajectoryHeader,
    payload: TrajectoryPayload,
    *,
    vocab_size: int,
    longest: int = MAX_TOKENS,
    max_turns: int = MAX_TOKENS,
    experts: ExpertSizes | None = None,
) -> TrainTrajectory:
    """Return a trajectory's arrays, those of the payload without copying them.

    Args:
        header: the trajectory's header.
        payload: the trajectory's arrays.
        vocab_size: size of the model's vocabulary.
        longest: most tokens of a trajectory in this run.
        max_turns: most turns with an environment; 0 without one.
        experts: sizes of a model that repeats the engine's experts; None ignores them.

    Raises:
        ProtocolError: the model cannot have sampled it: header and payload do not belong together,
            it is longer than any of this run or has more turns, a token is outside the vocabulary
            or not among its candidates, experts are not the model's, the loss mask is not on the
            chosen tokens, or a logprob is not finite or above 0 (by more than rounding, 1e-3 nats).
    """
    name = f"trajectory {header.group_id}/{header.sibling}"
    _refuse_header(header, name, longest=longest, max_turns=max_turns)
    shape = payload.token_ids.shape
    if shape != (header.num_tokens,):
        raise ProtocolError(f"{name}: header has {header.num_tokens} tokens, payload has {shape}")
    token_ids, mask = _array(payload.token_ids), _array(payload.loss_mask)
    logprobs = _array(payload.behavior_logprobs)
    chosen, barred = _chosen(header)
    if not ((token_ids >= 0) & (token_ids < vocab_size)).all():
        raise ProtocolError(
            f"{name} holds token ids from {token_ids.min()} to {token_ids.max()}, the vocabulary "
            f"has {vocab_size}"
        )
    if any(not 0 <= token_id < vocab_size for token_id in header.end_token_ids):
        raise ProtocolError(
            f"{name} ends by tokens {header.end_token_ids}, the vocabulary has {vocab_size}"
        )
    if (mask != chosen).any():
        raise ProtocolError(
            f"{name}: the loss mask is not on the {header.num_response_tokens} response tokens"
        )
    _refuse_logprobs(logprobs[mask], name)
    return TrainTrajectory(
        end_barred=barred if header.min_response_tokens else None,
        end_token_ids=header.end_token_ids,
        token_ids=token_ids,
        version_steps=_version_steps(header),
        loss_mask=mask,
        behavior_logprobs=np.where(mask, logprobs, np.float32(0.0)),
        temperature=header.temperature,
        kept=_kept(payload.decisions, token_ids, mask, vocab_size, name),
        experts=None if experts is None else _experts(payload.decisions, experts, header, name),
        branches=header.branches,
    )


def _refuse_header(header: TrajectoryHeader, name: str, *, longest: int, max_turns: int) -> None:
    if header.num_tokens > longest:
        raise ProtocolError(
            f"{name} has {header.num_tokens} tokens, one of this run {longest} at most "
            "(environment.max_tokens, or sampling.max_prompt_tokens and max_response_tokens)"
        )
    if len(header.turns) > max_turns:
        raise ProtocolError(
            f"{name} has {len(header.turns)} turns, one of this run {max_turns} at most "
            "(environment.max_turns; without an environment.function there are none)"
        )
    fewest = min(turn.num_tokens for turn in header.chosen)
    if not 0 <= header.min_response_tokens <= fewest:
        raise ProtocolError(
            f"{name} has {fewest} response tokens, of which the first "
            f"{header.min_response_tokens} could not end it (min_response_tokens)"
        )
    if header.temperature == 0:
        raise ProtocolError(f"{name} was sampled greedily: it has no probabilities to train by")
    if not _TEMPERATURES[0] <= header.temperature <= _TEMPERATURES[1]:
        raise ProtocolError(
            f"{name} was sampled at a temperature of {header.temperature:g}; logits are divided by "
            f"{_TEMPERATURES[0]:g} to {_TEMPERATURES[1]:g}"
        )


def _refuse_logprobs(logprobs: NDArray[np.float32], name: str) -> None:
    if not np.isfinite(logprobs).all():
        raise ProtocolError(f"{name} holds a logprob that is not finite")
    if logprobs.max() > _LOGPROB_ROUNDING:
        raise ProtocolError(f"{name} holds a logprob of {logprobs.max():.3g}, above 0")
    if logprobs.min() < _LEAST_LOGPROB:
        raise ProtocolError(
            f"{name} holds a logprob of {logprobs.min():.3g}, below {_LEAST_LOGPROB:g}: "
            "no sampler draws such a token"
        )


def _chosen(header: TrajectoryHeader) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return where the policy chose the token, and where it could not choose an end."""
    chosen, barred = np.zeros((2, header.num_tokens), np.bool_)
    for turn in header.chosen:
        chosen[turn.first_token : turn.end] = True
        barred[turn.first_token : turn.first_token + header.min_response_tokens] = True
    return chosen, barred


def _version_steps(header: TrajectoryHeader) -> NDArray[np.int32]:
    """Return the learner step of each token's policy.

    Context has the step of the token chosen before it, the prompt that of the first chosen token.
    """
    bounds = [0, *(run.first_token for run in header.version_runs[1:]), header.num_tokens]
    steps = np.array([run.version.step for run in header.version_runs], np.int32)
    return np.repeat(steps, np.diff(bounds))


def _experts(
    decisions: Decisions | None, sizes: ExpertSizes, header: TrajectoryHeader, name: str
) -> NDArray[np.int16]:
    if decisions is None or decisions.experts is None:
        raise ProtocolError(
            f'{name} comes without the experts that run.routing_replay = "R3" chooses again'
        )
    chosen, computed = _array(decisions.experts), header.num_tokens - len(header.bounds) + 1
    if len(chosen) != computed:
        raise ProtocolError(
            f"{name} has experts of {len(chosen)} tokens, the engine computed {computed}"
        )
    if chosen.shape[1:] != (sizes.layers, sizes.of_token):
        raise ProtocolError(
            f"{name} has {chosen.shape[2]} experts of a token in {chosen.shape[1]} layers, the "
            f"model {sizes.of_token} in {sizes.layers}"
        )
    if chosen.max() >= sizes.experts or chosen.min() < 0:
        raise ProtocolError(
            f"{name} has experts from {chosen.min()} to {chosen.max()}, the model {sizes.experts}"
        )
    in_order = np.sort(chosen, axis=-1)
    if (in_order[..., 1:] == in_order[..., :-1]).any():
        raise ProtocolError(f"{name} has a token with the same expert twice")
    # The engine computed nothing for the last token of a branch.
    lasts = np.array(header.bounds[1:]) - np.arange(1, len(header.bounds))
    return np.insert(chosen.astype(np.int16), lasts, np.int16(-1), axis=0)


def _kept(
    decisions: Decisions | None,
    token_ids: NDArray[np.int32],
    mask: NDArray[np.bool_],
    vocab_size: int,
    name: str,
) -> KeptTokens | None:
    if decisions is None or decisions.kept_counts is None or decisions.kept_ids is None:
        return None
    of_response = _array(decisions.kept_counts).astype(np.int64)
    ids = _array(decisions.kept_ids).astype(np.int64)
    if of_response.min() < 1 or of_response.sum() != len(ids):
        raise ProtocolError(
            f"{name} counts {of_response.sum()} kept tokens, {of_response.min()} of one token at "
            f"least, and holds {len(ids)}"
        )
    if not ((ids >= 0) & (ids < vocab_size)).all():
        raise ProtocolError(
            f"{name} was sampled from token ids from {ids.min()} to {ids.max()}, the vocabulary "
            f"has {vocab_size}"
        )
    rows = np.repeat(np.arange(len(of_response)), of_response)
    in_order = np.sort(rows * vocab_size + ids)
    if (twice := np.flatnonzero(in_order[1:] == in_order[:-1])).size:
        at, token_id = divmod(int(in_order[twice[0]]), vocab_size)
        raise ProtocolError(
            f"{name}: token id {token_id} is twice among those that response token {at} was "
            "sampled from"
        )
    is_chosen = ids == np.repeat(token_ids[mask], of_response)
    found = np.add.reduceat(is_chosen, of_response.cumsum() - of_response, dtype=np.int64)
    if (found != 1).any():
        at = np.flatnonzero(found != 1)[0]
        raise ProtocolError(
            f"{name}: response token {at} is not among the {of_response[at]} that it was sampled "
            "from"
        )
    counts = np.zeros(len(token_ids), np.int64)
    counts[mask] = of_response
    return KeptTokens(counts, ids)


def bars_other_ends(headers: Sequence[TrajectoryHeader]) -> list[bool]:
    """Return True for each trajectory that bars other end tokens than most that bar any.

    A batch has one set of end tokens. All generators of a run sample by the same settings, so
    the minority is wrong.
    """
    sets = Counter(header.end_token_ids for header in headers if header.min_response_tokens)
    usual = max(sorted(sets), key=sets.__getitem__, default=())
    return [
        bool(header.min_response_tokens) and header.end_token_ids != usual for header in headers
    ]


def pack(
    trajectories: Sequence[TrainTrajectory], device: torch.device, *, shares_prompts: bool = False
) -> PackedBatch:
    """Lay trajectories end to end without padding; no trajectory gives an empty microbatch.

    With ``shares_prompts`` equal prompts are computed once, where that is worth it.
    """
    if not trajectories:
        return empty_microbatch(device)
    counts = [len(trajectory.token_ids) for trajectory in trajectories]
    lengths = [length for trajectory in trajectories for length in trajectory.lengths]
    ends = {s.end_token_ids for s in trajectories if s.end_barred is not None}
    if len(ends) > 1:
        raise ProtocolError("trajectories of one batch disagree on the tokens that end a response")
    barred = [
        np.zeros(len(s.token_ids), np.bool_) if s.end_barred is None else s.end_barred
        for s in trajectories
        if ends
    ]

    def per_token(values: list[float]) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values, np.float32), counts)).to(device)

    def bounds(lengths: list[int]) -> Tensor:
        return torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)).to(device)

    def joined(arrays: list[NDArray[Any]]) -> Tensor:
        return torch.from_numpy(np.concatenate(arrays)).to(device)

    mask = np.concatenate([s.loss_mask for s in trajectories])
    choosing = np.flatnonzero(np.roll(mask, -1))
    kept, kept_on_host = _packed_kept(trajectories, device)
    return PackedBatch(
        token_ids=joined([s.token_ids for s in trajectories]).long(),
        position_ids=joined([np.arange(length) for length in lengths]),
        cu_seqlens=bounds(lengths),
        lengths=tuple(lengths),
        cu_trajectories=bounds(counts),
        loss_mask=torch.from_numpy(mask).to(device),
        choosing=torch.from_numpy(choosing).to(device),
        choosing_on_host=choosing,
        behavior_logprobs=joined([s.behavior_logprobs for s in trajectories]),
        temperature=per_token([s.temperature for s in trajectories]),
        version_steps=(
            joined([s.version_steps for s in trajectories if s.version_steps is not None])
            if all(s.version_steps is not None for s in trajectories)
            else None
        ),
        end_barred=joined(barred) if ends else None,
        end_token_ids=max(ends, default=()),
        kept=kept,
        kept_on_host=kept_on_host,
        experts=joined([s.experts for s in trajectories if s.experts is not None])
        if all(s.experts is not None for s in trajectories)
        else None,
        shared=SharedPrompts.of(lengths, _equal_prompts(trajectories), device)
        if shares_prompts
        else None,
        images=_packed_images(trajectories, device),
        spans=tuple(tuple(image.span for image in s.images) for s in trajectories),
    )


def _packed_images(
    trajectories: Sequence[TrainTrajectory], device: torch.device
) -> PackedImages | None:
    """Return the images of packed trajectories, each once; None if there are none."""
    seen = [image for trajectory in trajectories for image in trajectory.images]
    if not seen:
        return None
    merge = seen[0].merge
    different = {image.key: image for image in seen}
    counts = [image.span.num_tokens for image in different.values()]
    rows = dict(zip(different, np.cumsum([0, *counts])[:-1].tolist(), strict=True))
    sources, positions = list[NDArray[np.int64]](), list[NDArray[np.int64]]()
    for trajectory in trajectories:
        source = np.full(len(trajectory.token_ids), -1, np.int64)
        for image in trajectory.images:
            first = rows[image.key]
            source[image.span.first_token : image.span.end] = np.arange(
                first, first + image.span.num_tokens
            )
        sources.append(source)
        for start, end in pairwise((0, *trajectory.branches, len(source))):
            spans = [
                msgspec.structs.replace(span, first_token=span.first_token - start)
                for span, *_ in trajectory.images
                if start <= span.first_token < end
            ]
            positions.append(positions_of(end - start, spans, merge))
    return PackedImages(
        position_ids=torch.from_numpy(np.concatenate(positions, axis=1)).to(device),
        source=torch.from_numpy(np.concatenate(sources)),
        grids=tuple((image.span.rows, image.span.columns) for image in different.values()),
        merge=merge,
        pixels=tuple(
            torch.from_numpy(image.pixels)
            for image in different.values()
            if image.pixels is not None
        ),
    )


def _equal_prompts(trajectories: Sequence[TrainTrajectory]) -> list[tuple[int, int]]:
    """Return for each sequence how many tokens an earlier sequence begins with, too, and that one.

    Tokens before the first chosen one are compared, and their images, of first branches.
    """
    first: dict[tuple[object, ...], int] = {}  # prompt and its images -> sequence
    found: list[tuple[int, int]] = []
    for trajectory in trajectories:
        prompt = trajectory.token_ids[: int(trajectory.loss_mask.argmax())]
        shown = (image.key for image in trajectory.images if image.span.end <= len(prompt))
        sequence = first.setdefault((prompt.tobytes(), *shown), len(found))
        is_first = sequence == len(found)
        found.append((0 if is_first else len(prompt), sequence))
        found += [(0, 0)] * len(trajectory.branches)
    return found


def _packed_kept(
    trajectories: Sequence[TrainTrajectory], device: torch.device
) -> tuple[Kept, NDArray[np.int64]] | tuple[None, None]:
    """Return the candidates of packed tokens and each token's first; None if none was left out."""
    if all(s.kept is None for s in trajectories):
        return None, None
    counts = np.concatenate(
        [
            np.zeros(len(s.token_ids), np.int64) if s.kept is None else s.kept.counts
            for s in trajectories
        ]
    )
    ids = np.concatenate([s.kept.ids for s in trajectories if s.kept is not None])
    rows = np.repeat(np.arange(len(counts)), counts)
    kept = Kept(*(torch.from_numpy(values).to(device) for values in (counts > 0, rows, ids)))
    return kept, np.concatenate([[0], counts.cumsum()])


def empty_microbatch(device: torch.device) -> PackedBatch:
    """Return a microbatch without tokens, for ranks whose passes others wait for."""
    numbers = torch.zeros(0, dtype=torch.int64, device=device)
    floats = torch.zeros(0, device=device)
    return PackedBatch(
        token_ids=numbers,
        position_ids=numbers,
        cu_seqlens=torch.zeros(1, dtype=torch.int32, device=device),
        lengths=(),
        cu_trajectories=torch.zeros(1, dtype=torch.int32, device=device),
        loss_mask=numbers.bool(),
        choosing=numbers,
        choosing_on_host=np.zeros(0, np.int64),
        behavior_logprobs=floats,
        temperature=floats,
    )


def _array(packed: PackedArray) -> NDArray[Any]:
    return np.frombuffer(packed.data, dtype=_NUMPY[packed.dtype]).reshape(packed.shape)
