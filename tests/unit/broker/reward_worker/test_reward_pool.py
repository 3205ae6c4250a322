"""The parts of the reward pool that need no process."""

import asyncio
import logging
import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from slipstream.broker.config import RewardSection, RewardTable
from slipstream.broker.reward_worker import slot as slot_module
from slipstream.broker.reward_worker.child import GuardedLink, Runner
from slipstream.broker.reward_worker.choice import RewardChoice
from slipstream.broker.reward_worker.messages import (
    CallOutcomes,
    Load,
    ScoreCall,
    from_child,
    to_child,
)
from slipstream.broker.reward_worker.queue import request_of
from slipstream.broker.reward_worker.slot import Slot, how_it_ended
from slipstream.broker.rewards.loading import load_function
from slipstream.broker.rewards.outcomes import FunctionInfo, RewardOutcome, unavailable
from slipstream.broker.rewards.sdk import Takes
from slipstream.broker.sandbox import child_process
from slipstream.broker.sandbox.child_process import ChildProcess
from slipstream.broker.sandbox.frames import Unframer, frame_of
from slipstream.broker.sandbox.output import OutputLog
from slipstream.broker.sandbox.process_table import (
    ProcessRow,
    children_by_parent,
    descendants,
    process_table,
    usage_of,
)
from slipstream.wire.errors import ProtocolError
from slipstream.wire.messages.broker import ScoringItem
from slipstream.wire.messages.trajectory import Prompt, Transcript
from tests.support.waiting import HANG_S


def pair(group_id: int, sibling: int, source: str = "") -> tuple[ScoringItem, Transcript]:
    item = ScoringItem(group_id=group_id, sibling=sibling, lease_id=0)
    prompt = Prompt(prompt="?", data_source=source)
    return item, Transcript(
        prompt=prompt, response=f"{sibling}", num_response_tokens=1, finish_reason="stop"
    )


def info(takes: Takes) -> FunctionInfo:
    return FunctionInfo(name="a:b", version="1", takes=takes)


def parts(takes: Takes) -> list[list[tuple[int, int]]]:
    work = [pair(2, 1), pair(1, 0), pair(2, 0)]
    request = request_of(work, RewardChoice(RewardSection()), [info(takes)])
    return [[(i.group_id, i.sibling) for i, _ in call.work] for call in request.waiting]


def test_answers_make_calls_as_their_function_takes_them():
    assert parts("answer") == [[(2, 1)], [(1, 0)], [(2, 0)]]
    assert parts("group") == [[(2, 0), (2, 1)], [(1, 0)]]
    assert parts("batch") == [[(2, 1), (1, 0), (2, 0)]]


def test_every_call_has_one_function():
    settings = RewardSection(sources={"code": RewardTable(function="c:d")})
    work = [pair(0, 0, "math"), pair(1, 0, "code"), pair(2, 0, "math")]
    request = request_of(work, RewardChoice(settings), [info("batch"), info("answer")])
    calls = [(c.function, [i.group_id for i, _ in c.work], c.divisible) for c in request.waiting]
    assert calls == [(0, [0, 2], True), (1, [1], False)]


def test_a_batch_splits_evenly_and_loses_nothing():
    for idle, sizes in [(1, [7]), (2, [3, 4]), (3, [2, 2, 3]), (7, [1] * 7), (9, [1] * 7)]:
        work = [pair(number, 0) for number in range(7)]
        (call,) = request_of(work, RewardChoice(RewardSection()), [info("batch")]).waiting
        split = call.split(idle)
        assert [len(part.work) for part in split] == sizes
        assert [p for part in split for p in part.work] == work
        assert not any(part.divisible for part in split)


def test_every_answer_of_a_call_gets_its_own_score():
    (call,) = request_of(
        [pair(4, 0), pair(4, 1)], RewardChoice(RewardSection()), [info("group")]
    ).waiting
    call.deliver([RewardOutcome(reward=1.0), unavailable("why")], info("group"))
    first, second = call.request.scores.get_nowait(), call.request.scores.get_nowait()
    assert (first.sibling, first.reward, first.excerpt) == (0, 1.0, "")
    assert (second.sibling, second.reward, second.unavailable, second.excerpt) == (
        1, None, "why", "1",
    )  # fmt: skip
    with pytest.raises(asyncio.QueueEmpty):
        call.request.scores.get_nowait()


# ---- messages ------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 5, 1000])
def test_frames_are_found_however_the_bytes_come(size: int):
    _, transcript = pair(0, 1)
    call = ScoreCall(call_id=7, function=0, transcripts=(transcript,))
    answered = CallOutcomes(call_id=7, outcomes=(RewardOutcome(reward=0.5, parts={"a": 1.0}),))
    stream = frame_of(call) + frame_of(answered)
    unframer = Unframer()
    bodies = [
        body
        for start in range(0, len(stream), size)
        for body in unframer.feed(stream[start : start + size])
    ]
    assert to_child.decode(bodies[0]) == call
    assert from_child.decode(bodies[1]) == answered
    assert len(bodies) == 2


def test_an_absurdly_long_frame_is_refused():
    with pytest.raises(ProtocolError, match="4294967295 bytes"):
        list(Unframer().feed(b"\xff\xff\xff\xff"))
    with pytest.raises(ProtocolError, match="a frame of 1073741825 bytes, at most 1073741824"):
        list(Unframer().feed((2**30 + 1).to_bytes(4, "big")))
    assert list(Unframer().feed((2**30).to_bytes(4, "big"))) == []


# ---- a child -------------------------------------------------------------------

FUNCTIONS = """
import asyncio

async def waits(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0.05)
    return 1.0

def has_a_loop(data_source, solution_str, ground_truth, extra_info):
    return asyncio.run(waits("", "", "", {})) + 1
"""


def test_a_function_that_is_not_async_never_runs_in_the_event_loop_of_those_that_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "two_functions.py"
    path.write_text(FUNCTIONS)
    functions = [load_function(f"{path}:{name}", {}) for name in ("waits", "has_a_loop")]
    ours, theirs = socket.socketpair()
    ours.settimeout(HANG_S)
    _, text = pair(0, 0)
    answers: list[tuple[int, float | None, str]] = []

    def worker() -> None:
        frames = Unframer()
        while len(answers) < 4:
            for body in frames.feed(ours.recv(1 << 16)):
                answer = from_child.decode(body)
                assert isinstance(answer, CallOutcomes)
                outcome = answer.outcomes[0]
                answers.append((answer.call_id, outcome.reward, outcome.unavailable))
        ours.shutdown(socket.SHUT_WR)

    with ours, ThreadPoolExecutor() as threads:
        for call_id, function in enumerate([0, 0, 1, 0]):  # there before the first has begun
            call = ScoreCall(call_id=call_id, function=function, transcripts=(text,))
            ours.sendall(frame_of(call))
        done = threads.submit(worker)
        load = Load(rewards=(), offered={}, timeout_s=HANG_S)
        link = GuardedLink(theirs)
        runner = Runner(link, load, functions)
        runner.serve()
        done.result()
        link.close()
        runner._asyncio().close()
    assert answers == [(0, 1.0, ""), (1, 1.0, ""), (2, 2.0, ""), (3, 1.0, "")]


# ---- what is printed -----------------------------------------------------------


def test_output_is_logged_at_a_bounded_rate_and_the_rest_is_counted(
    caplog: pytest.LogCaptureFixture,
):
    clock = [0.0]
    output = OutputLog("child", now=lambda: clock[0])
    line = b"x" * 99 + b"\n"
    with caplog.at_level(logging.INFO):
        for _ in range(1000):
            output.add(line * 1000)
            clock[0] += 0.001
        logged = sum(len(record.getMessage()) for record in caplog.records)
        assert 15_000 < logged < 25_000
        assert output.dropped_bytes > 99_900_000
        clock[0] += 60
        caplog.clear()
        output.add(b"again\n")
    first, last = (record.getMessage() for record in caplog.records)
    assert first == f"child printed {output.dropped_bytes} bytes more"
    assert last == "child printed: again"


def test_what_is_printed_cannot_control_a_terminal(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        OutputLog("child").add("\x1b[2Jhé\x00\u202e\n".encode() + b"\xff")
    assert caplog.messages == [
        r"child printed: \x1b[2Jhé\x00\u202e",
        "child printed: \N{REPLACEMENT CHARACTER}",
    ]


# ---- processes -----------------------------------------------------------------


def row(pid: int, parent: int, **changes: object) -> ProcessRow:
    plain = ProcessRow(pid, parent, "S", 1.0, 2, 0.0, 10)
    return plain._replace(**changes)


def test_descendants_are_all_that_a_process_has_started():
    table = {r.pid: r for r in [row(2, 1), row(3, 2), row(4, 3), row(5, 1), row(6, 2)]}
    family = descendants(2, children_by_parent(table))
    assert sorted(family) == [3, 4, 6]
    assert descendants(4, children_by_parent(table)) == []


def test_usage_adds_up_and_a_zombie_is_no_task_but_has_spent_its_time():
    table = {3: row(3, 2), 4: row(4, 3, state="Z", num_threads=1)}
    assert usage_of([3, 4, 99], table) == (2, 2.0, 20)


def test_the_table_knows_this_process():
    mine = process_table()[os.getpid()]
    assert mine.parent == os.getppid()
    assert mine.rss_bytes > 1 << 20
    assert mine.num_threads >= 1
    assert not mine.is_zombie


@pytest.mark.parametrize(
    ("jailed", "rows", "doomed"),
    [
        (True, [row(50, 1), row(51, 50), row(52, 51), row(60, 51), row(61, 60)], [60, 61]),
        (True, [row(50, 1), row(99, 1)], []),
        (True, [row(99, 1)], []),
        (False, [row(50, 1), row(52, 50), row(60, 50), row(99, 1)], [60]),
        (False, [row(99, 1)], []),
    ],
    ids=["jailed", "its init has ended", "it is gone", "kept", "its keeper is gone"],
)
def test_nothing_outside_of_a_child_is_killed_even_while_it_ends(
    jailed: bool, rows: list[ProcessRow], doomed: list[int]
):
    killed: list[int] = []
    child = child_process.ChildProcess("child", "none", lambda _: None, lambda _: None)
    child._process, child._jailed = SimpleNamespace(pid=50), jailed  # type: ignore[assignment]
    child._at_load = {52}
    table = {one.pid: one for one in [row(1, 0), row(2, 0), row(7, 1), *rows]}
    assert child.kill_left_behind(table, before_s=1e9, kill=killed.append) == len(doomed)
    assert killed == doomed
    child.measure(table)


def test_exit_code_is_described_in_words():
    for code, text in [
        (3, "ended with exit code 3"),
        (0, "ended with exit code 0"),
        (139, "was killed by SIGSEGV"),
        (-9, "was killed by SIGKILL"),
        (-1, "was killed by SIGHUP"),
        (255, "ended with exit code 255"),
        (None, "sent nonsense"),
    ]:
        assert how_it_ended(code) == text


@pytest.mark.parametrize("root", [0, -1])
def test_descendants_of_foreign_roots_are_refused(root: int):
    with pytest.raises(ValueError, match="no descendants that are ours"):
        descendants(root, {0: [1], 1: [os.getpid()]})


class UnstartableChild(ChildProcess):
    """A child that does not start, and whose end takes a while."""

    is_ending, may_end, has_ended = asyncio.Event(), asyncio.Event(), False

    async def start(self, **_: object) -> None:
        raise OSError("no process")

    async def _end(self, *, in_order: bool) -> None:  # noqa: ARG002 as there
        self.is_ending.set()
        await self.may_end.wait()
        type(self).has_ended = True


async def test_a_child_that_failed_to_start_is_ended_though_the_pool_closes_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(slot_module, "ChildProcess", UnstartableChild)
    slot = Slot(0, RewardSection(), lambda *_: None, lambda *_: None)
    load = Load(rewards=(), offered={}, timeout_s=1.0)
    starting = asyncio.create_task(slot.start(load, hide=(), environment={}))
    async with asyncio.timeout(HANG_S):
        await UnstartableChild.is_ending.wait()
        starting.cancel()
        await asyncio.sleep(0)
        UnstartableChild.may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await starting
    assert UnstartableChild.has_ended
