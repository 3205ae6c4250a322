"""The interpreter that a policy calls: its state, its limits, and what it cannot reach."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from slipstream.generators.environments.host import EnvironmentFailedError
from slipstream.generators.environments.tools.python import Interpreter
from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.trajectory import Json, Prompt
from tests.support.playing import heard, hosted, play, run
from tests.support.waiting import until_async

pytestmark = pytest.mark.integration
NAME = "slipstream.generators.environments.tools.python:WithPython"
ASKED = Prompt(prompt="compute")


def call(code: str) -> str:
    return "CALL " + json.dumps({"name": "python", "arguments": {"code": code}})


def results(*codes: str, secret: Path | None = None, **options: Json) -> list[str]:
    """Return what the tool says to each; nothing of it may be left afterwards."""
    said: list[str] = []

    async def test() -> None:
        said.extend(await _results(codes, options, secret))

    run(test())
    return said


async def _results(
    codes: Sequence[str], options: Mapping[str, Json], secret: Path | None
) -> list[str]:
    before = len(psutil.Process().children(recursive=True))
    variables = {"SECRET_KEY": "abc"}
    hide = [] if secret is None else [secret]
    async with hosted(NAME, options, variables=variables, hide=hide) as host:
        started = len(psutil.Process().children(recursive=True))
        outcome = await play(host, ASKED, *map(call, codes), "done")
        assert outcome.reward is None
        # Of what the trajectory started nothing is left, while the environment stays loaded.
        await until_async(lambda: len(psutil.Process().children(recursive=True)) <= started)
    await until_async(lambda: len(psutil.Process().children(recursive=True)) <= before)
    return [str(one) for one in heard(outcome, "tool")]


def test_state_is_kept_over_the_turns_of_a_trajectory():
    said = results(
        "import math\nx = 20\ndef double(n):\n    return 2 * n",
        "print('x is', x)\ndouble(x) + math.floor(2.5)",
        "1 / 0",
        "x",
    )
    assert said[0] == "(it printed nothing)"
    assert said[1] == "x is 20\n42"
    assert said[2].endswith("    1 / 0\n    ~~^~~\nZeroDivisionError: division by zero")
    assert "console" not in said[2]
    assert said[3] == "20"


def test_a_loop_that_never_ends_is_ended_and_its_state_is_lost():
    said = results("x = 1\nprint('begun')", "print('on')\nwhile True: pass", "x", "2", call_s=0.5)
    assert said[1] == (
        "on\nThe interpreter was ended: it took longer than 0.5 s. "
        "Its variables and functions are lost."
    )
    assert said[2].endswith("NameError: name 'x' is not defined")
    assert said[3] == "2"


def test_one_that_sleeps_or_waits_is_ended_as_well():
    said = results("import time\ntime.sleep(1000)", "input()", call_s=0.5)
    assert "it took longer than 0.5 s" in said[0]
    assert said[1].endswith("EOFError: EOF when reading a line")


def test_a_fork_bomb_is_ended_with_all_that_it_started():
    bomb = (
        "import os\nwhile True:\n    try:\n        os.fork()\n        os.setsid()\n"
        "    except OSError:\n        pass"
    )

    said = results(bomb, "6 * 7", call_s=5.0)
    assert "The interpreter was ended: it started too many processes." in said[0]
    assert said[1] == "42"


def test_of_much_output_the_begin_and_the_end_are_read_and_state_is_kept():
    said = results("x = 3\nprint('a' * 10_000_000 + 'end')", "x", max_output=100)
    assert said[0] == f"{'a' * 50}\n... 9999904 bytes are left out ...\n{'a' * 46}end"
    assert said[1] == "3"


def test_keys_files_network_and_environment_are_out_of_reach(tmp_path: Path):
    key = tmp_path / "run.key"
    key.write_text("secret")

    said = results(
        f"open({str(key)!r}).read()",
        "import os\nsorted(os.environ), os.path.exists('/etc/passwd')",
        "import socket\nsocket.create_connection(('127.0.0.1', 22), timeout=1)",
        "import os\nos.listdir('/proc/1/root')",
        "open('/usr/x', 'w')",
        "import pathlib\npathlib.Path('notes.txt').write_text('kept')",
        "pathlib.Path('notes.txt').read_text()",
        "import os\nos.kill(-1, 9)",
        secret=tmp_path,
    )
    assert said[0].endswith(f"FileNotFoundError: [Errno 2] No such file or directory: '{key}'")
    assert said[1] == "(['HOME', 'LANG', 'PATH'], False)"
    assert "OSError" in said[2] or "ConnectionRefusedError" in said[2]
    assert "PermissionError" in said[3]
    assert "OSError: [Errno 30] Read-only file system" in said[4]
    assert said[6] == "'kept'"


def test_memory_past_its_limit_is_an_error_or_the_end():
    said = results("x = [bytearray(1 << 20) for _ in range(900)]", "1", memory_mb=100)
    assert "MemoryError" in said[0] or "it took too much memory" in said[0]
    assert said[1] == "1"


def test_an_interpreter_that_ends_itself_is_started_anew():
    said = results("x = 1\nimport os\nos._exit(3)", "x", "import sys\nsys.exit(1)")
    assert "The interpreter was ended: it ended by itself." in said[0]
    assert said[1].endswith("NameError: name 'x' is not defined")
    assert said[2].endswith("SystemExit: 1")


def test_calls_of_a_trajectory_are_limited_in_number_and_in_time():
    said = results("1", "2", "3", max_calls=2)
    assert said == ["1", "2", "error: there are no more calls of python, after 2"]
    said = results("import time\ntime.sleep(9)", "1", total_s=0.5)
    assert "it took longer than 0.5 s" in said[0]
    assert said[1] == "error: there is no time left for python, after 0.5 s"


async def test_code_is_limited_in_size():
    interpreter = Interpreter()
    said = [await interpreter.python("#" * size) for size in (200_000, 131_072)]
    assert said == ["error: the code has 200000 bytes, at most 131072", "(it printed nothing)"]
    await interpreter.close()


async def test_a_trajectory_that_is_given_up_takes_its_interpreter_along():
    async with hosted(NAME) as host:
        before = len(psutil.Process().children(recursive=True))
        with pytest.raises(EnvironmentFailedError, match=r"environment\.timeout_s = 2"):
            await play(host, ASKED, call("import time\ntime.sleep(1000)"), timeout_s=2.0)
        await until_async(lambda: len(psutil.Process().children(recursive=True)) <= before)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"call_s": 0}, "call_s: expected more than 0, got 0"),
        ({"seconds": 1}, "unexpected keyword argument 'seconds'"),
        ({"sandbox": "wood"}, "sandbox: expected namespaces or none, got 'wood'"),
    ],
)
async def test_wrong_limits_are_refused_at_the_start(options: dict[str, Any], why: str):
    with pytest.raises(ConfigError, match=why):
        async with hosted(NAME, options):
            pass


async def test_calls_at_once_are_one_after_the_other_in_one_state():
    import asyncio

    interpreter = Interpreter()
    try:
        await interpreter.python("seen = []")
        calls = [interpreter.python(f"seen.append({number}); len(seen)") for number in range(8)]
        said = await asyncio.gather(*calls)
        assert said == [str(number) for number in range(1, 9)]
    finally:
        await interpreter.close()


def test_without_a_sandbox_there_are_limits_and_no_protection(tmp_path: Path):
    key = tmp_path / "run.key"
    key.write_text("not hidden")

    said = results(
        f"x = open({str(key)!r}).read()",
        "x",
        "import subprocess\nsubprocess.Popen(['sleep', '1000'], start_new_session=True).poll()",
        "while True: pass",
        "1",
        sandbox="none",
        call_s=0.5,
    )
    assert said[1] == "'not hidden'"
    assert "it took longer than 0.5 s" in said[3]
    assert said[4] == "1"
