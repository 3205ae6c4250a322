"""Learners that are given digests of images, where their tokens are, and files.

Log-probabilities of the answers are transformers', of its own image processor: what the policy's
differ from them by shows whether the learner saw the same.
"""

import json
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Pillow

from slipstream.wire.files.image_folder import ImageFolder
from slipstream.wire.files.trajectory_file import RecordedGroup, TrajectoryFileWriter
from slipstream.wire.messages.arrays import PackedArray
from slipstream.wire.messages.broker import DeliveredGroup, DeliveredTrajectory
from slipstream.wire.messages.codec import encode
from slipstream.wire.messages.images import ImageSpan
from slipstream.wire.messages.trajectory import (
    Prompt,
    TrajectoryHeader,
    TrajectoryPayload,
    Transcript,
    VersionRun,
)
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.models.image_law import image_law
from tests.integration.recorded import finish, rows, start_tool
from tests.support.families import write_family
from tests.support.family_models import IMAGE_TOKEN
from tests.support.ranks.run import outputs, start
from tests.support.tiny_run import write_policy
from tests.support.waiting import HANG_S

pytestmark = pytest.mark.integration
# Images of the prompt of each group, by number. The second and the third prompt differ in their
# image alone, and the last has none.
SHOWN = [(0, 1), (2,), (3,), ()]
SIZES = [(20, 13), (9, 30), (24, 16), (24, 16)]  # pixels
SIBLINGS = 2
LAYOUTS = {
    "one": (),
    "tp2-pp2": ("learner.ranks=4", "learner.tensor_parallel=2", "learner.pipeline_parallel=2"),
    "cp2": ("learner.ranks=2", "learner.context_parallel=2"),
    "trained-dp2": ("learner.ranks=2", 'learner.vision="trained"', "learner.vision_lr_scale=0.5"),
}


@dataclass
class Seen:
    """A tiny model that sees, a recorded step of answers to images, and learners that train it."""

    folder: Path
    model: Path = field(init=False)

    def __post_init__(self) -> None:
        self.model = write_family(self.folder / "model", "qwen3_vl", bos_token_id=1)
        write_policy(self.folder / "tokens")
        for file in (self.folder / "tokens").glob("token*"):
            shutil.copyfile(file, self.model / file.name)
        self._write_groups()
        (self.folder / "run.toml").write_text(
            f"""
            [run]
            dir = "{self.folder / "runs"}"
            model = "{self.model}"
            steps = 1
            group_size = {SIBLINGS}
            groups_per_step = {len(SHOWN)}
            [sampling]
            max_prompt_tokens = 100
            max_response_tokens = 20
            [learner]
            lr = 1e-2
            deterministic = true
            timeout_s = {HANG_S}
            """
        )

    def _write_groups(self) -> None:
        law, rng = image_law(self.model), np.random.default_rng(5)
        assert law is not None
        images, files, digests = ImageFolder(self.folder / "images"), list[Path](), list[str]()
        for number, (width, height) in enumerate(SIZES):
            file = self.folder / f"{number}.png"
            Pillow.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)).save(file)
            files.append(file)
            digests.append(images.keep(file.read_bytes()))
        prompts: list[tuple[list[int], list[ImageSpan]]] = []
        for shown in SHOWN:
            tokens, spans = [4, 5], list[ImageSpan]()
            for number in shown:
                grid = law.patches_of(*SIZES[number])
                count = law.num_tokens(*grid)
                spans.append(ImageSpan(digests[number], len(tokens), count, *grid))
                tokens += [IMAGE_TOKEN] * count + [6]
            prompts.append((tokens, spans))
        assert prompts[1][0] == prompts[2][0]
        answers = [
            [rng.integers(3, 100, rng.integers(4, 9)).tolist() for _ in range(SIBLINGS)]
            for _ in SHOWN
        ]
        asked = [
            ([*tokens, *answer], spans)
            for (tokens, spans), of_group in zip(prompts, answers, strict=True)
            for answer in of_group
        ]
        logprobs = self._by_transformers(asked, dict(zip(digests, files, strict=True)))
        writer = TrajectoryFileWriter(self.folder / "recorded.trajectories")
        for number, (tokens, _) in enumerate(prompts):
            of_group = range(number * SIBLINGS, (number + 1) * SIBLINGS)
            members = [
                trajectory(number, sibling, len(tokens), *asked[at], logprobs[at], rng.random())
                for sibling, at in enumerate(of_group)
            ]
            trajectories, payloads, transcripts = zip(*members, strict=True)
            group = DeliveredGroup(group_id=number, trajectories=trajectories)
            writer.append(
                [RecordedGroup(step=0, group=group, payloads=payloads, transcripts=transcripts)]
            )
        writer.close()

    def _by_transformers(
        self, asked: list[tuple[list[int], list[ImageSpan]]], files: dict[str, Path]
    ) -> list[list[float]]:
        given = self.folder / "asked.json"
        texts = [
            [ids, [str(files[s.digest]) for s in spans], [[s.rows, s.columns] for s in spans]]
            for ids, spans in asked
        ]
        given.write_text(json.dumps(texts))
        program = "integration.transformers_seen"
        (printed,) = outputs([start(self.folder, program, self.model, given)])
        found: list[list[float]] = json.loads(printed)
        return found

    def train(self, name: str, *overrides: str, code: int = 0) -> tuple[Path, str]:
        """Return the folder of a run, and what its learner printed."""
        command = ["-m", "slipstream.learner.main", "--config", self.folder / "run.toml"]
        command += ["--replay", self.folder / "recorded.trajectories", f"run.name={name}"]
        words = [sys.executable, *map(str, command), *overrides]
        printed = finish(start_tool(words), code=code)
        return self.folder / "runs" / name, printed


def trajectory(
    group_id: int,
    sibling: int,
    num_prompt: int,
    tokens: list[int],
    spans: list[ImageSpan],
    logprobs: list[float],
    reward: float,
) -> tuple[DeliveredTrajectory, bytes, bytes]:
    """Return an answer whose tokens had these log-probabilities, with payload and transcript."""
    count = len(tokens)
    mask = np.arange(count) >= num_prompt
    behavior = np.where(mask, [0.0, *logprobs], 0.0).astype("<f4")
    ids = np.array(tokens, "<i4")
    payload = TrajectoryPayload(
        token_ids=PackedArray("int32", (count,), memoryview(ids.tobytes())),
        loss_mask=PackedArray("bool", (count,), memoryview(mask.tobytes())),
        behavior_logprobs=PackedArray("float32", (count,), memoryview(behavior.tobytes())),
        images=tuple(spans),
    )
    header = TrajectoryHeader(
        group_id=group_id,
        sibling=sibling,
        lease_id=0,
        num_prompt_tokens=num_prompt,
        num_tokens=count,
        version_runs=(VersionRun(num_prompt, PolicyVersion(1, 0)),),
        temperature=1.0,
        finish_reason="stop",
    )
    transcript = Transcript(
        prompt=Prompt(prompt="what is it?"),
        response="it",
        num_response_tokens=count - num_prompt,
        finish_reason="stop",
    )
    return DeliveredTrajectory(header=header, reward=reward), encode(payload), encode(transcript)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return Seen(tmp_path_factory.mktemp("seen"))


@pytest.mark.parametrize(
    "layout",
    [
        "one",
        "tp2-pp2",
        pytest.param("cp2", marks=pytest.mark.slow),  # the layouts of a step have it
        pytest.param("trained-dp2", marks=pytest.mark.slow),  # the same
    ],
)
def test_a_learner_sees_what_the_engine_saw(seen: Seen, layout: str):
    run, _ = seen.train(layout, *LAYOUTS[layout])
    (row,) = rows(run)
    assert row["staleness/logprob_abs_diff"] < 1e-5
    assert row["policy/grad_norm"] > 0.01
    assert row["throughput/replaced_kernels"] == 0.0


def test_an_image_that_is_gone_rejects_the_batch_that_shows_it(seen: Seen, tmp_path: Path):
    other = Path(shutil.copytree(seen.folder, tmp_path / "other"))
    (image, *_) = sorted((other / "images").glob("??/*"))
    image.unlink()
    again = object.__new__(Seen)
    again.folder = other
    _, printed = again.train("gone", code=2)
    assert f"image {image.name[:8]} cannot be had" in printed
    assert "1 of 4 images are not in" in printed
    assert "cannot be trained (invalid)" in printed
