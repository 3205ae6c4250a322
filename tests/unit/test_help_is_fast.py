"""``--help`` answers at once: heavy imports come after the arguments are parsed."""

import subprocess
import sys
from pathlib import Path

from slipstream.deploy.main import COMMANDS

ROOT = Path(__file__).parents[2]
HEAVY = {"aiohttp", "megatron", "numpy", "ray", "sglang", "tokenizers", "torch", "transformers"}
MOST_MODULES = 600  # torch alone has more


def test_help_is_fast_and_shows_an_example():
    for module, example in [
        ("slipstream.learner.main", "start-learner --config run.toml"),
        ("docs.generate.policy.warm_up", "python -m docs.generate.policy.warm_up --model blank"),
        ("slipstream.generators.main", "start-generator --config run.toml"),
        ("slipstream.broker.main", "start-broker --config run.toml"),
        ("slipstream.broker.reward_worker.main", "start-reward-worker --config run.toml"),
        ("slipstream.generators.environments.main", "start-environment --config run.toml"),
        ("slipstream.deploy.main", "slipstream quickstart"),
    ]:
        command = [sys.executable, "-X", "importtime", "-m", module, "--help"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        assert example in done.stdout
        imported = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines()]
        assert "argparse" in imported
        assert HEAVY.isdisjoint(imported)
        assert len(imported) < MOST_MODULES


def test_every_module_of_a_command_belongs_to_one():
    rooms = {path.stem for path in (ROOT / "deploy" / "commands").iterdir()} - {"__pycache__"}
    modules = {module.partition(".")[0] for module, _ in COMMANDS.values()}
    assert rooms - {"__init__", "options"} == modules
