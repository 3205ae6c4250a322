"""Sessions of a real OpenEnv server."""

import asyncio
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from slipstream.generators.environments.host import EnvironmentFailedError
from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.trajectory import Json, Prompt
from tests.support.playing import heard, hosted, play, run
from tests.support.waiting import until

pytestmark = pytest.mark.integration
NAME = "slipstream.generators.environments.adapters.openenv:Remote"
SERVER = Path(__file__).parent / "environments" / "openenv_server.py"
ASKED = Prompt(prompt="Echo.", extra_info={"seed": 5})
spec = importlib.util.find_spec("openenv")
needs_openenv = pytest.mark.skipif(spec is None, reason="openenv is not installed: make test-slow")
LIBRARIES = [Path(spec.origin).parents[1]] if spec is not None and spec.origin else []
MESSAGE: dict[str, Json] = {"action": "message", "observation": "echoed_message"}


@contextmanager
def serving(sessions: int = 8) -> Iterator[str]:
    """Yield the URL of a server."""
    command = [sys.executable, str(SERVER), "0", str(sessions)]
    environment = {"PYTHONPATH": ":".join(map(str, LIBRARIES))}
    server = subprocess.Popen(command, env=environment)

    def ports() -> list[int]:
        found = psutil.Process(server.pid).net_connections()
        return [one.laddr.port for one in found if one.status == psutil.CONN_LISTEN]

    try:
        until(ports)
        yield f"http://127.0.0.1:{ports()[0]}"
    finally:
        server.kill()
        server.wait()


@needs_openenv
def test_an_episode_of_a_server_is_played():
    async def test(url: str) -> None:
        async with hosted(NAME, {"url": url, **MESSAGE}, libraries=LIBRARIES) as host:
            found = await play(host, ASKED, "hello", "much too long", "end")
        assert heard(found) == [
            "Echo.\n\nready 5",
            "hello",
            "That is no action that the environment takes.",
        ]
        assert (found.rewards, found.ended_by) == ([0.5, 0.0, 0.3], "environment")
        assert found.parts == {"unreadable": 1.0}

    with serving() as url:
        run(test(url))


@needs_openenv
def test_actions_and_observations_may_be_json():
    async def test(url: str) -> None:
        async with hosted(NAME, {"url": url}, libraries=LIBRARIES) as host:
            found = await play(host, ASKED, '{"message": "x"}', "x", '{"message": "end"}')
        assert heard(found)[1:] == [
            '{"echoed_message": "x", "inner": {"count": 1}}',
            "That is no action: expected one JSON object and nothing else.",
        ]

    with serving() as url:
        run(test(url))


@needs_openenv
def test_trajectories_have_sessions_of_their_own():
    async def test(url: str) -> None:
        options: dict[str, Json] = {"url": url, "action": "message", "observation": "inner.count"}
        async with hosted(NAME, options, libraries=LIBRARIES) as host:
            with pytest.raises(EnvironmentFailedError, match=r"'inner\.count' is not in the obs"):
                await play(host, ASKED, "a")
        options["observation"] = "inner"
        async with hosted(NAME, options, libraries=LIBRARIES) as host:
            several = [play(host, ASKED, "a", "b", "end") for _ in range(4)]
            for found in await asyncio.gather(*several):
                assert heard(found)[1:] == ['{"count": 1}', '{"count": 2}']

    with serving() as url:
        run(test(url))


@needs_openenv
def test_a_server_that_breaks_or_is_full_or_gone_fails_the_trajectory():
    async def test(url: str, server: Iterator[str]) -> None:
        async with hosted(NAME, {"url": url, **MESSAGE}, libraries=LIBRARIES) as host:
            with pytest.raises(EnvironmentFailedError, match=r"OpenEnv server .*it broke"):
                await play(host, ASKED, "crash")
            both = await asyncio.gather(
                *(play(host, ASKED, *["a"] * 20, "end") for _ in range(3)), return_exceptions=True
            )
            assert any(isinstance(one, EnvironmentFailedError) for one in both)
            server.close()
            with pytest.raises(EnvironmentFailedError, match=r"OpenEnv server .*ConnectionError"):
                await play(host, ASKED, "a")

    def urls() -> Iterator[str]:
        with serving(sessions=1) as url:
            yield url

    server = urls()
    run(test(next(server), server))


@needs_openenv
@pytest.mark.parametrize(
    ("url", "why"),
    [("http://127.0.0.1:9", "OpenEnv server http://127.0.0.1:9: "), ("x", "url: expected http://")],
)
async def test_a_server_that_is_not_there_is_refused_at_the_start(url: str, why: str):
    with pytest.raises(ConfigError, match=why):
        async with hosted(NAME, {"url": url}, libraries=LIBRARIES):
            pass


async def test_without_the_library_the_extra_is_named():
    if spec is not None:
        pytest.skip("it is installed")

    with pytest.raises(ConfigError, match=r"pip install 'slipstream\[env-openenv\]'"):
        async with hosted(NAME, {"url": "http://127.0.0.1:9"}):
            pass
