"""The policy that ships with the project scores what the README states."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.deploy.examples.addition import SHIPPED_POLICY, prepare

ROOT = Path(__file__).parents[2]
TOLERANCE = (
    0.01  # half a unit of the last place in the README, and one problem of 256 on a near tie
)

pytestmark = pytest.mark.integration

MEASURE = """
import dataclasses, json, sys
from pathlib import Path
from docs.generate.policy.imitation import measure_folder
print(json.dumps(dataclasses.asdict(measure_folder(Path(sys.argv[1]), Path(sys.argv[2])))))
"""


def documented() -> dict[str, float]:
    """Return the shares that the README gives."""
    text = " ".join((ROOT / "README.md").read_text().split())
    shares = (
        r"answers (\d\d)% of the 256 held-out problems correctly with greedy decoding "
        r"and (\d\d)% when it samples"
    )
    found = re.search(shares, text)
    assert found, "the README no longer states what the policy knows at the start"
    return {"greedy": int(found[1]) / 100, "sampled": int(found[2]) / 100}


def test_shipped_policy_scores_what_the_readme_states(tmp_path: Path):
    prepare(tmp_path)
    command = [sys.executable, "-c", MEASURE, SHIPPED_POLICY, tmp_path / "held_out.jsonl"]
    measured = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert measured.returncode == 0, measured.stderr
    assert json.loads(measured.stdout) == pytest.approx(documented(), abs=TOLERANCE)
