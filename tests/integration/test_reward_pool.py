"""Reward functions in real children: every shape, and whatever a trusted function may do wrong."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from msgspec import structs

from slipstream.broker.config import RewardSection, RewardTable, private_paths, redis_folder
from slipstream.broker.reward_worker.pool import RewardPool
from slipstream.broker.sandbox.child_process import ChildProcess
from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.broker import ScoringItem
from slipstream.wire.messages.trajectory import Prompt, Score, Transcript
from slipstream.wire.settings.load import Table, section
from slipstream.wire.settings.sections import run_section
from tests.support.bubblewrap import bubblewrap_works
from tests.support.processes import adopted_orphans
from tests.support.reward_work import score_all, work
from tests.support.waiting import HANG_S, until, until_async

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]
MARK = f"reward-pool-test-{os.getpid()}"  # in the arguments of what hostile functions start
# What a call may take where one is to take longer: on a slow machine the others may, too.
PATIENCES_S = (0.6, 6.0, 60.0)

REWARDS = """
import asyncio, ctypes, math, os, subprocess, sys, time
from slipstream.broker.rewards.sdk import Transcript, Unavailable, reward
import neighbor

def verl(data_source, solution_str, ground_truth, extra_info, *, bonus=0.0):
    return {"score": len(solution_str) + bonus, "six": 6}

async def verl_async(data_source, solution_str, ground_truth, extra_info, **kwargs):
    await asyncio.sleep(0)
    return len(solution_str) + kwargs.get("bonus", 0.0)

def by_position(source, answer, truth, extra):
    return len(answer)

@reward(version="2")
def answer(transcript: Transcript, *, bonus=0.0):
    return len(transcript.response) + bonus

@reward()
async def answer_async(transcript, bonus=0.0):
    await asyncio.sleep(0.001)
    return len(transcript.response) + bonus

@reward(takes="batch")
def batch(transcripts, *, bonus=0.0):
    return [{"score": len(t.response) + bonus, "size": len(transcripts)} for t in transcripts]

@reward(takes="batch")
async def batch_async(transcripts, *, bonus=0.0):
    await asyncio.sleep(0.001)
    return [len(t.response) + bonus for t in transcripts]

@reward(takes="group")
def group(transcripts, *, bonus=0.0):
    first = len(transcripts[0].response)
    return [{"score": len(t.response) + bonus, "first": first} for t in transcripts]

@reward(takes="batch")
def by_turn(transcripts):
    return [{"turn_rewards": [len(turn) for turn in t.turns[:2]]} for t in transcripts]

class Plain:
    def __init__(self, bonus=0.0):
        self.bonus = bonus
    def score(self, transcript):
        return len(transcript.response) + self.bonus

@reward(takes="group", version="seven")
class Grouped:
    def __init__(self, *, bonus=0.0):
        self.bonus = bonus
    async def score(self, transcripts):
        return [len(t.response) + self.bonus for t in transcripts]

class Closing:
    def __init__(self, path):
        self.path = path
    def score(self, transcript):
        return 1.0
    async def close(self):
        with open(self.path, "w") as file:
            file.write("closed")

def sandboxed(data_source, solution_str, ground_truth, extra_info, sandbox="?"):
    return {"score": 1.0, "none": float(sandbox == "none")}

def where(data_source, solution_str, ground_truth, extra_info):
    return neighbor.VALUE

def leave_a_daemon(twice):
    if os.fork() == 0:
        os.setsid()
        if not twice or os.fork() == 0:
            os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)", "MARK"])
        os._exit(0)

def fork_and_fork():
    for _ in range(8):  # a bomb that leaves something of the machine to other tests
        os.fork()
    time.sleep(600)

def faulty(data_source, solution_str, ground_truth, extra_info):
    match solution_str:
        case "sleeps": time.sleep(600)
        case "blocks signals":
            import signal
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            time.sleep(600)
        case "daemon": leave_a_daemon(False)
        case "daemon and sleeps": leave_a_daemon(False); time.sleep(600)
        case "setsid twice": leave_a_daemon(True); time.sleep(0.3)
        case "fork bomb": fork_and_fork()
        case "memory":
            kept = []
            while True: kept.append(bytearray(16 << 20)); time.sleep(0.02)
        case "child's memory":
            code = "x=[]\\nimport time\\nwhile 1: x.append(bytearray(16<<20)); time.sleep(.02)"
            subprocess.run([sys.executable, "-c", code, "MARK"])
        case "raises": raise ValueError("no number")
        case "nan": return math.nan
        case "prints":
            for _ in range(64): sys.stdout.write("x" * (4 << 20) + "\\n")
        case "closes 0-2": os.closerange(0, 3)
        case "closes all": os.closerange(0, 4096)
        case "closes all and sleeps": os.closerange(0, 4096); time.sleep(600)
        case "replaces all":
            null = os.open("/dev/null", os.O_RDWR)
            for fd in range(3, 1024):
                try: os.dup2(null, fd)
                except OSError: pass
        case "burns":
            while True: pass
        case "a child burns": subprocess.run([sys.executable, "-c", "while 1: pass", "MARK"])
        case "_exit": os._exit(3)
        case "_exit 0": os._exit(0)
        case "sys.exit": sys.exit(4)
        case "segfault": ctypes.string_at(0)
        case "returns twice": os.fork()
        case "kills its parent": os.kill(os.getppid(), 9); time.sleep(0.5)
        case "unavailable": raise Unavailable("the judge is busy")
        case "threads":
            import threading
            for _ in range(200):
                threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
            time.sleep(600)
        case "deep": return faulty_deep()
        case "interrupt": raise KeyboardInterrupt
    return len(solution_str)

def faulty_deep():
    return faulty_deep()

async def faulty_async(data_source, solution_str, ground_truth, extra_info):
    match solution_str:
        case "sleeps": await asyncio.sleep(600)
        case "will not be cancelled":
            while True:
                try: await asyncio.sleep(600)
                except asyncio.CancelledError: pass
        case "blocks": time.sleep(600)
        case "_exit": await asyncio.sleep(0.05); os._exit(3)
        case "raises": raise ValueError("no number")
        case "sys.exit": sys.exit(4)
        case _: await asyncio.sleep(0.2)
    return len(solution_str)

begun = running = 0

async def eight_at_a_time(data_source, solution_str, ground_truth, extra_info):
    global begun, running
    begun += 1
    running += 1
    at_once, others = running, -(-begun // 8) * 8
    while begun < others:
        await asyncio.sleep(0.005)
    running -= 1
    return {"score": 1.0, "at_once": at_once}

@reward(takes="batch")
def too_few(transcripts):
    return [1.0] * (len(transcripts) - 1)

@reward(takes="group")
def sleeps_in_a_group(transcripts):
    if any(t.response == "sleeps" for t in transcripts): time.sleep(600)
    return [1.0 for _ in transcripts]

def batch_results(transcripts, path, fault):
    with open(path, "a") as file:
        file.write(f"{len(transcripts)}\\n")
    if any(t.response == "bad" for t in transcripts):
        match fault:
            case "raises": raise ValueError("no number")
            case "too many": return [1.0] * (len(transcripts) + 1)
            case "_exit": os._exit(3)
            case "sleeps": return None
            case "unavailable": raise Unavailable("the judge is busy")
    return [1.0 for _ in transcripts]

@reward(takes="batch")
def batch_with_a_fault(transcripts, *, path, fault):
    results = batch_results(transcripts, path, fault)
    if results is None: time.sleep(600)
    return results

@reward(takes="batch")
async def async_batch_with_a_fault(transcripts, *, path, fault):
    results = batch_results(transcripts, path, fault)
    if results is None: await asyncio.sleep(600)
    return results

@reward(takes="group")
def group_with_a_fault(transcripts):
    return [math.nan if t.response == "bad" else 1.0 for t in transcripts]

def wide(data_source, solution_str, ground_truth, extra_info):
    return {"score": 1.0} | {f"m{n}": n for n in range(70)}

def slow(data_source, solution_str, ground_truth, extra_info, *, path=os.devnull):
    with open(path, "a") as file:
        file.write("x")
    time.sleep(0.02)
    return os.getpid()
""".replace("MARK", MARK)


@pytest.fixture(scope="module")
def rewards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "neighbor.py").write_text("VALUE = 42\n")
    path = folder / "mine.py"
    path.write_text(REWARDS)
    return path


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = set(psutil.Process().children(recursive=True))
    descriptors = psutil.Process().num_fds()
    with adopted_orphans():
        yield
        left = set(psutil.Process().children(recursive=True)) - before
    assert left == set(), "processes are left"
    assert marked() == [], "daemons are left"
    assert psutil.Process().num_fds() <= descriptors + 1, "descriptors are left"


ISOLATION = ["namespaces" if bubblewrap_works() else "none"]


@pytest.fixture(params=["namespaces", "none"])
def isolation(request: pytest.FixtureRequest) -> Iterator[str]:
    """reward.sandbox: under bubblewrap, and without."""
    if request.param == "namespaces" and not bubblewrap_works():
        pytest.skip("bubblewrap does not work here")
    ISOLATION.append(str(request.param))
    yield ISOLATION[-1]
    ISOLATION.pop()


def marked() -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if MARK in words and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def settings(rewards: Path, function: str, **changes: object) -> RewardSection:
    patient = {"timeout_s": HANG_S, "cpu_s": HANG_S, "sandbox": ISOLATION[-1]}
    return RewardSection(function=f"{rewards}:{function}", **(patient | changes))  # type: ignore[arg-type]


@asynccontextmanager
async def pool_of(section: RewardSection, hide: Sequence[Path] = ()) -> AsyncIterator[RewardPool]:
    pool = await RewardPool.start(section, hide=hide)
    try:
        yield pool
    finally:
        await pool.close()


def scored(
    section: RewardSection, *answers: str, groups: int = 1
) -> tuple[list[Score], RewardPool]:
    async def body() -> tuple[list[Score], RewardPool]:
        async with pool_of(section) as pool:
            return await score_all(pool, work(*answers, groups=groups)), pool

    return asyncio.run(body())


def scores_of(
    section: RewardSection, todo: list[tuple[ScoringItem, Transcript]], hide: Sequence[Path] = ()
) -> list[Score]:
    """Return the scores of answers that are more than texts."""

    async def body() -> list[Score]:
        async with pool_of(section, hide) as pool:
            return await score_all(pool, todo)

    return asyncio.run(body())


def scored_in_time(
    section: RewardSection, *answers: str, slow: Collection[str], groups: int = 1
) -> tuple[list[Score], RewardPool]:
    """Score answers of which only those that are slow take longer than reward.timeout_s."""
    for timeout_s in PATIENCES_S:
        section = structs.replace(section, timeout_s=timeout_s)
        scores, pool = scored(section, *answers, groups=groups)
        late = [one.unavailable.startswith("took longer") for one in scores]
        if not any(is_late and answers[i] not in slow for i, is_late in enumerate(late)):
            break
    return scores, pool


# ---- shapes --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "takes", "version"),
    [
        ("verl", "answer", ""),
        ("verl_async", "answer", ""),
        ("answer", "answer", "2"),
        ("answer_async", "answer", ""),
        ("batch", "batch", ""),
        ("batch_async", "batch", ""),
        ("group", "group", ""),
        ("Plain", "answer", ""),
        ("Grouped", "group", "seven"),
    ],
)
def test_every_shape_of_a_reward_scores_every_answer(
    rewards: Path, function: str, takes: str, version: str
):
    section = settings(rewards, function, options={"bonus": 0.5}, processes=2)
    answers = ["a", "bb", "ccc", "dddd", "eeeee"]
    scores, pool = scored(section, *answers, groups=2)
    assert [score.reward for score in scores] == [1.5, 2.5, 3.5, 4.5, 5.5]
    info = pool.functions[0]
    assert (info.name, info.takes) == (section.function, takes)
    assert info.version == version if version else len(info.version) == 12
    assert {(score.function, score.version) for score in scores} == {(info.name, info.version)}
    assert pool.needs_groups == (takes == "group")
    assert not pool.replaced
    if function == "group":
        assert [score.parts["first"] for score in scores] == [1, 2, 1, 2, 1]
    if function == "verl":
        assert scores[0].parts == {"score": 1.5, "six": 6.0}


def test_functions_go_by_data_source_and_a_file_sees_its_neighbors(rewards: Path):
    section = RewardSection(
        function=f"{rewards}:by_position",
        sources={
            "add": RewardTable(function=f"{rewards}:where"),
            "other": RewardTable(function=f"{rewards}:sandboxed"),
        },
        sandbox="none",
    )
    todo = work("a", "a", "aaa")
    for number, source in enumerate(["add", "other", "unknown"]):
        item, transcript = todo[number]
        prompt = Prompt(prompt="?", data_source=source)
        todo[number] = (
            item,
            Transcript(
                prompt=prompt,
                response=transcript.response,
                num_response_tokens=1,
                finish_reason="stop",
            ),
        )

    add, other, unknown = scores_of(section, todo)
    assert (add.reward, unknown.reward) == (42.0, 3.0)
    assert other.parts["none"] == 1.0, "reward.sandbox did not reach a function that names it"


def test_a_function_rewards_the_turns_that_it_is_shown(rewards: Path):
    texts: list[tuple[str, ...]] = [(), ("a", "bcd"), ("a", "b", "c")]
    todo = [
        (item, structs.replace(transcript, replies=replies))
        for (item, transcript), replies in zip(work("a", "-", "-"), texts, strict=True)
    ]

    plain, two, three = scores_of(settings(rewards, "by_turn"), todo)
    assert (plain.reward, plain.turn_rewards) == (1.0, (1.0,))
    assert (two.reward, two.turn_rewards) == (4.0, (1.0, 3.0))
    assert (three.reward, three.turn_rewards) == (None, ())
    assert three.unavailable == "invalid: turn_rewards has 2 numbers, the answer 3 turns"


@pytest.mark.parametrize(
    ("function", "options", "why"),
    [
        ("missing", {}, "has no attribute 'missing'"),
        ("verl", {"bonsu": 1}, r"reward\.options\.bonsu: .*:verl has no such argument; .*bonus"),
    ],
)
def test_what_cannot_be_loaded_is_a_clear_error(
    rewards: Path, function: str, options: dict[str, object], why: str
):
    with pytest.raises(ConfigError, match=why):
        scored(settings(rewards, function, options=options), "a")


def test_a_file_that_ends_the_process_while_it_is_loaded_is_a_clear_error(tmp_path: Path):
    (tmp_path / "ends.py").write_text("import os; os._exit(5)\n")
    with pytest.raises(ConfigError, match="ended with exit code 5 while it was loaded"):
        scored(RewardSection(function=f"{tmp_path / 'ends.py'}:score"), "a")


# ---- faults --------------------------------------------------------------------

FAULTS = [
    # answer, reason, why the child was replaced
    ("sleeps", r"took longer than reward\.timeout_s = \d", "timeout"),
    ("blocks signals", r"took longer than reward\.timeout_s = \d", "timeout"),
    ("fork bomb", r"killed: it had \d+ processes and threads, reward.max_processes", "processes"),
    ("threads", r"killed: it had \d+ processes and threads, reward.max_processes", "processes"),
    ("memory", r"killed: it used \d+ MB, reward.memory_mb = 300", "memory"),
    ("child's memory", r"killed: it used \d+ MB, reward.memory_mb = 300", "memory"),
    ("burns", r"killed: it used more than reward\.cpu_s = 0\.4", "cpu"),
    ("a child burns", r"killed: it used more than reward\.cpu_s = 0\.4", "cpu"),
    ("closes all", "killed: it closed the descriptors of its process", "broken"),
    ("closes all and sleeps", "killed: it closed|took longer", ""),
    ("replaces all", "killed: it closed the descriptors of its process", "broken"),
    ("_exit", "killed: its process ended with exit code 3", "died"),
    ("_exit 0", "killed: its process ended with exit code 0", "died"),
    ("segfault", "killed: its process was killed by SIGSEGV", "died"),
    ("raises", "raised ValueError: no number", None),
    ("nan", "invalid: returned nan", None),
    ("sys.exit", "raised SystemExit: 4", None),
    ("interrupt", "raised KeyboardInterrupt", None),
    ("deep", "raised RecursionError", None),
    ("unavailable", "^the judge is busy$", None),
    ("daemon", None, None),
    ("setsid twice", None, None),
    ("prints", None, None),
    ("closes 0-2", None, None),
    ("returns twice", None, None),
]


# What namespaces end or count, and what is to do it without them.
OF_PROCESSES = {
    *("blocks signals", "fork bomb", "threads", "child's memory", "a child burns"),
    *("replaces all", "_exit", "daemon", "setsid twice", "returns twice"),
}


@pytest.mark.parametrize(
    ("isolation", "answer", "reason", "fault"),
    [
        pytest.param(isolation, *fault, id=f"{fault[0]}-{isolation}")
        for isolation in ("namespaces", "none")
        for fault in FAULTS
        if isolation == "namespaces" or fault[0] in OF_PROCESSES
    ],
    indirect=["isolation"],
)
@pytest.mark.usefixtures("isolation")
def test_a_fault_costs_its_own_answer_and_nothing_else(
    rewards: Path, answer: str, reason: str | None, fault: str | None
):
    section = settings(
        rewards,
        "faulty",
        processes=1,
        cpu_s=0.4 if "burns" in answer else HANG_S,
        memory_mb=300 if "memory" in answer else 4096,
        max_processes=40,
    )
    answers = ("before", answer, "after", "last one")
    if "sleeps" in answer or "signals" in answer:
        scores, pool = scored_in_time(section, *answers, slow=[answer])
    else:
        scores, pool = scored(section, *answers)
    before, faulty, after, last = scores
    assert (before.reward, after.reward, last.reward) == (6.0, 5.0, 8.0)
    if reason is None:
        assert faulty.reward == len(answer)
    else:
        assert faulty.reward is None
        assert re.search(reason, faulty.unavailable), faulty.unavailable
        assert faulty.excerpt == answer
    if fault != "":
        assert pool.replaced == ({fault: 1} if fault else {})


@pytest.mark.usefixtures("isolation")
async def test_daemons_are_killed_after_the_call_and_not_only_at_the_end(rewards: Path):
    async with pool_of(settings(rewards, "faulty")) as pool:
        await score_all(pool, work("setsid twice", "a"))
        await until_async(lambda: pool.left_behind > 0 and not marked())
        assert (await score_all(pool, work("a")))[0].reward == 1.0
        assert pool.left_behind >= 1


def test_a_function_that_prints_gigabytes_fills_neither_memory_nor_the_log(
    rewards: Path, caplog: pytest.LogCaptureFixture
):
    process = psutil.Process()
    before = process.memory_info().rss
    with caplog.at_level("INFO"):
        scored(settings(rewards, "faulty"), *["prints"] * 4)
    assert sum(len(record.getMessage()) for record in caplog.records) < 100_000
    assert "bytes more" in caplog.text
    assert process.memory_info().rss - before < 64 << 20


@pytest.mark.parametrize(
    ("answer", "reason", "fault"),
    [
        ("sleeps", "took longer", None),
        ("will not be cancelled", "took longer", "timeout"),
        ("_exit", "killed: its process ended with exit code 3", "died"),
        ("raises", "raised ValueError", None),
        ("sys.exit", "raised SystemExit", None),
    ],
)
def test_an_async_function_that_fails_does_not_harm_those_that_run_beside_it(
    rewards: Path, answer: str, reason: str, fault: str | None
):
    section = settings(rewards, "faulty_async")
    answers = ["a"] * 5 + [answer] + ["a"] * 5
    scores, pool = scored_in_time(section, *answers, slow=[answer])
    assert [score.reward for score in scores] == [1.0] * 5 + [None] + [1.0] * 5
    assert reason in scores[5].unavailable
    # A call that dies beside others may not be to blame: it is run again alone.
    assert sum(pool.replaced.values()) in {None: {0}, "timeout": {1}, "died": {1, 2}}[fault]


def test_async_answers_of_one_child_run_at_the_same_time(rewards: Path):
    section = settings(rewards, "eight_at_a_time", concurrency=8)
    scores, _ = scored(section, *["a"] * 16)  # none of them ends before eight have begun
    assert max(score.parts["at_once"] for score in scores) == 8


def test_a_batch_that_never_has_the_right_number_of_results_is_invalid(rewards: Path):
    scores, pool = scored(settings(rewards, "too_few"), "a", "b", "c")
    assert {score.unavailable for score in scores} == {"invalid: returned 0 results for 1 answers"}
    assert not pool.replaced


@pytest.mark.parametrize(
    ("function", "fault", "reason"),
    [
        ("batch_with_a_fault", "raises", "raised ValueError: no number"),
        ("batch_with_a_fault", "too many", "invalid: returned more than 1 results for 1 answers"),
        ("batch_with_a_fault", "_exit", "killed: its process ended with exit code 3"),
        ("batch_with_a_fault", "sleeps", "took longer than reward.timeout_s = "),
        ("async_batch_with_a_fault", "raises", "raised ValueError: no number"),
        ("async_batch_with_a_fault", "_exit", "killed: its process ended with exit code 3"),
        ("async_batch_with_a_fault", "sleeps", "took longer than reward.timeout_s = "),
    ],
)
def test_a_bad_answer_in_a_batch_costs_its_neighbors_nothing(
    rewards: Path, tmp_path: Path, function: str, fault: str, reason: str
):
    for timeout_s in PATIENCES_S if fault == "sleeps" else [HANG_S]:
        path = tmp_path / f"calls-{timeout_s}"
        options = {"path": str(path), "fault": fault}
        section = settings(rewards, function, options=options, timeout_s=timeout_s)
        scores, _ = scored(section, *["a"] * 5, "bad", "a", "a")
        calls = [int(line) for line in path.read_text().split()]
        if sorted(calls) == [1] * 8 + [8]:
            break
    assert sorted(calls) == [1] * 8 + [8]
    assert [score.reward for score in scores] == [1.0] * 5 + [None, 1.0, 1.0]
    assert scores[5].unavailable.startswith(reason)


def test_a_batch_of_bad_answers_makes_one_call_more_than_it_has_answers(
    rewards: Path, tmp_path: Path
):
    options = {"path": str(tmp_path / "calls"), "fault": "raises"}
    section = settings(rewards, "batch_with_a_fault", options=options)
    scores, _ = scored(section, *["bad"] * 11)
    (reason,) = {score.unavailable for score in scores}
    assert reason.startswith("raised ValueError: no number (")
    assert len((tmp_path / "calls").read_text().split()) == 11 + 1


@pytest.mark.parametrize("pause_s", [0.0, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032])
async def test_a_child_that_is_ended_while_it_starts_leaves_nothing(isolation: str, pause_s: float):
    module = "slipstream.broker.reward_worker.child"
    child = ChildProcess("child", module, lambda _: None, lambda _: None)
    await child.start(jailed=isolation == "namespaces", hide=(), environment={})
    await asyncio.sleep(pause_s)
    await child.end()


def test_unavailable_batch_is_not_retried(rewards: Path, tmp_path: Path):
    options = {"path": str(tmp_path / "calls"), "fault": "unavailable"}
    section = settings(rewards, "batch_with_a_fault", options=options)
    scores, _ = scored(section, "a", "bad", "a")
    assert [score.unavailable for score in scores] == ["the judge is busy"] * 3
    assert (tmp_path / "calls").read_text() == "3\n"


def test_a_group_in_which_one_answer_has_no_reward_has_none(rewards: Path):
    scores, _ = scored(settings(rewards, "group_with_a_fault"), "a", "b", "bad", "c", groups=2)
    assert [score.reward for score in scores] == [None, 1.0, None, 1.0]
    assert {scores[0].unavailable, scores[2].unavailable} == {
        "answer 2 of 2: invalid: returned nan"
    }


def test_parts_past_the_limit_are_left_out_with_one_warning(
    rewards: Path, caplog: pytest.LogCaptureFixture
):
    scores, _ = scored(settings(rewards, "wide"), "a", "b", "c")
    assert [(score.reward, len(score.parts)) for score in scores] == [(1.0, 64)] * 3
    lines = [line for line in caplog.messages if "parts" in line]
    assert lines == [
        f"reward function {rewards}:wide returned 71 parts, only the first 64 are kept"
    ]


def test_a_group_that_hangs_is_lost_and_other_groups_are_not(rewards: Path):
    section = settings(rewards, "sleeps_in_a_group")
    late = ["sleeps", "c"]  # one group
    scores, _ = scored_in_time(section, "a", "sleeps", "b", "c", slow=late, groups=2)
    assert [score.reward for score in scores] == [1.0, None, 1.0, None]


async def test_a_batch_is_split_among_idle_children(rewards: Path):
    async with pool_of(settings(rewards, "batch", processes=3)) as pool:
        await until_async(lambda: all(slot.is_idle for slot in pool._slots))
        found = await score_all(pool, work(*["a"] * 8))
    sizes = sorted(score.parts["size"] for score in found)
    assert sizes == [2.0, 2.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0]


def test_callers_take_turns(rewards: Path):
    finished: list[str] = []

    async def ask(pool: RewardPool, name: str, count: int) -> None:
        await score_all(pool, work(*["a"] * count))
        finished.append(name)

    async def body() -> None:
        async with pool_of(settings(rewards, "slow", processes=1)) as pool:
            await asyncio.gather(ask(pool, "long", 40), ask(pool, "short", 3))

    asyncio.run(body())
    assert finished == ["short", "long"]


async def test_a_caller_that_leaves_gives_up_what_has_not_begun(rewards: Path, tmp_path: Path):
    calls = tmp_path / "calls"

    section = settings(rewards, "slow", options={"path": str(calls)})
    async with pool_of(section) as pool:
        scores = pool.score(work(*["a"] * 200))
        await anext(scores)
        await scores.aclose()  # type: ignore[attr-defined]  # it is a generator
        (score,) = await score_all(pool, work("b"))
    assert score.reward is not None
    assert len(calls.read_text()) < 100, "it waited for answers that are not wanted"


async def test_closing_answers_everything_that_waits(rewards: Path):
    pool = await RewardPool.start(settings(rewards, "faulty"))
    asking = asyncio.create_task(score_all(pool, work("sleeps", "a", "b")))
    await until_async(lambda: pool._slots[0].running)
    await pool.close()
    scores = await asking
    assert [score.unavailable for score in scores] == ["the reward pool was closed"] * 3


def test_a_class_is_closed_with_the_pool(rewards: Path, tmp_path: Path):
    section = settings(rewards, "Closing", options={"path": str(tmp_path / "closed")})
    assert scored(section, "a")[0][0].reward == 1.0
    assert (tmp_path / "closed").read_text() == "closed"


def test_model_written_code_runs_in_a_sandbox_below_the_child(isolation: str):
    section = RewardSection(function="slipstream.broker.rewards.code:score", sandbox=isolation)  # type: ignore[arg-type]
    todo = work("```python\nprint(int(input()) + 1)\n```", "```python\nprint(0)\n```")
    truth = {"inputs": ["1\n"], "outputs": ["2\n"]}
    todo = [
        (item, structs.replace(text, prompt=structs.replace(text.prompt, ground_truth=truth)))
        for item, text in todo
    ]

    right, wrong = scores_of(section, todo)
    assert (right.reward, wrong.reward) == (1.0, 0.0), (right, wrong)


FRAGILE = """
import os
if os.path.exists(f"{__file__}.broken"):
    raise RuntimeError("not now")
def score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "ends":
        os._exit(3)
    return 1.0
"""


@pytest.mark.parametrize("mended", [True, False])
async def test_answers_wait_while_no_child_can_be_started_and_not_for_ever(
    tmp_path: Path, mended: bool
):
    (tmp_path / "fragile.py").write_text(FRAGILE)
    broken = tmp_path / "fragile.py.broken"

    timeout_s = HANG_S if mended else 2.0
    section = RewardSection(function=f"{tmp_path}/fragile.py:score", timeout_s=timeout_s)
    async with pool_of(section) as pool:
        broken.touch()
        await score_all(pool, work("ends"))
        began_s = time.monotonic()
        asking = asyncio.create_task(score_all(pool, work("a", "b")))
        await until_async(lambda: pool._slots[0].failures > 0)
        if mended:
            broken.unlink()
        scores, took_s = await asking, time.monotonic() - began_s
    if mended:
        assert [score.reward for score in scores] == [1.0, 1.0]
    else:
        assert "cannot be loaded" in scores[0].unavailable
        assert "RuntimeError: not now" in scores[0].unavailable
        assert took_s >= 2.0


WORKER = """
import asyncio, sys
from slipstream.broker.config import RewardSection
from slipstream.broker.reward_worker.pool import RewardPool
from tests.support.reward_work import score_all, work

async def main():
    pool = await RewardPool.start(
        RewardSection(function=sys.argv[1], processes=2, timeout_s=600, sandbox=sys.argv[2])
    )
    await score_all(pool, work("daemon", "setsid twice", "a"))
    print("ready", flush=True)
    await score_all(pool, work("daemon and sleeps", "sleeps"))

asyncio.run(main())
"""


def test_nothing_is_left_of_a_worker_that_is_killed(rewards: Path, isolation: str):
    command = [sys.executable, "-c", WORKER, f"{rewards}:faulty", isolation]
    worker = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    assert worker.stdout.readline() == "ready\n"
    until(marked, "the daemon did not start")
    family = psutil.Process(worker.pid).children(recursive=True) + marked()
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    worker.stdout.close()
    _, alive = psutil.wait_procs(family, timeout=HANG_S)
    assert alive == []


def test_a_key_file_is_not_seen_where_namespaces_work(tmp_path: Path):
    if not bubblewrap_works():
        pytest.skip("bubblewrap does not work here")
    key = tmp_path / "worker.key"
    key.write_text("secret")
    (tmp_path / "reads.py").write_text(
        f"def score(d, s, g, e): return len(open({str(key)!r}).read())\n"
    )

    section = RewardSection(function=f"{tmp_path / 'reads.py'}:score")
    rewards = [scores_of(section, work("a"), hide)[0].reward for hide in ([], [key])]
    assert rewards == [6.0, 0.0]
    assert key.read_text() == "secret"


async def test_a_folder_of_keys_that_is_made_later_is_not_seen_either(tmp_path: Path):
    if not bubblewrap_works():
        pytest.skip("bubblewrap does not work here")
    keys = tmp_path / "runs" / "keys"
    (tmp_path / "lists.py").write_text(
        f"import os\ndef score(d, s, g, e): return len(os.listdir({str(keys)!r}))\n"
    )

    section = RewardSection(function=f"{tmp_path / 'lists.py'}:score")
    async with pool_of(section, hide=[keys, tmp_path / "none.key"]) as pool:
        (keys / "broker.key").write_text("secret")
        found = (await score_all(pool, work("a")))[0]
    assert found.reward == 0.0
    assert keys.stat().st_mode & 0o777 == 0o700
    assert not (tmp_path / "none.key").exists()


REACHES = """
import os, pathlib, socket, tempfile

def score(data_source, solution_str, ground_truth, extra_info):
    reached = 0.0
    try:
        with socket.socket(socket.AF_UNIX) as broker:
            broker.connect(PATH)
            reached = 1.0
    except OSError:
        pass
    with tempfile.TemporaryFile() as file:
        file.write(b"room")
    truths = len(list(pathlib.Path(STORE).iterdir()))
    secret = float(os.environ.get("WANDB_API_KEY") == "w")
    return {"score": 1.0, "reached": reached, "truths": truths, "secret": secret,
            "judge": float(os.environ.get("JUDGE_KEY") == "j")}
"""


def test_a_reward_function_is_no_other_role(short_folder: Path, monkeypatch: pytest.MonkeyPatch):
    """The broker's socket accepts any process of this user, even a learner that takes over."""
    monkeypatch.setenv("WANDB_API_KEY", "w")
    monkeypatch.setenv("JUDGE_KEY", "j")
    table: Table = {
        "run": {"name": "r", "dir": str(short_folder / "runs")},
        "reward": {
            "function": f"{short_folder / 'reaches.py'}:score",
            "environment": ["JUDGE_KEY"],
        },
    }
    run = run_section(table)
    run.make_socket_folder()
    redis_folder(run).mkdir(mode=0o700)
    (redis_folder(run) / "appendonly.aof").write_text("42")
    (short_folder / "reaches.py").write_text(
        f"PATH = {str(run.socket('broker'))!r}\nSTORE = {str(redis_folder(run))!r}\n{REACHES}"
    )

    with socket.socket(socket.AF_UNIX) as broker:
        broker.bind(str(run.socket("broker")))
        broker.listen()
        settings = section(table, "reward", RewardSection)
        (score,) = scores_of(settings, work("a"), private_paths(table))
    hidden = bubblewrap_works()
    expected = {"reached": 0.0 if hidden else 1.0, "truths": 0.0 if hidden else 1.0}
    assert score.parts == {"score": 1.0, **expected, "secret": 0.0, "judge": 1.0}, score.unavailable
