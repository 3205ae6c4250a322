"""Recorded trajectory files of a tiny policy, and `start-learner --replay` as a child process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from slipstream.wire.files.trajectory_file import RecordedGroup, TrajectoryFileWriter
from slipstream.wire.messages.arrays import PackedArray
from slipstream.wire.messages.broker import DeliveredGroup, DeliveredTrajectory
from slipstream.wire.messages.codec import encode
from slipstream.wire.messages.trajectory import (
    Prompt,
    TrajectoryHeader,
    TrajectoryPayload,
    Transcript,
    VersionRun,
)
from slipstream.wire.messages.versions import PolicyVersion
from tests.support import nursery
from tests.support.tiny_run import write_policy
from tests.support.waiting import HANG_S

GROUPS, SIBLINGS, VOCABULARY = 3, 2, 12
LAYOUTS = {
    "one": (),
    "tp2": ("learner.ranks=2", "learner.tensor_parallel=2"),
    "dp2": ("learner.ranks=2",),
    "bf16": ("learner.dtype=bfloat16",),
    "tp2-pp2": (*("learner.ranks=4", "learner.tensor_parallel=2", "learner.pipeline_parallel=2"),),
    "pp2-bf16": (*("learner.ranks=2", "learner.pipeline_parallel=2", "learner.dtype=bfloat16"),),
    "critic-tp2": (
        *("learner.ranks=2", "learner.tensor_parallel=2"),
        *("algo.preset=ppo", "algo.critic.lr=1e-2"),
    ),
}


def recorded_group(step: int, group_id: int, rng: np.random.Generator) -> RecordedGroup:
    """Return a group of random answers and rewards; every other one crosses a version."""
    trajectories, payloads, transcripts = [], [], []
    for sibling in range(SIBLINGS):
        num_prompt, num_tokens = 4, int(rng.integers(9, 30))
        mask = np.arange(num_tokens) >= num_prompt
        runs = [VersionRun(num_prompt, PolicyVersion(1, max(0, step - 1)))]
        if sibling:
            runs.append(VersionRun(num_prompt + 2, PolicyVersion(1, max(0, step))))
        logprobs = np.where(mask, -2.5 + 0.5 * rng.random(num_tokens), 0.0).astype("<f4")
        ids = rng.integers(0, VOCABULARY, num_tokens).astype("<i4")
        payload = TrajectoryPayload(
            token_ids=PackedArray("int32", (num_tokens,), memoryview(ids.tobytes())),
            loss_mask=PackedArray("bool", (num_tokens,), memoryview(mask.tobytes())),
            behavior_logprobs=PackedArray("float32", (num_tokens,), memoryview(logprobs.tobytes())),
        )
        header = TrajectoryHeader(
            group_id=group_id,
            sibling=sibling,
            lease_id=0,
            num_prompt_tokens=num_prompt,
            num_tokens=num_tokens,
            version_runs=tuple(runs),
            temperature=1.0,
            finish_reason="stop",
        )
        reward = float(rng.random())
        trajectories.append(
            DeliveredTrajectory(header=header, reward=reward, parts={"half": reward / 2})
        )
        payloads.append(encode(payload))
        transcripts.append(
            encode(
                Transcript(
                    prompt=Prompt(prompt="1+1="),
                    response="2",
                    num_response_tokens=num_tokens - num_prompt,
                    finish_reason="stop",
                )
            )
        )
    return RecordedGroup(
        step=step,
        group=DeliveredGroup(group_id=group_id, trajectories=tuple(trajectories)),
        payloads=tuple(payloads),
        transcripts=tuple(transcripts),
    )


class Replays:
    """A tiny model, a recorded file of some steps, and learners that train on it."""

    def __init__(self, folder: Path, *, steps: int = 6) -> None:
        self.folder = folder
        self.model = folder / "model"
        self.file = folder / "recorded.trajectories"
        self.config = folder / "run.toml"
        write_policy(self.model)
        rng = np.random.default_rng(11)
        writer = TrajectoryFileWriter(self.file)
        for step in range(steps):
            for number in range(GROUPS):
                writer.append([recorded_group(step, step * GROUPS + number, rng)])
        writer.close()
        self.config.write_text(
            f"""
            [run]
            dir = "{folder / "runs"}"
            model = "{self.model}"
            steps = {steps}
            group_size = {SIBLINGS}
            groups_per_step = {GROUPS}
            [learner]
            lr = 1e-2
            deterministic = true
            max_tokens_per_microbatch = 64
            timeout_s = {HANG_S}
            """
        )

    def command(self, name: str, *overrides: str, replays: bool = True) -> list[str]:
        module = ["-m", "slipstream.learner.main", "--config", str(self.config)]
        file = ["--replay", str(self.file)] if replays else []
        return [sys.executable, *module, *file, f"run.name={name}", *overrides]

    def start(
        self, name: str, *overrides: str, max_file_bytes: int | None = None
    ) -> subprocess.Popen[str]:
        return start_tool(self.command(name, *overrides), max_file_bytes=max_file_bytes)

    def train(self, name: str, *overrides: str) -> Path:
        """Train a run of this name to its end and return its folder."""
        finish(self.start(name, *overrides))
        return self.folder / "runs" / name


def start_tool(
    command: list[str], *, anew: bool = False, max_file_bytes: int | None = None
) -> subprocess.Popen[str]:
    """Start a program of ours; with a limit, writing a larger file fails as on a full disk."""
    return nursery.start(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # noqa: TID251 handed on
        anew=anew,
        max_file_bytes=max_file_bytes,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], *, code: int = 0) -> str:
    """Wait for a process and return what it printed; it does not outlive the test."""
    try:
        output, _ = process.communicate(timeout=HANG_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == code, output
    return output


def weights(run: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(run / "model" / "model.safetensors")
    return {name: tensor.float() for name, tensor in tensors.items()}


def rows(run: Path) -> list[dict[str, float]]:
    lines = (run / "replay" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
