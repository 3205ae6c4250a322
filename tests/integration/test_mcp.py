"""Tools of real MCP servers: started by the environment, or reached over HTTP."""

import importlib.util
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
from tests.support.playing import heard, hosted, play, run
from tests.support.waiting import until_async

pytestmark = pytest.mark.integration
NAME = "slipstream.generators.environments.adapters.mcp:WithServers"
HERE = Path(__file__).parent / "environments"
ASKED = Prompt(prompt="look")
spec = importlib.util.find_spec("mcp")
needs_mcp = pytest.mark.skipif(spec is None, reason="mcp is not installed: make test-slow")
NONSENSE = '{"type": "object", "properties": {"at": {"type": "nonsense"}}}'
LIBRARIES = [Path(spec.origin).parents[1]] if spec is not None and spec.origin else []


def started(*arguments: str, script: str = "mcp_server.py") -> dict[str, Json]:
    command = [sys.executable, str(HERE / script), *arguments]
    return {"command": command, "env": {"PYTHONPATH": ":".join(map(str, LIBRARIES))}}


def call(name: str, **arguments: Json) -> str:
    return "CALL " + json.dumps({"name": name, "arguments": arguments})


def processes() -> int:
    return len(psutil.Process().children(recursive=True))


async def results(*says: str, servers: dict[str, Json], **options: Json) -> list[str]:
    async with hosted(NAME, {"servers": servers, **options}, libraries=LIBRARIES) as host:
        before = processes()
        outcome = await play(host, ASKED, *says, "done")
        assert (outcome.reward, outcome.ended_by) == (None, "environment")
        await until_async(lambda: processes() <= before)
    return [str(one) for one in heard(outcome, "tool")]


@needs_mcp
async def test_tools_of_a_server_are_called_in_one_session():
    said = await results(
        call("note", text="a", times=2),
        call("note", text="b"),
        call("note", times=1),
        call("fail", why="so"),
        call("draw"),
        call("long", size=10_000_000),
        call("nothing"),
        servers={"toy": started()},
        max_result=100,
    )
    assert said[:2] == ["2", "3"]
    assert said[2].startswith("error: Error executing tool note: 1 validation err")
    assert said[3].startswith("error: ")
    assert said[3].endswith("so")
    assert said[4] == "(error: image/png of 6 bytes; only text can be read)"
    assert said[5] == f"{'a' * 50}\n... 9999903 characters are left out ...\n{'a' * 47}end"
    assert said[6].startswith("error: there is no tool nothing, only note, fail, draw")


@needs_mcp
async def test_schemas_are_those_of_the_server_and_some_tools_may_be_chosen():
    async with hosted(
        NAME, {"servers": {"toy": started()}, "only": ["note"]}, libraries=LIBRARIES
    ) as host:
        outcome = await play(host, ASKED, call("draw"), "done")
    assert heard(outcome, "tool") == ["error: there is no tool draw, only note"]


@needs_mcp
async def test_a_call_past_its_time_has_no_result_and_the_next_one_has():
    said = await results(
        call("sleep", seconds=30), call("note", text="a"), servers={"toy": started()}, call_s=1
    )
    assert said[0] == "error: sleep gave no result within 1 s"


@needs_mcp
async def test_a_server_that_ends_makes_the_trajectory_fail_and_leaves_nothing():
    async with hosted(NAME, {"servers": {"toy": started()}}, libraries=LIBRARIES) as host:
        before = processes()
        with pytest.raises(EnvironmentFailedError, match="MCP server 'toy' is gone"):
            await play(host, ASKED, call("leave"))
        await until_async(lambda: processes() <= before)


@needs_mcp
def test_a_server_is_reached_over_http():
    server = subprocess.Popen(
        [*started()["command"], "0"], env=started()["env"], stderr=subprocess.DEVNULL
    )

    def ports() -> list[int]:
        found = psutil.Process(server.pid).net_connections()
        return [one.laddr.port for one in found if one.status == psutil.CONN_LISTEN]

    async def test() -> None:
        await until_async(ports)
        far: dict[str, Json] = {"url": f"http://127.0.0.1:{ports()[0]}/mcp"}
        said = await results(call("note", text="a"), call("draw"), servers={"far": far})
        assert said == ["1", "(error: image/png of 6 bytes; only text can be read)"]

    try:
        run(test())
    finally:
        server.kill()
        server.wait()


@needs_mcp
@pytest.mark.parametrize(
    ("servers", "options", "why"),
    [
        (
            {"x": started(NONSENSE, script="mcp_liar.py")},
            {},
            "tool 'x': its schema is malformed: 'nonsense'",
        ),
        ({"x": started('{"type": "array"}', script="mcp_liar.py")}, {}, "Input should be 'object'"),
        ({"x": started("7", script="mcp_liar.py")}, {}, "MCP server 'x': "),
        ({"x": {"command": ["/no/such"]}}, {}, "MCP server 'x': .*No such file"),
        ({"x": {"command": ["sleep", "99"]}}, {"start_s": 1}, "does not answer within 1 s"),
        ({"x": {"url": "http://127.0.0.1:9/mcp"}}, {"start_s": 30}, "MCP server 'x': "),
        ({"x": {"command": "mcp"}}, {}, "servers.x.command: expected a list of words"),
        ({"x": {}}, {}, "servers.x: expected a table with command or url"),
        ({"x": {"url": "u", "key": "k"}}, {}, "servers.x: unknown key"),
        ({"x": started(), "y": started()}, {}, "another server has a tool of this name"),
        ({"x": started()}, {"only": ["dance"]}, "no server has a tool dance"),
        ({}, {}, "expected at least one"),
    ],
)
async def test_what_gives_no_tools_is_refused_at_the_start(
    servers: dict[str, Any], options: dict[str, Any], why: str
):
    before = processes()
    with pytest.raises(ConfigError, match=why):
        async with hosted(NAME, {"servers": servers, **options}, libraries=LIBRARIES):
            pass
    await until_async(lambda: processes() <= before)


async def test_without_the_library_the_extra_is_named():
    if importlib.util.find_spec("mcp") is not None:
        pytest.skip("it is installed")

    with pytest.raises(ConfigError, match=r"pip install 'slipstream\[env-mcp\]'"):
        async with hosted(NAME, {"servers": {}}):
            pass
