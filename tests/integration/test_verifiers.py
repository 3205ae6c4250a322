"""Episodes of real verifiers, in an environment of its own, against the endpoint."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from slipstream.generators.environments.host import EnvironmentFailedError
from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.trajectory import Json, Prompt
from tests.support.playing import heard, hosted, play
from tests.support.tiny_run import ROOT
from tests.support.waiting import HANG_S, until_async

pytestmark = pytest.mark.integration
MODULE = "slipstream.generators.environments.adapters.verifiers"
NAME = f"{MODULE}:rollout"
HERE = Path(__file__).parent / "environments"
PYTHON = ROOT / ".cache" / "verifiers" / "bin" / "python"
needs_verifiers = pytest.mark.skipif(
    not PYTHON.exists(), reason="verifiers is not installed: make test-slow"
)
ENV: dict[str, Json] = {
    "taskset": {"id": "verifiers_toy"},
    "agent": {"harness": {"id": "verifiers_toy"}, "runtime": {"type": "subprocess"}},
}
OPTIONS: dict[str, Json] = {"python": str(PYTHON), "env": ENV, "path": [str(HERE)]}


def prompts(folder: Path) -> list[Prompt]:
    """Return the toy's tasks as prompts, by way of a data file."""
    file = folder / "prompts.jsonl"
    command = [sys.executable, "-m", MODULE, "--python", str(PYTHON), "--env", json.dumps(ENV)]
    command += ["--path", str(HERE), "--out", str(file)]
    subprocess.run(command, check=True, timeout=HANG_S, env={"PYTHONPATH": str(ROOT / "src")})
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert rows[0]["prompt"] == [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "1 + 2 = ?"},
    ]
    return [Prompt(prompt="", extra_info=row["extra_info"]) for row in rows]


@needs_verifiers
async def test_an_episode_is_played_against_the_endpoint_and_scored(tmp_path: Path):
    first, second, broken = prompts(tmp_path)

    async with hosted(NAME, OPTIONS, variables={"HOME": str(tmp_path)}) as host:
        before = len(psutil.Process().children(recursive=True))
        assert host.drives_itself
        found = await play(host, first, "2", "3")
        assert (found.reward, found.parts) == (2.0, {"turns": 2.0, "right": 2.0})
        assert heard(found) == ["1 + 2 = ?", "Are you sure?"]
        assert [one["role"] for one in found.messages] == [
            *("system", "user", "assistant", "user", "assistant")
        ]
        assert (await play(host, second, "4", "5")).reward == 0.0
        with pytest.raises(EnvironmentFailedError, match="it cannot be scored"):
            await play(host, broken, "1", "2")
        with pytest.raises(EnvironmentFailedError, match="holds no verifiers_task"):
            await play(host, Prompt(prompt="x"), "1")
        await until_async(lambda: len(psutil.Process().children(recursive=True)) <= before)


@needs_verifiers
@pytest.mark.parametrize(
    ("env", "why"),
    [
        ({"taskset": {"id": "no_such"}}, "taskset 'no_such' not found"),
        ({**ENV, "speed": 1}, "speed"),
        ({}, "verifiers: "),
    ],
)
async def test_what_is_no_environment_is_refused_at_the_start(env: dict[str, Any], why: str):
    with pytest.raises(ConfigError, match=why):
        async with hosted(NAME, {**OPTIONS, "env": env}):
            pass


@pytest.mark.parametrize(
    ("python", "why"),
    [
        ("/no/such/python", "/no/such/python cannot be run"),
        (sys.executable, "No module named 'verifiers'"),
        ("/bin/true", "gave no answer and ended with code 0"),
        ("/bin/echo", "cannot be run: "),
    ],
)
async def test_a_python_without_verifiers_is_refused_at_the_start(python: str, why: str):
    with pytest.raises(ConfigError, match=why):
        async with hosted(NAME, {**OPTIONS, "python": python}):
            pass
