"""Policies that see, with every role real: what is trained of an image is what was sampled."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from slipstream.deploy.examples import colors
from slipstream.weightbus.version.engine_checksums import EngineLayout
from slipstream.wire.files.image_folder import ImageFolder
from slipstream.wire.models.pixels import image_facts
from tests.e2e.test_algorithms import gain_of
from tests.support.drawn_images import drawn
from tests.support.served import assert_trained_and_served
from tests.support.tiny_run import ROOT, TinyRun, rows_of
from tests.support.vision_models import write_vision

pytestmark = [pytest.mark.e2e]
REWARD = """
import hashlib

def score(data_source, solution_str, ground_truth, extra_info):
    contents = [open(path, "rb").read() for path in extra_info["images"]]
    named = [hashlib.sha256(content).hexdigest() for content in contents]
    shown = all(name in path for name, path in zip(named, extra_info["images"], strict=True))
    return {"score": len(solution_str) % 3, "shown": shown * len(contents)}
"""


def as_colors(folder: Path) -> None:
    colors.write_policy(folder / "other")
    (folder / "model").rename(folder / "random")
    (folder / "other").rename(folder / "model")
    colors.write_problems(folder)
    (folder / "reward.py").write_text(REWARD)


def as_windows(folder: Path) -> None:
    (folder / "model").rename(folder / "random")
    write_vision(folder / "model", "qwen2_5_vl")
    for number in range(4):
        (folder / f"{number}.png").write_bytes(drawn(60 + 40 * number, 50, seed=number))
    for name, count in (("train", 40), ("held_out", 8)):
        rows = [
            {
                "prompt": [{"role": "user", "content": f"<image>{number}<image>?"}],
                "images": [f"{number % 4}.png", f"{number % 3}.png"],
            }
            for number in range(count)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)


@pytest.mark.parametrize(
    ("before", "vision", "images"),
    [
        pytest.param(as_colors, "trained", 1, id="qwen3_vl-trained"),
        # tests/integration/test_vision_engine.py and test_layouts.py have both families.
        pytest.param(as_windows, "frozen", 2, id="qwen2_5_vl-frozen", marks=pytest.mark.slow),
        pytest.param(as_windows, "trained", 2, id="qwen2_5_vl-trained", marks=pytest.mark.slow),
    ],
)
def test_an_engine_sees_what_was_learned_and_every_image_is_accounted_for(
    start_run: Callable[..., TinyRun],
    inputs: Path,
    before: Callable[[Path], None],
    vision: str,
    images: int,
):
    run = start_run(
        before=before,
        learner__vision=vision,
        run__steps=3,
        sampling__max_prompt_tokens=128,
        eval__file=inputs / "held_out.jsonl",
        eval__every_steps=3,  # so that the last version is adopted before the run ends
    )
    assert_trained_and_served(run, EngineLayout(), has_tower=vision == "trained")
    kept = ImageFolder(run.folder / "images")
    rows = run.rollouts()
    assert len(rows) == 3 * 4 * 2
    for row in rows:
        assert row["parts"]["shown"] == len(row["images"]) == images
        for image in row["images"]:
            assert image_facts(kept.read(image["digest"])).digest == image["digest"]
            tokens = row["token_ids"][image["first_token"] :][: image["num_tokens"]]
            assert len({*tokens}) == 1, "an image is one token many times"
            assert image["num_tokens"] * 4 == image["rows"] * image["columns"]
    evaluated = rows_of(run.folder / "eval" / "step-000003.jsonl")
    assert {len(row["images"]) for row in evaluated} == {images}
    given = load_file(inputs / "model" / "model.safetensors")
    exported = load_file(run.folder / "model" / "model.safetensors")
    assert exported.keys() == given.keys()
    tower = [name for name in given if "visual." in name]
    assert tower
    moved = [name for name in tower if not exported[name].equal(given[name])]
    assert bool(moved) is (vision == "trained")


@pytest.mark.slow  # the test above has every role, for three steps
@pytest.mark.parametrize("lr", ["3e-4", "0"])
def test_colors_are_learned_from_rewards_alone(
    tmp_path: Path, lr: str, capsys: pytest.CaptureFixture[str]
):
    colors.prepare(ROOT / ".cache" / "colors")
    words = ("run", "--config", "configs/quickstart-vision.toml", f"learner.lr={lr}")
    gain = gain_of(tmp_path / "quickstart-vision", capsys, *words, steps=60)
    assert gain >= 0.8 if lr != "0" else gain == 0
