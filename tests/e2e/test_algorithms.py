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
LORA = (
    "lora.rank=16",
    "learner.lr=2e-3",
)  # made of: test_lora.py, tests/integration/test_lora_*.py
SETTINGS = {
    "async-default": (),
    "decoupled-ppo": ("algo.preset=decoupled-ppo",),
    "grpo": ("algo.preset=grpo",),
    "ppo": ("algo.preset=ppo", "algo.critic.lr=1e-3"),  # ten times the policy's: its head is 0
    "named adapters": (*LORA, "lora.publish=named"),
    "merged adapters": (*LORA, "lora.publish=merged"),
}
LEAST_GAIN = 0.2  # in the share of right answers, six deviations of 256 of them


def gain_of(run: Path, capsys: pytest.CaptureFixture[str], *words: str, steps: int) -> float:
    """Run a command to the end of its run; return what the share of right answers gained."""
    command = [sys.executable, "-m", "slipstream.deploy.main", *words]
    settings = [f"run.dir={run.parent}", f"run.steps={steps}"]
    output = run.parent / "output.txt"
    with output.open("w") as file:
        code = subprocess.run(
            [*command, *settings], cwd=ROOT, stdout=file, stderr=file, check=False
        ).returncode
    assert code == 0, output.read_text()
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["outcome"], summary["steps"]) == ("finished", steps)
    assert summary["equation"]["unaccounted"] == 0
    assert summary["issued"] == summary["trained"] + sum(summary["dropped"].values())
    points = {point["step"]: point["overall"]["metrics"]["mean@1"] for point in summary["eval"]}
    with capsys.disabled():
        counts = {name: summary[name] for name in ("issued", "trained", "dropped")}
        sys.stdout.write(f"\n{words}: {points} {counts}\n")
    return float(points[steps] - points[0])


@pytest.mark.parametrize("name", SETTINGS)
def test_an_algorithm_teaches_addition(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
):
    prepare(ROOT / ".cache" / "addition")
    words = ("run", "--config", "configs/quickstart.toml", *SETTINGS[name])
    assert gain_of(tmp_path / "quickstart", capsys, *words, steps=STEPS) >= LEAST_GAIN


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
    words = ("quickstart", "--agent", *settings)
    gain = gain_of(tmp_path / "quickstart-agent", capsys, *words, steps=steps)
    assert least <= gain <= most
