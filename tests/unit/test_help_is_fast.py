"""``--help`` answers at once: heavy imports come after the arguments are parsed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_CPU_S = 1.0

# a process of its own, so that only this one child counts
MEASURE = """
import json, resource, subprocess, sys
done = subprocess.run(sys.argv[1:], capture_output=True, text=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([done.returncode, done.stdout, used.ru_utime + used.ru_stime]))
"""


@pytest.mark.parametrize(
    ("module", "example"),
    [
        ("learner.main", "start-learner --config run.toml"),
        ("generators.main", "start-generator --config run.toml"),
        ("broker.main", "start-broker --config run.toml"),
        ("broker.reward_worker", "start-reward-worker --config run.toml"),
        ("deploy.main", "slipstream quickstart"),
    ],
)
def test_help_is_fast_and_shows_an_example(module: str, example: str):
    command = [sys.executable, "-c", MEASURE, sys.executable, "-m", module, "--help"]
    measured = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    code, text, cpu_s = json.loads(measured.stdout)
    assert code == 0
    assert example in text
    assert cpu_s < LIMIT_CPU_S
