"""Plays hostile trajectories as whoever runs this, and prints what they came to, as JSON.

python -m tests.support.hostile_run [attacks]
"""

import asyncio
import json
import logging
import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from slipstream.generators.environments.host import (
    EnvironmentFailedError,
    EnvironmentHost,
    ProcessLimits,
)
from slipstream.generators.environments.messages import BeginTrajectory
from slipstream.wire.messages.trajectory import Prompt
from tests.support.playing import heard, hosted, play
from tests.support.waiting import state_of, until_async

HOSTILE = Path(__file__).parents[1] / "integration" / "environments" / "hostile.py"
LIMITS = ProcessLimits(memory_mb=600, max_processes=64, connect_s=5.0)


@contextmanager
def service() -> Iterator[Path]:
    """Yield the socket of a program of this user, which lies where those of tmux do."""
    folder = Path(f"/tmp/tmux-{os.geteuid()}")  # noqa: S108
    folder.mkdir(mode=0o700, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as own, socket.socket(socket.AF_UNIX) as listener:
        path = Path(own, "socket")
        listener.bind(str(path))
        listener.listen()
        yield path
    with suppress(OSError):  # tmux is in use
        folder.rmdir()


async def attacks(hidden: Path, asked: Path) -> dict[str, float]:
    """Return what one came to beside a neighbour that waits."""
    options = {"hidden": str(hidden), "service": str(asked)}
    async with hosted(f"{HOSTILE}:Attacks", options, limits=LIMITS, hide=[hidden]) as host:
        begun = asyncio.Event()
        neighbour = asyncio.create_task(_waiting(host, begun))
        await begun.wait()
        outcome = await play(host, Prompt(prompt="attack"), "go")
        neighbour.cancel()
        with suppress(asyncio.CancelledError):
            await neighbour
        return outcome.parts


async def _waiting(host: EnvironmentHost, begun: asyncio.Event) -> None:
    async with host.trajectory() as acting:
        await acting.tell(BeginTrajectory(prompt=Prompt(prompt="wait")))
        await acting.hear()
        begun.set()
        await asyncio.Event().wait()


def _num_running() -> int:
    children = psutil.Process().children(recursive=True)
    return sum(state_of(child.pid) not in "ZX" for child in children)


async def theft() -> dict[str, object]:
    """Return how a thief fared, and the trajectories after it."""
    async with hosted(f"{HOSTILE}:Thief", limits=LIMITS) as host:
        before = _num_running()
        rewards, left = [], -1
        for number in range(3):
            try:
                found = await play(host, Prompt(prompt="which?", ground_truth="truth"), "7")
                rewards.append([found.reward, found.parts.get("stolen", -1.0)])
            except EnvironmentFailedError as error:
                rewards.append([str(error), -1.0])
            if not number:
                left = _num_running() - before
        return {"rewards": rewards, "left": left}


async def code_of_the_policy() -> str:
    """Return what an interpreter says to a policy that calls it."""
    function = "slipstream.generators.environments.tools.python:WithPython"
    call = json.dumps({"name": "python", "arguments": {"code": "6 * 7"}})
    async with hosted(function, limits=LIMITS) as host:
        outcome = await play(host, Prompt(prompt="compute"), f"CALL {call}", "done")
    return str(heard(outcome, "tool")[0])


async def played(hidden: Path, *, all_of_them: bool) -> None:
    """Play all or the attacks, and print."""
    with service() as asked:
        found: dict[str, object] = {"attacks": await attacks(hidden, asked)}
    if all_of_them:
        found |= {**await theft(), "code": await code_of_the_policy()}
    sys.stdout.write(f"{json.dumps(found)}\n")
    await until_async(lambda: not psutil.Process().children(recursive=True))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder, "run.key")
        key.write_text("secret")
        logging.basicConfig()
        asyncio.run(played(key, all_of_them=sys.argv[1:] != ["attacks"]))
