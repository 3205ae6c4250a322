import asyncio
import sys
from pathlib import Path

import psutil

from slipstream.broker.dashboard.advice_process import AdviceProcess, Expectation
from slipstream.deploy.main import make_parser
from tests.support.waiting import HANG_S

PRINTS = "import sys, json; print(json.dumps(sys.argv[1:]))"
FAILS = "import sys; print('first', file=sys.stderr); sys.exit('runs/x: has 2 learner steps')"
HANGS = "import time; time.sleep(1000)"


def expected(program: str, **options: float) -> AdviceProcess:
    return AdviceProcess(Path("runs/a b"), command=(sys.executable, "-c", program), **options)  # type: ignore[arg-type]


async def _known(one: AdviceProcess) -> Expectation:
    async with asyncio.timeout(HANG_S):
        while (found := one.ask()).state == "computing":  # noqa: ASYNC110 another process
            await asyncio.sleep(0.02)
    return found


async def test_it_is_computed_once_it_is_asked_for_and_kept():
    one = expected(PRINTS)
    assert one.ask().state == "computing"
    found = await _known(one)
    assert found.state == "known"
    assert bytes(found.advice) == b'["runs/a b", "--json"]\n'.strip()
    assert one.ask().state == "known"


async def test_an_old_one_is_computed_again():
    now_s = 0.0
    one = AdviceProcess(Path("r"), command=(sys.executable, "-c", PRINTS), now=lambda: now_s)
    await _known(one)
    now_s = 59.0
    assert (one.ask().state, one.ask().age_s) == ("known", 59.0)
    now_s = 61.0
    assert one.ask().state == "computing"
    await one.stop()


def test_why_there_is_none_is_said_in_the_command_s_last_line():
    found = asyncio.run(_known(expected(FAILS)))
    assert (found.state, found.reason) == ("failed", "runs/x: has 2 learner steps")
    assert "cannot be read" in asyncio.run(_known(expected("print('{')"))).reason


def test_a_command_that_is_not_there_is_no_error_of_the_page():
    found = asyncio.run(_known(AdviceProcess(Path("r"), command=("/no/such/program",))))
    assert "No such file" in found.reason


def test_one_that_never_ends_is_ended():
    found = asyncio.run(_known(expected(HANGS, longest_s=0.5)))
    assert found.reason == "it took more than 0.5 s"


async def test_nothing_is_left_of_one_under_way():
    one, before = expected(HANGS), set(psutil.Process().children())
    one.ask()
    async with asyncio.timeout(HANG_S):
        while not (children := set(psutil.Process().children()) - before):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    await one.stop()
    assert not any(child.is_running() for child in children)


def test_the_command_is_one_that_slipstream_has(tmp_path: Path):
    words = AdviceProcess(tmp_path)._command[3:]
    arguments = make_parser({words[0]}).parse_args(words)
    assert arguments.advise == tmp_path
    assert arguments.json
