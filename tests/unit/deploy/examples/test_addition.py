"""The quickstart's files: whole or absent, made in moments, from what ships with the project."""

import fnmatch
import json
import struct
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from slipstream.deploy.commands.quickstart import quickstart
from slipstream.deploy.examples.addition import SHIPPED_POLICY, prepare
from slipstream.wire.errors import ConfigError
from tests.support.blank_model import write_blank_model

ROOT = Path(__file__).parents[4]
MOST_BYTES = 2 * 2**20
POLICY_FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder, hidden ones too."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def identities(folder: Path) -> dict[Path, tuple[int, int]]:
    """Return what changes when a file is written again."""
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.rglob("*")}


def test_every_problem_is_either_held_out_or_trained(tmp_path: Path):
    prepare(tmp_path)
    made = contents(tmp_path)
    assert set(made) == {"train.jsonl", "held_out.jsonl", *(f"model/{n}" for n in POLICY_FILES)}
    rows = {
        name: [json.loads(line) for line in made[f"{name}.jsonl"].splitlines()]
        for name in ("train", "held_out")
    }
    assert len(rows["held_out"]) == 256
    both = [*rows["train"], *rows["held_out"]]
    assert {row["prompt"] for row in both} == {
        f"{n:04d}"[:2] + f"+{n % 100:02d}=" for n in range(10_000)
    }
    assert len(both) == 10_000
    for row in both:
        first, second = row["prompt"].rstrip("=").split("+")
        assert row["ground_truth"] == str(int(first) + int(second))


def test_the_policy_is_the_one_that_ships(tmp_path: Path):
    prepare(tmp_path)
    assert contents(tmp_path / "model") == contents(SHIPPED_POLICY)


def test_a_second_call_writes_nothing(tmp_path: Path):
    prepare(tmp_path)
    before = identities(tmp_path)
    prepare(tmp_path)
    assert identities(tmp_path) == before


def test_what_a_killed_call_left_is_completed(tmp_path: Path):
    whole, left = tmp_path / "whole", tmp_path / "left"
    prepare(whole)
    prepare(left)
    (left / "model").rename(left / ".model.replaced")  # killed between its two renames
    (left / ".model.unfinished").mkdir()
    (left / ".model.unfinished" / "config.json").write_text("{")
    (left / "train.jsonl").unlink()
    (left / ".train.jsonl.unfinished").write_text("{")
    (left / "held_out.jsonl").write_text("")
    prepare(left)
    assert contents(left) == contents(whole)


def test_the_policy_of_another_version_is_replaced(tmp_path: Path):
    prepare(tmp_path)
    (tmp_path / "model" / "model.safetensors").write_bytes(b"older")
    (tmp_path / "model" / "model.safetensors.index.json").write_text("{}")
    prepare(tmp_path)
    assert contents(tmp_path / "model") == contents(SHIPPED_POLICY)


def test_it_needs_no_torch(tmp_path: Path):
    code = (
        "import sys; from pathlib import Path; "
        "from slipstream.deploy.examples.addition import prepare; "
        "prepare(Path(sys.argv[1])); print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, tmp_path]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert printed.stdout == "False\n"


def test_the_shipped_policy_is_small_and_bfloat16():
    files = contents(SHIPPED_POLICY)
    assert set(files) == POLICY_FILES
    assert sum(map(len, files.values())) <= MOST_BYTES
    weights = files["model.safetensors"]
    (length,) = struct.unpack_from("<Q", weights)
    header = json.loads(weights[8 : 8 + length])
    assert {tensor["dtype"] for name, tensor in header.items() if name != "__metadata__"} == {
        "BF16"
    }


def test_the_shipped_policy_is_the_one_that_the_command_describes(tmp_path: Path):
    write_blank_model(tmp_path)
    described = contents(tmp_path)
    assert set(described) == POLICY_FILES - {"model.safetensors"}
    for name, content in described.items():
        assert json.loads((SHIPPED_POLICY / name).read_bytes()) == json.loads(content), name


def test_the_policy_is_package_data():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["slipstream.deploy.examples"]
    for path in SHIPPED_POLICY.iterdir():
        name = f"addition_policy/{path.name}"
        assert any(fnmatch.fnmatch(name, pattern) for pattern in patterns), name


@pytest.mark.parametrize("wrong", ["learner.lrr=1", "learner.lr=-1", "run.model=/nowhere"])
def test_a_quickstart_refuses_a_wrong_setting_before_it_makes_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"learner\.lrr?|run\.model"):
        quickstart(ROOT / "configs" / "quickstart.toml", [wrong])
    assert contents(tmp_path) == {}
