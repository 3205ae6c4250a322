"""Processes that run code for trajectories, and descriptors: none costs a neighbour anything."""

import asyncio
import json
import resource
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from slipstream.generators.environments.host import (
    EnvironmentFailedError,
    EnvironmentHost,
    ProcessLimits,
)
from slipstream.generators.environments.messages import BeginTrajectory, Replied, Turned
from slipstream.wire.messages.trajectory import Prompt
from tests.support.playing import hosted, play
from tests.support.waiting import until_async

pytestmark = pytest.mark.integration
HERE = Path(__file__).parent / "environments" / "borrowing.py"
ASKED = Prompt(prompt="begin")
MIB = 1 << 20
LIMITS = ProcessLimits(memory_mb=300, max_processes=64)
FILL = """
import os
written = 0
for folder in {folders}:
    try:
        for n in range(600):
            with open(f"{{folder}}/{{n}}", "wb") as file:
                file.write(bytes(1 << 20))
            written += 1
    except OSError:
        pass
print(written)
"""


@pytest.fixture
def usual_descriptors() -> Iterator[int]:
    """A soft limit as of most systems, below the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        yield 1024
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def answered(host: EnvironmentHost, text: str) -> str:
    """Return what an environment says to a reply."""
    async with host.trajectory() as acting:
        await acting.tell(BeginTrajectory(prompt=ASKED))
        await acting.hear()
        reply = Replied(text=text, tool_calls=(), finish_reason="stop", num_tokens=1)
        await acting.tell(reply)
        turned = await acting.hear()
    assert isinstance(turned, Turned)
    (message,) = turned.messages
    return str(message["content"])


async def test_a_loader_with_more_files_than_select_can_watch_goes_on(usual_descriptors: int):
    async with hosted(f"{HERE}:ManyFiles") as host:
        for _ in range(2):
            found = await play(host, ASKED, "x")
            assert (found.reward, found.parts) == (1.0, {"soft": float(usual_descriptors)})
        assert not host.replaced


async def test_a_trajectory_for_which_there_are_no_descriptors_ends_alone():
    async with hosted(f"{HERE}:Waits") as host:
        assert host._loader is not None
        (pid,) = host._loader.main_pids
        loader = psutil.Process(pid)
        _, hard = loader.rlimit(psutil.RLIMIT_NOFILE)
        loader.rlimit(psutil.RLIMIT_NOFILE, (loader.num_fds() + 12, hard))
        begun, going_on = asyncio.Queue[None](), asyncio.Event()

        async def one() -> None:
            async with host.trajectory() as acting:
                await acting.tell(BeginTrajectory(prompt=ASKED))
                await acting.hear()
                begun.put_nowait(None)
                await going_on.wait()
                reply = Replied(text="x", tool_calls=(), finish_reason="stop", num_tokens=1)
                await acting.tell(reply)
                turned = await acting.hear()
                assert isinstance(turned, Turned)
                assert turned.reward == 1.0

        tasks = set[asyncio.Task[None]]()
        while not (failed := {task for task in tasks if task.done()}) and len(tasks) < 20:
            tasks.add(asyncio.create_task(one()))
            await asyncio.wait(
                {*tasks, asyncio.create_task(begun.get())}, return_when=asyncio.FIRST_COMPLETED
            )
        going_on.set()
        ends = await asyncio.gather(*failed, return_exceptions=True)
        assert [str(end) for end in ends] == ["its process does not start: Too many open files"]
        assert await asyncio.gather(*tasks - failed) == [None] * (len(tasks) - 1)
        assert len(tasks) > 2
        await until_async(lambda: not host._acting)
        assert (await play(host, ASKED, "x")).reward == 1.0
        assert not host.replaced


async def test_a_seventeenth_keeper_is_refused_with_the_bound_and_given_when_others_have_ended():
    async with hosted(f"{HERE}:TooMany") as host:
        said = await answered(host, "x")
    *answers, refusal, afterwards = json.loads(said)
    assert answers == ["42\n"] * 16
    assert "16 sandboxes of a trajectory may run at a time" in refusal
    assert afterwards == "42\n"


async def test_keepers_that_have_ended_are_forgotten():
    async with hosted(f"{HERE}:HangsUp") as host, host.trajectory() as acting:
        await acting.tell(BeginTrajectory(prompt=ASKED))
        await acting.hear()
        reply = Replied(text="200", tool_calls=(), finish_reason="stop", num_tokens=1)
        await acting.tell(reply)
        await acting.hear()
        assert (await play(host, ASKED, "1", "1", max_turns=1)).ended_by == "turns"
        await until_async(lambda: not acting.keepers)


async def test_what_takes_long_to_close_does_not_hold_up_the_loader():
    async with hosted(f"{HERE}:Lingers") as host:
        said = await answered(host, "x")
    assert said == "42\n"


async def ran(host: EnvironmentHost, code: str, **limits: float) -> str:
    return await answered(host, json.dumps({"code": code, "limits": limits}))


async def test_files_of_a_sandbox_take_no_more_memory_than_its_trajectory_has():
    fill = FILL.format(folders=["/tmp"])  # noqa: S108 that of the sandbox
    async with hosted(f"{HERE}:Limitless", limits=LIMITS) as host:
        said = await ran(host, fill, max_file_bytes=1 << 40, own_s=600.0, cpu_s=600.0)
        status, _, written = said.partition(": ")
        assert status == "ok"
        assert 100 < int(written) < 300
        fill = FILL.format(folders=["/tmp", "/box"]) + "import time\ntime.sleep(1e6)"  # noqa: S108
        with pytest.raises(EnvironmentFailedError, match=r"more than environment\.memory_mb = 300"):
            await ran(host, fill, max_file_bytes=1 << 40, own_s=1e9, cpu_s=1e9)


async def test_absurd_limits_are_cut_or_refused_and_cost_no_line(caplog: pytest.LogCaptureFixture):
    whole = {"memory_bytes": 2**53, "max_processes": 2**53, "max_output_bytes": 2**53}
    code = "print(6 * 7)"
    async with hosted(f"{HERE}:Limitless", limits=LIMITS) as host:
        assert await ran(host, code, **whole, own_s=1e308, cpu_s=1e308, start_s=1e308) == "ok: 42\n"
        assert await ran(host, code, at_most=1e308, max_file_bytes=2**53) == "ok: 42\n"
        said = await ran(host, code, own_s=-1e308)
        assert said == "timeout: " or "the machine is too busy: in 0 s" in said
        assert "Expected `int` >= 0" in await ran(host, code, max_output_bytes=-5)
        assert "Expected `int`, got `float`" in await ran(host, code, memory_bytes=1.5)
        assert "Expected `float` <= 1" in await ran(host, code, own_s=float("inf"))
        memory = "x = bytearray(400 << 20)\nprint(len(x))"
        try:  # its sandbox notices, or whoever measures the trajectory
            said = await ran(host, memory, memory_bytes=2**53)
        except EnvironmentFailedError as error:
            said = str(error)
        assert "memory" in said
    assert "Traceback" not in caplog.text
