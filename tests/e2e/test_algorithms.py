"""Algorithms that learn the quickstart's task with every role real: `make test-slow` runs them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.deploy.examples.addition import prepare
from tests.support.tiny_run import ROOT

# tests/integration/test_presets.py has every preset with a real learner.
pytestmark = [pytest.mark.e2e, pytest.mark.slow]
STEPS = 100
SETTINGS = {
    "async-default": (),
    "decoupled-ppo": (),
    "grpo": (),
    "ppo": ("algo.critic.lr=1e-3",),  # ten times the policy's: its head begins at 0
}
LEAST_GAIN = 0.2  # in the share of right answers, six deviations of 256 of them


@pytest.fixture(scope="module", autouse=True)
def _task() -> None:
    prepare(ROOT / ".cache" / "addition")


@pytest.mark.parametrize("preset", SETTINGS)
def test_a_preset_teaches_addition(tmp_path: Path, preset: str, capsys: pytest.CaptureFixture[str]):
    output = tmp_path / "output.txt"
    command = [
        sys.executable,
        "-m",
        "slipstream.deploy.main",
        "run",
        "--config",
        "configs/quickstart.toml",
    ]
    settings = [f"run.dir={tmp_path}", f"run.steps={STEPS}", f"algo.preset={preset}"]
    with output.open("w") as file:
        code = subprocess.run(
            [*command, *settings, *SETTINGS[preset]],
            cwd=ROOT,
            stdout=file,
            stderr=file,
            check=False,
        ).returncode
    assert code == 0, output.read_text()
    summary = json.loads((tmp_path / "quickstart" / "summary.json").read_text())
    assert (summary["outcome"], summary["steps"]) == ("finished", STEPS)
    assert summary["equation"]["unaccounted"] == 0
    assert summary["issued"] == summary["trained"] + sum(summary["dropped"].values())
    points = {point["step"]: point["overall"]["metrics"]["mean@1"] for point in summary["eval"]}
    with capsys.disabled():
        counts = {name: summary[name] for name in ("issued", "trained", "dropped")}
        sys.stdout.write(f"\n{preset}: {points} {counts}\n")
    assert points[STEPS] - points[0] >= LEAST_GAIN, points


@pytest.mark.parametrize(
    ("settings", "steps", "least", "most"),
    [((), 40, 0.2, 1.0), (("learner.lr=0",), 10, -0.12, 0.12)],
    ids=["learns", "control"],
)
def test_a_policy_learns_to_call_a_tool_and_go_on(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    settings: tuple[str, ...],
    steps: int,
    least: float,
    most: float,
):
    """`make quickstart-agent`; the control's bounds are four deviations of two samples of 256."""
    output = tmp_path / "output.txt"
    command = [sys.executable, "-m", "slipstream.deploy.main", "quickstart", "--agent"]
    with output.open("w") as file:
        code = subprocess.run(
            [*command, f"run.dir={tmp_path}", f"run.steps={steps}", *settings],
            cwd=ROOT,
            stdout=file,
            stderr=file,
            check=False,
        ).returncode
    assert code == 0, output.read_text()
    summary = json.loads((tmp_path / "quickstart-agent" / "summary.json").read_text())
    assert (summary["outcome"], summary["equation"]["unaccounted"]) == ("finished", 0)
    points = {point["step"]: point["overall"]["metrics"]["mean@1"] for point in summary["eval"]}
    with capsys.disabled():
        sys.stdout.write(f"\nsums {settings}: {points}\n")
    assert least <= points[steps] - points[0] <= most, points
