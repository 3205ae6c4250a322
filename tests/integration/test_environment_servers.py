"""Environments on servers, whose other hosts are this one: real sockets, keys and processes."""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq
import zmq.asyncio

from slipstream.generators.capture.server import CaptureServer
from slipstream.generators.environments.host import (
    EnvironmentFailedError,
    EnvironmentHost,
    EnvironmentLostError,
)
from slipstream.generators.environments.remote.link import EnvironmentServers, _Server
from slipstream.generators.environments.remote.messages import REVISION, identity_of
from slipstream.generators.environments.remote.proxy import PolicyProxy
from slipstream.generators.environments.remote.server import EnvironmentServer
from slipstream.generators.environments.rollout import TrajectoryOutcome, run_trajectory
from slipstream.generators.environments.turn_sampler import environments_of
from slipstream.generators.turns.calls import TrajectoryCalls
from slipstream.weightbus.net.curve import LeaderListener
from slipstream.wire.errors import ConfigError, PeerLostError
from slipstream.wire.files.keys import ClientKey
from slipstream.wire.process.ports import free_port
from slipstream.wire.settings.rendezvous import Address
from slipstream.wire.settings.sections import EnvironmentSection
from tests.integration.test_environments import HERE, LIMITS, PROMPT, ROOT, calls_at
from tests.support.waiting import HANG_S, until_async
from tests.unit.generators.capture.test_capture import Engine
from tests.unit.generators.turns.test_rendering import token_text

pytestmark = pytest.mark.integration


def a_key() -> ClientKey:
    public, secret = (one.decode() for one in zmq.curve_keypair())
    return ClientKey(name="envs", role="observer", public=public, secret=secret, broker=public)


KEY = a_key()


@dataclass
class Served:
    address: Address
    identity: str
    host: EnvironmentHost
    server: EnvironmentServer
    job: "asyncio.Task[None]"


@asynccontextmanager
async def serving(
    name: str, *, port: int = 0, most: int = 8, silence_s: float = HANG_S, **options: object
) -> AsyncIterator[Served]:
    address = Address("127.0.0.1", port or free_port())
    host = await EnvironmentHost.start(
        f"{HERE}:{name}",
        options,
        LIMITS,
        environment={"PATH": os.defpath, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
    )
    proxy = PolicyProxy()
    await proxy.start()
    context = zmq.asyncio.Context()
    listener = LeaderListener(f"tcp://{address}", KEY, setting="--listen")
    identity = identity_of(f"{HERE}:{name}", options)
    server = EnvironmentServer(host, proxy, identity=identity, most=most, silence_s=silence_s)
    async with AsyncExitStack() as to_close:
        to_close.push_async_callback(host.close)
        to_close.push_async_callback(proxy.close)
        to_close.callback(context.destroy, linger=0)
        opened = listener.open(context)
        to_close.callback(listener.close)
        job = asyncio.create_task(server.run(opened))
        to_close.push_async_callback(given_up, job)
        yield Served(address, identity, host, server, job)


@asynccontextmanager
async def linked(
    *served: Served | Address,
    key: ClientKey = KEY,
    identity: str = "",
    silence_s: float = HANG_S,
    patience_s: float = HANG_S,
) -> AsyncIterator[EnvironmentServers]:
    addresses = [one if isinstance(one, Address) else one.address for one in served]
    first = next((one.identity for one in served if isinstance(one, Served)), "")
    servers = await EnvironmentServers.start(
        addresses, key, identity=identity or first, silence_s=silence_s, patience_s=patience_s
    )
    try:
        yield servers
    finally:
        await servers.close()


async def played(
    servers: EnvironmentServers, says: Sequence[str], limits: Mapping[str, int] | None = None
) -> tuple[TrajectoryOutcome, TrajectoryCalls]:
    its = calls_at(Engine(list(says)), **(limits or {}))
    capture = CaptureServer(host="127.0.0.1", port=0, model="policy", token_text=token_text)
    await capture.start()
    try:
        found = await run_trajectory(servers, its, PROMPT, timeout_s=HANG_S, server=capture)
    finally:
        await capture.close()
    return found, its


async def test_turns_are_taken_as_on_one_host():
    async with serving("Guess") as served, linked(served) as servers:
        assert servers.version == served.host.version
        found, its = await played(servers, ["3", "9", "7"])
        assert (found.reward, found.rewards) == (0.5, [-0.25, -0.25, 1.0])
        assert its.conversation.branches == ()
        await until_async(lambda: not served.server.num_trajectories)


async def test_whether_it_may_reward_is_known_here():
    for name, expected in (("Tools", False), ("Guess", True)):
        async with serving(name) as served, linked(served) as servers:
            assert servers.may_reward is expected


@pytest.mark.parametrize(("name", "num_branches"), [("rollout", 1), ("asks_on_other_wires", 0)])
async def test_an_agent_there_reaches_the_policy_here(name: str, num_branches: int):
    async with serving(name) as served, linked(served) as servers:
        assert servers.drives_itself
        found, its = await played(servers, ["7", "yes"])
        assert (found.reward, found.parts) == (1.0, {"length": 1.0})
        assert len(its.conversation.branches) == num_branches


async def test_the_limit_and_the_reasons_of_failures_reach_the_other_side():
    async with serving("asks_on") as served, linked(served) as servers:
        found, _ = await played(servers, list("123456"), {"max_turns": 2})
        assert found.ended_by == "turns"
    async with serving("Raises") as served, linked(served) as servers:
        with pytest.raises(EnvironmentFailedError, match=r"ValueError: what is x\?"):
            await played(servers, ["x"])
    async with serving("Exits") as served, linked(served) as servers:
        with pytest.raises(EnvironmentFailedError, match="ended with code 7"):
            await played(servers, ["x"])


async def begun(served: Served, servers: EnvironmentServers) -> "asyncio.Task[object]":
    """Return a trajectory that has begun there."""
    task = asyncio.create_task(played(servers, ["x"]))
    await until_async(lambda: served.server.num_trajectories == 1)
    return task


async def test_trajectories_wait_for_room_and_one_that_is_given_up_leaves_nothing():
    async with serving("Hangs", most=1) as served, linked(served) as servers:
        before = len(psutil.Process().children(recursive=True))
        hanging = await begun(served, servers)
        waiting = asyncio.create_task(played(servers, ["x"]))
        servers._servers[0].room = 1  # another generator took it meanwhile
        servers._changed.set()
        await until_async(lambda: not servers._servers[0].room)
        assert not waiting.done()
        await given_up(hanging)
        await until_async(lambda: len(servers._servers[0].acting) == 1)
        await until_async(lambda: served.server.num_trajectories == 1)
        await given_up(waiting)
        await until_async(lambda: not served.server.num_trajectories)
        await until_async(lambda: len(psutil.Process().children(recursive=True)) <= before)


async def test_a_trajectory_that_is_ended_before_it_ran_holds_no_place():
    async with serving("Hangs", most=1) as served, linked(served) as servers:
        server = served.server
        await until_async(lambda: bool(server._clients))
        (client,) = server._clients.values()
        await server._open(client, 99)
        (one,) = client.trajectories.values()
        assert one.task is not None
        one.task.cancel()  # at once: the task has not begun
        await until_async(lambda: not server.num_trajectories)
        assert servers._servers[0].incarnation


def num_begun(server: _Server) -> int:
    """Return how many trajectories are known to have begun on a server."""
    return sum(one.opened.done() and one.opened.result() for one in server.acting.values())


async def given_up(*tasks: "asyncio.Task[object]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_without_a_server_trajectories_wait_for_one():
    port = free_port()
    first = AsyncExitStack()
    served = await first.enter_async_context(serving("Guess", port=port))
    async with first, linked(served) as servers:
        await first.aclose()
        servers._lost(servers._servers[0], "silent")
        waiting = asyncio.create_task(played(servers, ["7"]))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        async with serving("Guess", port=port):
            found, _ = await waiting
            assert found.reward == 1.0


async def test_a_server_with_other_options_is_refused():
    port = free_port()
    async with serving("Guess", port=port) as other:
        with pytest.raises(ConfigError, match=r"other options.*environment\.options"):
            async with linked(other, identity=identity_of("mine.py:Guess", {})):
                pass
    first = AsyncExitStack()
    served = await first.enter_async_context(serving("Hangs", port=port))
    async with first, linked(served) as servers:
        hanging = await begun(served, servers)
        await first.aclose()
        async with serving("Guess", port=port):
            with pytest.raises(EnvironmentLostError, match="it serves another environment"):
                await hanging
            waiting = asyncio.create_task(played(servers, ["7"]))
            await asyncio.sleep(0.2)
            assert not waiting.done(), "it is not used"
            await given_up(waiting)


async def test_a_server_of_another_revision_is_refused_with_both(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(f"{EnvironmentServer.__module__}.REVISION", REVISION - 1)
    reason = f"it speaks revision {REVISION - 1} of the protocol, expected {REVISION}: install"
    async with serving("Guess") as other:
        with pytest.raises(ConfigError, match=reason):
            async with linked(other):
                pass


def test_an_environment_is_the_same_wherever_its_file_lies():
    assert identity_of("/a/env.py:Env", {"a": 1, "b": 2}) == identity_of(
        "b/env.py:Env", {"b": 2, "a": 1}
    )
    assert identity_of("env.py:Env", {}) != identity_of("env.py:Other", {})


async def test_what_a_server_forgot_fails_here_once_it_is_heard_again():
    async with serving("Hangs", silence_s=1.5) as served, linked(served) as servers:
        hanging = await begun(served, servers)
        (server,) = servers._servers
        link, server._socket = server._socket, None  # nothing arrives for a while
        await until_async(lambda: not served.server._clients)
        server._socket = link
        with pytest.raises(EnvironmentLostError, match="no longer has this trajectory"):
            await hanging


async def test_trajectories_are_spread_and_a_server_that_is_gone_fails_its_own_alone():
    async with serving("Hangs") as one, serving("Hangs") as other, linked(one, other) as servers:
        await until_async(lambda: all(s.incarnation for s in servers._servers))
        # One that has not begun, as far as is known here, goes to the other server.
        while True:
            tasks = [asyncio.create_task(played(servers, ["x"])) for _ in range(4)]
            await until_async(lambda: sum(map(num_begun, servers._servers)) == 4)
            if num_begun(servers._servers[0]) == 2:
                break
            await given_up(*tasks)
            await until_async(lambda: not one.server.num_trajectories)
            await until_async(lambda: not other.server.num_trajectories)
        servers._lost(servers._servers[0], "silent")
        failed = [task for task in tasks if task.done()] or (
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        )[0]
        assert all("silent" in str(task.exception()) for task in failed)
        assert all(isinstance(task.exception(), EnvironmentLostError) for task in failed)
        assert other.server.num_trajectories == 2
        await given_up(*tasks)


async def test_a_server_that_was_restarted_has_lost_its_trajectories():
    port = free_port()
    first = AsyncExitStack()
    served = await first.enter_async_context(serving("Hangs", port=port))
    async with first, linked(served) as servers:
        hanging = await begun(served, servers)
        await first.aclose()
        async with serving("Hangs", port=port):
            with pytest.raises(EnvironmentLostError, match="it was restarted"):
                await hanging


async def test_a_generator_that_is_silent_has_lost_its_trajectories():
    async with serving("Hangs", silence_s=2.0) as served, linked(served) as servers:
        hanging = await begun(served, servers)
        for task in servers._tasks:  # it says nothing more
            task.cancel()
        await until_async(lambda: not served.server.num_trajectories)
        await given_up(hanging)


async def test_a_server_that_is_silent_for_as_long_as_the_setting_says_has_lost_its_trajectories(
    tmp_path: Path,
):
    key_file = tmp_path / "envs.key"
    key_file.write_bytes(msgspec.toml.encode(KEY))
    key_file.chmod(0o600)
    async with serving("Hangs") as served:
        section = EnvironmentSection(
            function=f"{HERE}:Hangs",
            servers=(str(served.address),),
            key_file=str(key_file),
            server_silence_s=1.5,
        )
        servers = await environments_of(section, hide=())
        assert isinstance(servers, EnvironmentServers)
        try:
            hanging = await begun(served, servers)
            served.job.cancel()  # it says nothing more
            with pytest.raises(EnvironmentLostError, match=r"silent for 1\.5 s"):
                await hanging
        finally:
            await servers.close()


async def test_without_the_key_nobody_is_served():
    async with serving("Guess") as served:
        with pytest.raises(PeerLostError, match=r"no environment server answers .*key_file"):
            async with linked(served, key=a_key(), patience_s=0.5):
                pass
