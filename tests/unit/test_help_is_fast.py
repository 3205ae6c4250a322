"""``--help`` answers at once: heavy imports come after the arguments are parsed."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = {"aiohttp", "megatron", "numpy", "ray", "sglang", "tokenizers", "torch", "transformers"}
MOST_MODULES = 600  # torch alone has more


@pytest.mark.parametrize(
    ("module", "example"),
    [
        ("learner.main", "start-learner --config run.toml"),
        ("learner.warmup", "python -m learner.warmup --model blank"),
        ("generators.main", "start-generator --config run.toml"),
        ("broker.main", "start-broker --config run.toml"),
        ("broker.reward_worker", "start-reward-worker --config run.toml"),
        ("deploy.main", "slipstream quickstart"),
    ],
)
def test_help_is_fast_and_shows_an_example(module: str, example: str):
    command = [sys.executable, "-X", "importtime", "-m", module, "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert example in done.stdout
    imported = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines()]
    assert "argparse" in imported
    assert HEAVY.isdisjoint(imported)
    assert len(imported) < MOST_MODULES
