"""Trained trajectories as JSON lines in the run folder: sampled, and capped in size."""

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from torch import Tensor

from slipstream.learner.batches.packing import PackedBatch
from slipstream.learner.config import LearnerSettings
from slipstream.wire.files.run_folder import TRAINED
from slipstream.wire.files.trained_rows import cut_rows_from, keep_newest_rows
from slipstream.wire.messages.broker import DeliveredTrajectory
from slipstream.wire.messages.images import ImageSpan

_log = logging.getLogger(__name__)
_DIGITS = 6


@dataclass(frozen=True, slots=True)
class TrainedPart:
    """One microbatch that this rank trained."""

    indices: Sequence[int]  # indices of its trajectories in the step, in batch order
    batch: PackedBatch
    proximal: Tensor  # [T] logprobs of the policy at the start of the step


def open_rollout_log(settings: LearnerSettings) -> "RolloutLog | None":
    """Open the log of a run; None if ``learner.rollouts_per_step`` is 0."""
    learner = settings.learner
    if not learner.rollouts_per_step:
        return None
    return RolloutLog(
        settings.run.folder / "rollouts",
        per_step=learner.rollouts_per_step,
        seed=settings.run.seed,
        max_bytes=learner.max_rollout_bytes,
        tokenizer=Tokenizer.from_file(str(settings.model / "tokenizer.json")),
    )


def chosen(indices: Sequence[int], count: int, *, seed: int, step: int) -> list[int]:
    """Return ``count`` of the trajectories of a step, in order.

    A hash of seed, step and index decides: the chance does not depend on length, and the same
    trajectories are chosen again.
    """

    def draw(index: int) -> bytes:
        return hashlib.blake2b(f"{seed}/{step}/{index}".encode(), digest_size=16).digest()

    return sorted(sorted(indices, key=draw)[:count])


class RolloutLog:
    """Appends to rollouts/trained.jsonl; removes the oldest half at its size limit."""

    def __init__(
        self, folder: Path, *, per_step: int, seed: int, max_bytes: int, tokenizer: Tokenizer
    ) -> None:
        """Open the log in RUN/rollouts; the seed decides which trajectories are recorded."""
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / TRAINED.name
        self._tokenizer = tokenizer
        self._per_step = per_step
        self._seed = seed
        self._max_bytes = max_bytes

    def forget_from(self, step: int) -> None:
        """Remove the rows of this step and later ones: they are trained again.

        A half-written row of a killed learner goes with them.
        """
        cut_rows_from(self._path, step)

    def record(
        self, step: int, trajectories: Sequence[DeliveredTrajectory], parts: Sequence[TrainedPart]
    ) -> None:
        """Record a sample of this rank's answers; ``trajectories`` are the whole step's."""
        places = {
            index: (part, place) for part in parts for place, index in enumerate(part.indices)
        }
        lines = []
        for index in chosen(list(places), self._per_step, seed=self._seed, step=step):
            part, place = places[index]
            start, end = part.batch.cu_trajectories[place : place + 2].tolist()
            token_ids = part.batch.token_ids[start:end].tolist()
            difference = (part.proximal - part.batch.behavior_logprobs)[start:end]
            spans = part.batch.spans[place]
            row = self._row(step, trajectories[index], token_ids, difference, spans)
            lines.append(json.dumps(row))
        data = "".join(line + "\n" for line in lines).encode()
        size = self._path.stat().st_size if self._path.exists() else 0
        if size + len(data) > self._max_bytes:
            room = max(0, self._max_bytes - len(data))
            keep_newest_rows(self._path, min(self._max_bytes // 2, room))
        if len(data) > self._max_bytes:
            _log.warning(
                "step %d is not recorded: %d bytes, and learner.max_rollout_bytes is %d",
                step,
                len(data),
                self._max_bytes,
            )
            return
        with self._path.open("ab") as file:
            file.write(data)

    def _row(
        self,
        step: int,
        trajectory: DeliveredTrajectory,
        token_ids: list[int],
        difference: Tensor,  # proximal - behavior, [T] of this sequence
        spans: Sequence[ImageSpan],
    ) -> dict[str, object]:
        header = trajectory.header
        first = header.num_prompt_tokens
        starts = [run.first_token for run in header.version_runs]
        distance = difference.abs()
        return {
            "step": step,
            "group_id": header.group_id,
            "sibling": header.sibling,
            "prompt": self._text(token_ids, spans, 0, first),
            "answer": self._text(token_ids, spans, first, len(token_ids)),
            "images": [msgspec.structs.asdict(span) for span in spans],
            "reward": trajectory.reward,
            "parts": trajectory.parts,
            "turn_rewards": trajectory.turn_rewards,
            "finish_reason": header.finish_reason,
            "temperature": header.temperature,
            "num_prompt_tokens": first,
            "token_ids": token_ids,
            "token_texts": self._texts(token_ids[first:]),
            "version_runs": [
                {
                    "first_token": run.first_token,
                    "version": run.version.label,
                    "step": run.version.step,
                }
                for run in header.version_runs
            ],
            "turns": [
                {"first_token": turn.first_token, "num_tokens": turn.num_tokens}
                for turn in header.chosen
            ],
            "branches": list(header.branches),
            # |proximal - behavior|, mean over the run's chosen tokens
            "logprob_abs_diff_by_run": [
                float(distance[start:end].sum()) / max(1, count)
                for (start, end), (_, count) in zip(
                    pairwise([*starts, len(difference)]), header.tokens_by_version(), strict=True
                )
            ],
            # proximal - behavior of each response token
            "logprob_diffs": [round(value, _DIGITS) + 0.0 for value in difference[first:].tolist()],
        }

    def _text(
        self, token_ids: Sequence[int], spans: Sequence[ImageSpan], start: int, end: int
    ) -> str:
        """Return the text of some tokens, with one token for each image."""
        shown, at = list[int](), start
        for span in spans:
            if start <= span.first_token < end:
                shown += token_ids[at : span.first_token + 1]
                at = span.end
        shown += token_ids[at:end]
        text: str = self._tokenizer.decode(shown, skip_special_tokens=False)
        return text

    def _texts(self, token_ids: list[int]) -> list[str]:
        """Return each token's addition to the text; part of a character adds nothing yet.

        Bytes that are not text (a policy may sample any) are decoded token by token.
        """
        stream = DecodeStream(skip_special_tokens=False)
        texts = []
        for token in token_ids:
            try:
                texts.append(stream.step(self._tokenizer, token) or "")
            except Exception:  # noqa: BLE001 the library raises no narrower one
                stream = DecodeStream(skip_special_tokens=False)
                texts.append(self._tokenizer.decode([token], skip_special_tokens=False))
        return texts
