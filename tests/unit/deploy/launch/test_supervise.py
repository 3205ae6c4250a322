"""The supervisor over short real children. Its clock is ours; its children end by themselves."""

import dataclasses
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from slipstream.deploy.launch.plan import RolePlan
from slipstream.deploy.launch.starters import LocalStarter, RoleProcess
from slipstream.deploy.launch.supervise import Supervisor
from slipstream.wire.errors import ChildDiedError, ConfigError
from slipstream.wire.process.command_line import EXIT_SUPERSEDED
from tests.support.clock import Clock


class ImpatientTime(Clock):
    """Every reading of it takes a second."""

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


class StandsStill(ImpatientTime):
    """Passes only when something has happened, however long that takes."""

    def __init__(self, *, until: Callable[[], bool]) -> None:
        super().__init__()
        self._until = until

    def __call__(self) -> float:
        return super().__call__() if self._until() else self.now_s


def make_supervisor(folder: Path, time: Clock, max_restarts: int = 1) -> Supervisor:
    scratch = folder / "scratch"
    scratch.mkdir()
    return Supervisor(
        logs=folder,
        start_process=LocalStarter(scratch).start,
        max_restarts=max_restarts,
        window_s=60.0,
        backoff_s=5.0,
        stop_timeout_s=3.0,
        now=time,
    )


@pytest.fixture
def time() -> Clock:
    return Clock()


@pytest.fixture
def supervisor(tmp_path: Path, time: Clock) -> Iterator[Supervisor]:
    supervisor = make_supervisor(tmp_path, time)
    yield supervisor
    supervisor.now = ImpatientTime()
    supervisor.stop()


def plan(code: str, *, name: str = "worker", again: tuple[str, ...] = ()) -> RolePlan:
    return RolePlan(name, (sys.executable, "-S", "-c", code), again)


def process_of(supervisor: Supervisor, name: str = "worker") -> RoleProcess:
    process = supervisor.children[name].process
    assert process is not None
    return process


def wait(supervisor: Supervisor, name: str = "worker") -> int:
    process = process_of(supervisor, name)
    if process.poll() is None:  # it may have been waited for
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    return process.pid


def restart(supervisor: Supervisor, time: Clock) -> None:
    """Notice what has ended, and start it again after its pause."""
    supervisor.check()
    time.passes(6.0)
    supervisor.check()


def until_printed(log: Path, text: str, pid: int) -> None:
    """Return once a child that is alive has printed ``text``."""
    while text not in log.read_text():
        os.kill(pid, 0)


def test_a_role_that_ends_in_order_is_finished(supervisor: Supervisor):
    supervisor.start(plan("pass"))
    assert not supervisor.finished(["worker"])
    wait(supervisor)
    supervisor.check()
    assert supervisor.finished(["worker"])


def test_a_role_that_fails_starts_again_after_a_pause_and_then_ends_the_run(
    supervisor: Supervisor, time: Clock
):
    supervisor.start(plan("print('reading', flush=True); raise SystemExit('no engine here')"))
    first = wait(supervisor)
    supervisor.check()
    time.now_s = 4.9
    supervisor.check()
    assert process_of(supervisor).pid == first
    time.now_s = 5.0
    supervisor.check()
    assert wait(supervisor) != first
    with pytest.raises(ChildDiedError, match=r"worker ended with code 1 \(failure 2\)") as caught:
        supervisor.check()
    log = supervisor.children["worker"].log_file
    assert str(log) in str(caught.value)
    assert str(caught.value).endswith("    reading\n    no engine here")


def test_the_pause_doubles_with_each_failure(tmp_path: Path, time: Clock):
    supervisor = make_supervisor(tmp_path, time, max_restarts=3)
    supervisor.start(plan("raise SystemExit(7)"))
    pauses = []
    for _ in range(3):
        wait(supervisor)
        supervisor.check()
        due_s = supervisor.children["worker"].restart_at_s
        assert due_s is not None
        pauses.append(due_s - time.now_s)
        time.now_s = due_s
        supervisor.check()
    wait(supervisor)
    supervisor.stop()
    assert pauses == [5.0, 10.0, 20.0]


def test_failures_of_long_ago_are_forgiven(tmp_path: Path, time: Clock):
    supervisor = make_supervisor(tmp_path, time, max_restarts=1)
    supervisor.start(plan("raise SystemExit(7)"))
    for _ in range(3):
        wait(supervisor)
        supervisor.check()
        due_s = supervisor.children["worker"].restart_at_s
        assert due_s == time.now_s + 5.0
        time.now_s += 70.0
        supervisor.check()
    wait(supervisor)
    supervisor.stop()


def test_a_role_whose_place_was_taken_is_not_started_again(supervisor: Supervisor):
    supervisor.start(plan(f"raise SystemExit({EXIT_SUPERSEDED})", name="broker"))
    wait(supervisor, "broker")
    with pytest.raises(ChildDiedError, match="broker ended with code 3"):
        supervisor.check()


def test_one_of_many_whose_name_was_taken_is_left_out(
    supervisor: Supervisor, caplog: pytest.LogCaptureFixture
):
    taken = plan(f"raise SystemExit({EXIT_SUPERSEDED})", name="generator-0")
    supervisor.start(dataclasses.replace(taken, is_one_of_many=True))
    wait(supervisor, "generator-0")
    with caplog.at_level("WARNING"):
        supervisor.check()
        supervisor.check()
    assert supervisor.finished(["generator-0"])
    assert supervisor.left_out("generator-0")
    assert [r.message.partition(":")[0] for r in caplog.records] == ["generator-0 ends"]


def test_role_that_serves_others_is_restarted_however_it_ended(supervisor: Supervisor, time: Clock):
    code = "import sys; print(sys.argv[1:], flush=True)"
    ends = dataclasses.replace(plan(code, again=("--restarted",), name="b"), serves_others=True)
    supervisor.start(ends)
    wait(supervisor, "b")
    supervisor.check()
    assert not supervisor.finished(["b"])
    time.now_s += 6.0
    supervisor.check()
    wait(supervisor, "b")
    assert (supervisor.logs / "b.log").read_text().splitlines() == ["[]", "['--restarted']"]


def test_a_role_that_was_killed_is_reported_by_the_signal(tmp_path: Path, time: Clock):
    supervisor = make_supervisor(tmp_path, time, max_restarts=0)
    kill_myself = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    supervisor.start(plan(kill_myself))
    wait(supervisor)
    with pytest.raises(ChildDiedError, match="worker was killed by SIGKILL"):
        supervisor.check()


REFUSES = """
import contextlib, os
from slipstream.wire.errors import ConfigError
from slipstream.wire.process.command_line import refuse_settings
code = refuse_settings(ConfigError("learner.lr: expected a number, got 'fast'"))
with contextlib.suppress(OSError):
    os.write(2, b"a library ends too")
raise SystemExit(code)
"""


@pytest.mark.parametrize("log", ["of libraries too", "on a full disk"])
def test_the_reason_of_a_role_that_refuses_its_settings_needs_no_log(
    supervisor: Supervisor, tmp_path: Path, log: str
):
    if log == "on a full disk":
        (tmp_path / "worker.log").symlink_to("/dev/full")
    supervisor.start(RolePlan("worker", (sys.executable, "-c", REFUSES), ()))
    wait(supervisor)
    with pytest.raises(ConfigError, match=r"^worker: learner.lr: expected a number, got 'fast'$"):
        supervisor.check()


def test_a_role_that_left_no_words_is_reported_by_its_log(supervisor: Supervisor):
    supervisor.start(plan("print('usage: worker --name NAME', flush=True); raise SystemExit(2)"))
    wait(supervisor)
    with pytest.raises(ConfigError, match=r"^worker: usage: worker --name NAME$"):
        supervisor.check()


def test_no_descriptor_is_left_of_roles_that_ran(tmp_path: Path, time: Clock):
    supervisor = make_supervisor(tmp_path, time, max_restarts=3)
    before = psutil.Process().num_fds()
    starter = LocalStarter(tmp_path / "scratch")
    supervisor.start_process = starter.start
    supervisor.start(plan("raise SystemExit(7)"))
    for _ in range(2):
        wait(supervisor)
        supervisor.check()
        time.now_s += 100.0
        supervisor.check()
    wait(supervisor)
    supervisor.stop()
    starter.close()
    assert psutil.Process().num_fds() == before


LEAVES_TWICE = """
import os, subprocess, sys
from slipstream.wire.process.last_words import (
    keep_last_words_from_children, leave_last_words, LAST_WORDS_VARIABLE
)
from tests.support.clock import Clock
keep_last_words_from_children()
leave_last_words("a long reason, of an earlier error")
leave_last_words("short \\ud800")
child = "import os, sys; print(sys.argv[1] in os.environ, len(os.listdir('/proc/self/fd')))"
subprocess.run([sys.executable, "-c", child, LAST_WORDS_VARIABLE], close_fds=False)
raise SystemExit(2)
"""


def test_the_last_of_a_role_s_reasons_counts_and_its_children_have_no_part(
    supervisor: Supervisor, tmp_path: Path
):
    supervisor.start(RolePlan("worker", (sys.executable, "-c", LEAVES_TWICE), ()))
    wait(supervisor)
    with pytest.raises(ConfigError, match=r"^worker: short \?$"):
        supervisor.check()
    found = (tmp_path / "worker.log").read_text()
    assert found == "False 5\n"  # its streams, the lifeline, and the folder that it lists


def test_no_handler_may_raise_while_a_child_is_forked(supervisor: Supervisor):
    seen: list[bool] = []

    @contextmanager
    def forking() -> Iterator[None]:
        yield
        seen.append("worker" in supervisor.children)  # a handler that waited may raise now

    supervisor.forking = forking
    supervisor.start(plan("pass"))
    assert seen == [True]
    wait(supervisor)


def test_what_a_dead_role_left_in_the_scratch_folder_is_removed(supervisor: Supervisor):
    mine, others = (
        supervisor.logs / "scratch" / "worker-abc",
        supervisor.logs / "scratch" / "other-abc",
    )
    for folder in (mine, others):
        folder.mkdir()
    supervisor.start(plan("raise SystemExit(1)"))
    wait(supervisor)
    supervisor.check()
    assert not mine.exists()
    assert others.exists()


def test_children_get_the_scratch_folder_their_environment_and_their_cores(supervisor: Supervisor):
    core = min(os.sched_getaffinity(0))
    code = "import os; print(os.environ['TMPDIR'], os.environ['MINE'], os.sched_getaffinity(0))"
    role = dataclasses.replace(plan(code), environment={"MINE": "1"}, cores=(core,))
    supervisor.start(role)
    wait(supervisor)
    log = supervisor.children["worker"].log_file
    assert log.read_text().split() == [str(supervisor.logs / "scratch"), "1", f"{{{core}}}"]


def test_stop_asks_first_and_kills_processes_that_ignore_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    def has_left() -> bool:
        process = supervisor.children["polite"].process
        return process is not None and process.poll() is not None

    time = StandsStill(until=has_left)
    supervisor = make_supervisor(tmp_path, time)
    up = "print('up', flush=True)"
    mask = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])"
    deaf = f"{mask}; {up}; signal.pause()"
    polite = f"{mask}; {up}; signal.sigwait([signal.SIGTERM])"
    codes = {}
    for name, code in (("deaf", deaf), ("polite", polite)):
        supervisor.start(plan(code, name=name))
        process = process_of(supervisor, name)
        until_printed(tmp_path / f"{name}.log", "up", process.pid)
    supervisor.stop()
    assert "deaf used no CPU and wrote no log for 3 s after SIGTERM and is killed" in caplog.text
    for name, child in supervisor.children.items():
        assert child.process is not None
        codes[name] = child.process.poll()
    assert codes == {"deaf": -signal.SIGKILL, "polite": 0}


def test_a_role_that_waits_for_its_restart_is_not_started_after_a_stop(
    supervisor: Supervisor, time: Clock
):
    supervisor.start(plan("raise SystemExit(1)"))
    pid = wait(supervisor)
    supervisor.check()
    supervisor.stop()
    time.now_s = 100.0
    assert process_of(supervisor).pid == pid
    assert supervisor.children["worker"].restart_at_s is None


def test_a_role_that_is_asked_to_leave_ends_in_order_and_stays_away(supervisor: Supervisor):
    code = """
import signal, time
def leave(*_):
    print("handing back", flush=True)
    raise SystemExit(1)  # whatever its code is
signal.signal(signal.SIGTERM, leave)
print("ready", flush=True)
time.sleep(1000)
"""
    supervisor.start(plan(code))
    child = supervisor.children["worker"]
    while "ready" not in child.log_file.read_text():
        supervisor.check()
    supervisor.leave("worker")
    assert not supervisor.finished(["worker"])
    wait(supervisor)
    supervisor.check()
    assert supervisor.finished(["worker"])
    assert child.num_starts == 1
    assert "handing back" in child.log_file.read_text()


def test_one_that_was_to_be_restarted_leaves_at_once(supervisor: Supervisor, time: Clock):
    supervisor.start(plan("raise SystemExit(7)"))
    wait(supervisor)
    supervisor.check()
    supervisor.leave("worker")
    time.now_s += 100.0
    supervisor.check()
    assert supervisor.finished(["worker"])
    assert supervisor.children["worker"].num_starts == 1


def test_one_that_does_not_leave_is_killed(tmp_path: Path, time: Clock):
    supervisor = make_supervisor(tmp_path, time)
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "print('up', flush=True); time.sleep(1e6)"
    )
    supervisor.start(plan(code))
    child = supervisor.children["worker"]
    while "up" not in child.log_file.read_text():
        supervisor.check()
    supervisor.now = ImpatientTime()
    supervisor.leave("worker")
    while not supervisor.finished(["worker"]):
        supervisor.check()
    assert child.process is not None
    assert child.process.poll() == -signal.SIGKILL


def test_processes_of_one_role_end_and_start_together(supervisor: Supervisor, time: Clock):
    sleeps = "import time; print('up', flush=True); time.sleep(1e6)"
    parts = [
        dataclasses.replace(plan(code, name=name, again=("again",)), part_of="learner")
        for name, code in [("learner", sleeps), ("learner-1", "raise SystemExit(7)")]
    ]
    supervisor.start(plan(sleeps, name="other"))
    for part in parts:
        supervisor.start(part)
    children = supervisor.children
    first = children["learner"].process
    wait(supervisor, "learner-1")
    supervisor.check()
    assert first is not None
    first.wait()
    assert first.returncode == -signal.SIGKILL
    supervisor.check()
    assert children["learner"].failed_at_s == []  # one failure, of the one that failed
    assert len(children["learner-1"].failed_at_s) == 1
    time.now_s += 6.0
    supervisor.check()
    assert [children[name].num_starts for name in ("learner", "learner-1", "other")] == [2, 2, 1]
    wait(supervisor, "learner-1")
    for name in ("learner", "other"):
        assert supervisor.runs(name)


def test_a_part_is_not_started_again_before_it_has_ended(supervisor: Supervisor, time: Clock):
    ignores = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1e6)"
    for name, code in [("learner", ignores), ("learner-1", "raise SystemExit(7)")]:
        supervisor.start(dataclasses.replace(plan(code, name=name), part_of="learner"))
    process = process_of(supervisor, "learner")
    kill = process.send_signal
    process.send_signal = lambda _signum: None  # its node is out of reach
    wait(supervisor, "learner-1")
    for _ in range(3):
        supervisor.check()
        time.now_s += 100.0
    assert [child.num_starts for child in supervisor.children.values()] == [1, 1]
    kill(signal.SIGKILL)
    wait(supervisor, "learner")
    supervisor.check()
    assert [child.num_starts for child in supervisor.children.values()] == [2, 2]
    wait(supervisor, "learner-1")


def test_a_part_that_was_done_starts_again_with_the_others(supervisor: Supervisor, time: Clock):
    for name, code in [("learner", "pass"), ("learner-1", "raise SystemExit(7)")]:
        supervisor.start(dataclasses.replace(plan(code, name=name), part_of="learner"))
        wait(supervisor, name)
    restart(supervisor, time)
    assert not supervisor.finished(["learner"])
    assert supervisor.children["learner"].num_starts == 2
    for name in ("learner", "learner-1"):
        wait(supervisor, name)
