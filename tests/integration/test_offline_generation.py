"""`start-generator --offline`: prompts in, a trajectory file out, nothing left behind."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from slipstream.generators.text.codec import sibling_seed
from slipstream.wire.files.trajectory_file import read_groups
from slipstream.wire.messages.codec import decode_payload, decode_transcript
from tests.support.tiny_run import write_policy
from tests.support.waiting import HANG_S

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]
CONFIG = """
[run]
name = "offline"
dir = "{folder}"
model = "{folder}/model"
group_size = 2
seed = 4
[data]
file = "{folder}/prompts.jsonl"
shuffle = false
[sampling]
max_prompt_tokens = 8
max_response_tokens = {length}
min_response_tokens = {shortest}
overlong_prompts = "drop"
[generators]
device = "cpu"
max_cached_tokens = 4096
max_sequences = 8
[reward]
function = "{folder}/reward.py:score"
"""
REWARD = "def score(source, answer, truth, extra): return {'score': len(answer), 'six': 6}\n"


def write_run(folder: Path, *, length: int, shortest: int = 0) -> list[str]:
    write_policy(folder / "model")
    prompts = [{"prompt": f"{i}+{i}=", "ground_truth": str(2 * i)} for i in range(6)]
    prompts[3]["prompt"] = "100000+100000="
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    (folder / "reward.py").write_text(REWARD)
    (folder / "run.toml").write_text(CONFIG.format(folder=folder, length=length, shortest=shortest))
    program = [
        sys.executable,
        "-m",
        "slipstream.generators.main",
        "--config",
        str(folder / "run.toml"),
    ]
    return [*program, "--offline", "--out", str(folder / "a.trajectories")]


def test_every_prompt_is_answered_scored_and_recorded(tmp_path: Path):
    command = write_run(tmp_path, length=12)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "prompt 3 dropped: row 3 of default has 14 tokens" in done.stderr
    assert "6 of 6 prompts, 1 dropped, 10 answers" in done.stderr
    groups = sorted(read_groups(tmp_path / "a.trajectories"), key=lambda g: g.group.group_id)
    assert [g.group.group_id for g in groups] == [0, 1, 2, 4, 5]
    assert [g.step for g in groups] == [-1] * 5
    for group in groups:
        for one, payload, text in zip(
            group.group.trajectories, group.payloads, group.transcripts, strict=True
        ):
            transcript = decode_transcript(text)
            assert transcript.prompt.row == group.group.group_id
            assert one.reward == len(transcript.response)
            assert one.parts == {"score": one.reward, "six": 6.0}
            assert one.header.oldest_version.label == "v0.0"
            assert decode_payload(payload).token_ids.shape == (one.header.num_tokens,)
        first, second = (decode_transcript(text).response for text in group.transcripts)
        assert first != second, sibling_seed(4, "train", group.group.group_id, 0)

    other = subprocess.run(
        [*command, "run.seed=5"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert other.returncode == 2
    assert "a.trajectories exists and was generated with run.seed = 4, now it is 5" in other.stderr


# In `make test` a run is ended so, with its engine: tests/e2e/test_user_loop.py.
@pytest.mark.slow
def test_ctrl_c_ends_it_and_leaves_no_process_behind(tmp_path: Path):
    command = write_run(tmp_path, length=900, shortest=900)
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    log = ""
    while "engine answers" not in log:
        log = process.stderr.readline()
        assert process.poll() is None
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert process.wait(HANG_S) == 130
    process.stderr.close()
    _, alive = psutil.wait_procs(children, timeout=HANG_S)
    assert alive == []
    assert list(read_groups(tmp_path / "a.trajectories")) == []


ENVIRONMENT = """
from slipstream.generators.environments.sdk import Environment, Prompt, Reply, Step

class Twice(Environment):
    async def reset(self, prompt: Prompt) -> str:
        if prompt.row == 2:
            raise OSError("no such world")
        self._asked = False
        return prompt.text

    async def step(self, reply: Reply) -> Step:
        if self._asked:
            return Step(done=True, reward=2.0 if reply.text else None, parts={"asked": 2})
        self._asked = True
        return Step(messages="1+1=")
"""


def write_twice(folder: Path) -> list[str]:
    (folder / "env.py").write_text(ENVIRONMENT)
    return [
        *write_run(folder, length=12, shortest=0),
        f"environment.function={folder / 'env.py'}:Twice",
        "environment.max_tokens=100",
        "run.group_size=2",
    ]


def test_trajectories_of_several_turns_are_recorded_too(tmp_path: Path):
    command = write_twice(tmp_path)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "prompt 2 dropped: OSError: no such world" in done.stderr
    assert "1 prompts failed: start again" in done.stderr
    assert_recorded(tmp_path)


# tests/unit/generators/tools/test_offline.py answers what is not in the file yet, on no engine.
@pytest.mark.slow
def test_a_later_start_tries_what_failed_once_more(tmp_path: Path):
    command = write_twice(tmp_path)
    for said in ("6 of 6 prompts, 2 dropped", "4 prompts are in the file already"):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 1, done.stderr
        assert said in done.stderr
        assert "prompt 2 dropped: OSError: no such world" in done.stderr
        assert_recorded(tmp_path)


def assert_recorded(tmp_path: Path) -> None:
    groups = sorted(read_groups(tmp_path / "a.trajectories"), key=lambda g: g.group.group_id)
    assert [g.group.group_id for g in groups] == [0, 1, 4, 5]
    for group in groups:
        for one, payload in zip(group.group.trajectories, group.payloads, strict=True):
            mask = decode_payload(payload).loss_mask.data.tobytes()
            assert len(one.header.turns) == 2
            assert mask.count(1) == one.header.num_response_tokens
            # Who replies nothing has no reward of the environment: it is the function's.
            assert one.reward == 2.0 or one.parts.get("six") == 6.0
