"""Trained trajectories as JSON lines in the run folder: sampled, and capped in size."""

import json
from pathlib import Path

import torch
from torch import Tensor

from learner.collate import PackedBatch
from wire.control import DeliveredTrajectory


class RolloutLog:
    """Appends to rollouts/trained.jsonl until its size limit."""

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "trained.jsonl"
        self._room = max_bytes

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
        difference = (proximal - batch.behavior_logprobs).abs()
        lines = []
        for index, trajectory in enumerate(trajectories):
            start, end = batch.cu_seqlens[index : index + 2].tolist()
            lines.append(json.dumps(_row(step, trajectory, batch, difference, start, end)) + "\n")
        text = "".join(lines)
        if len(text) > self._room:
            self._room = 0
            return
        self._room -= len(text)
        with self._path.open("a") as file:
            file.write(text)


def _row(
    step: int,
    trajectory: DeliveredTrajectory,
    batch: PackedBatch,
    difference: Tensor,
    start: int,
    end: int,
) -> dict[str, object]:
    header = trajectory.header
    runs = [
        {"first_token": run.first_token, "version": run.version.label, "step": run.version.step}
        for run in header.version_runs
    ]
    ends = [run.first_token for run in header.version_runs[1:]] + [header.num_tokens]
    per_run = [
        float(torch.mean(difference[start + run.first_token : start + last]))
        for run, last in zip(header.version_runs, ends, strict=True)
    ]
    return {
        "step": step,
        "group_id": header.group_id,
        "sibling": header.sibling,
        "reward": trajectory.reward,
        "temperature": header.temperature,
        "finish_reason": header.finish_reason,
        "num_prompt_tokens": header.num_prompt_tokens,
        "token_ids": batch.token_ids[start:end].tolist(),
        "version_runs": runs,
        "logprob_abs_diff_by_run": per_run,  # |proximal - behavior|, mean over the run's tokens
    }
