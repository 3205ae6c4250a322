"""Trained trajectories as JSON lines in the run folder: sampled, and capped in size."""

import json
import logging
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from learner.collate import PackedBatch
from wire.control import DeliveredTrajectory
from wire.trajectory import VersionRun

_log = logging.getLogger(__name__)
_DIGITS = 6


class RolloutLog:
    """Appends to rollouts/trained.jsonl until its size limit."""

    def __init__(self, folder: Path, *, max_bytes: int, tokenizer: Tokenizer) -> None:
        """Open the log.

        Args:
            folder: RUN/rollouts.
            max_bytes: size of the file at which recording stops.
            tokenizer: turns token ids into the text that is recorded.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "trained.jsonl"
        self._tokenizer = tokenizer
        self._max_bytes = max_bytes
        self._room = max_bytes - (self._path.stat().st_size if self._path.exists() else 0)

    def record(
        self,
        step: int,
        trajectories: list[DeliveredTrajectory],
        batch: PackedBatch,
        proximal: Tensor,
    ) -> None:
        """Record the first ``len(trajectories)`` sequences of a packed batch.

        Args:
            step: the learner step that trained them.
            trajectories: their headers and rewards, in the order of the batch.
            batch: the microbatch.
            proximal: [T] logprobs of the policy at the start of the step.
        """
        if self._room <= 0:
            return
        difference = proximal - batch.behavior_logprobs
        lines = []
        for index, trajectory in enumerate(trajectories):
            start, end = batch.cu_seqlens[index : index + 2].tolist()
            row = self._row(
                step, trajectory, batch.token_ids[start:end].tolist(), difference[start:end]
            )
            lines.append(json.dumps(row) + "\n")
        text = "".join(lines)
        if len(text) > self._room:
            self._room = 0
            _log.info("%s is full (learner.max_rollout_bytes = %d)", self._path, self._max_bytes)
            return
        self._room -= len(text)
        with self._path.open("a") as file:
            file.write(text)

    def _row(
        self,
        step: int,
        trajectory: DeliveredTrajectory,
        token_ids: list[int],
        difference: Tensor,  # proximal - behavior, [T] of this sequence
    ) -> dict[str, object]:
        header = trajectory.header
        first = header.num_prompt_tokens
        return {
            "step": step,
            "group_id": header.group_id,
            "sibling": header.sibling,
            "prompt": self._tokenizer.decode(token_ids[:first], skip_special_tokens=False),
            "answer": self._tokenizer.decode(token_ids[first:], skip_special_tokens=False),
            "reward": trajectory.reward,
            "parts": trajectory.parts,
            "finish_reason": header.finish_reason,
            "temperature": header.temperature,
            "num_prompt_tokens": first,
            "token_ids": token_ids,
            "version_runs": [_run(run) for run in header.version_runs],
            # |proximal - behavior|, mean over the run's tokens
            "logprob_abs_diff_by_run": _means(header.version_runs, difference.abs()),
            # proximal - behavior of each response token
            "logprob_diffs": [round(value, _DIGITS) + 0.0 for value in difference[first:].tolist()],
        }


def _run(run: VersionRun) -> dict[str, object]:
    version = run.version
    return {"first_token": run.first_token, "version": version.label, "step": version.step}


def _means(runs: tuple[VersionRun, ...], values: Tensor) -> list[float]:
    """Return the mean of [T] values over the tokens of each run."""
    ends = [run.first_token for run in runs[1:]] + [len(values)]
    return [
        float(torch.mean(values[run.first_token : end]))
        for run, end in zip(runs, ends, strict=True)
    ]
