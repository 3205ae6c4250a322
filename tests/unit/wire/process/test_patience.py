"""Waits for processes, with a clock and signs of life that are ours."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.wire.process.patience import Patience, Signs, Silence, signs_of
from tests.support.waiting import until


class World:
    """A clock, and what a process has done."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.signs = Signs(cpu_s=0.0, page_ins=0, log_bytes=0)
        self.lines: list[str] = []

    def patience(self, limit_s: float = 30.0, *, sees: bool = True) -> Patience:
        return Patience(
            "it",
            limit_s,
            (lambda: self.signs) if sees else None,
            log=self.lines.append,
            now=lambda: self.now_s,
        )

    def let_pass(self, patience: Patience, seconds: int, **grows: float) -> bool:
        """Check every second, while something grows by so much per second; return how it ended."""
        for _ in range(seconds):
            self.now_s += 1.0
            values = {
                name: value + grows.get(name, 0) for name, value in self.signs._asdict().items()
            }
            self.signs = Signs(**values)  # type: ignore[arg-type]  # numbers all the same
            if patience.is_over():
                return True
        return False


@pytest.fixture
def world() -> World:
    return World()


def test_idle_process_is_given_up_after_the_limit(world: World):
    patience = world.patience()
    assert not world.let_pass(patience, 29)
    assert world.let_pass(patience, 1)
    assert patience.why == "used no CPU and wrote no log for 30 s"


def test_process_that_computes_reads_or_logs_is_waited_for():
    for name, per_second in (("cpu_s", 0.05), ("page_ins", 1), ("log_bytes", 1)):
        world = World()
        patience = world.patience()
        assert not world.let_pass(patience, 500, **{name: per_second}), name


def test_polling_loop_is_no_sign_of_life(world: World):
    assert world.let_pass(world.patience(), 30, cpu_s=0.005)


def test_a_sign_of_life_begins_the_limit_anew(world: World):
    patience = world.patience()
    world.let_pass(patience, 29)
    world.let_pass(patience, 1, log_bytes=1)
    assert not world.let_pass(patience, 29)
    assert world.let_pass(patience, 1)


def test_busy_process_without_progress_is_given_up_after_twenty_limits(world: World):
    patience = world.patience()
    assert not world.let_pass(patience, 599, cpu_s=1.0)
    assert world.let_pass(patience, 1, cpu_s=1.0)
    assert patience.why == "was busy for 600 s without finishing"


def test_time_in_which_the_waiter_did_not_run_does_not_count(world: World):
    patience = world.patience()
    world.now_s += 3600.0  # the machine slept
    assert not patience.is_over()
    assert patience.idle_s <= 5.0
    assert not world.let_pass(patience, 20)


def test_a_process_that_another_took_the_place_of_is_alive(world: World):
    world.signs = Signs(cpu_s=10.0, page_ins=0, log_bytes=0)
    patience = world.patience()
    world.let_pass(patience, 29)
    world.signs = Signs(cpu_s=0.0, page_ins=0, log_bytes=0)
    assert not world.let_pass(patience, 29)


def test_without_signs_the_limit_is_a_limit(world: World):
    patience = world.patience(sees=False)
    assert not world.let_pass(patience, 29)
    assert world.let_pass(patience, 1)
    assert patience.why == "was not there within 30 s"


def test_wait_is_logged_after_ten_seconds_and_then_less_and_less_often(world: World):
    patience = world.patience(limit_s=35.0)
    world.let_pass(patience, 9, cpu_s=1.0)
    assert world.lines == []
    world.let_pass(patience, 10, cpu_s=1.0)
    assert world.lines == ["waiting for it: 10 s"]
    world.let_pass(patience, 15)
    assert world.lines[1:] == ["waiting for it: 20 s"]
    world.let_pass(patience, 6)
    assert world.lines[2:] == ["waiting for it, which has done nothing for 21 s: 40 s"]


def test_the_signs_of_a_process_are_its_cpu_that_of_its_children_and_its_log(tmp_path: Path):
    log = tmp_path / "log"
    read = signs_of(lambda: [os.getpid()], log)
    before = read()
    subprocess.run([sys.executable, "-S", "-c", "sum(range(5_000_000))"], check=True)
    log.write_text("a line\n")
    after = read()
    assert after.cpu_s > before.cpu_s
    assert (before.log_bytes, after.log_bytes) == (0, 7)


def test_a_process_that_has_ended_gives_no_sign(tmp_path: Path):
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait()
    assert signs_of(lambda: [ended.pid], tmp_path / "none")() == Signs(0.0, 0, 0)


def test_peer_is_silent_only_for_the_time_in_which_this_process_ran():
    now_s = 0.0
    silence = Silence(3.0, look_s=0.5, now=lambda: now_s)
    for seen_s in (0.5, 1.0, 100.0, 100.5, 101.0, 101.5):  # between two of them nothing was read
        now_s = seen_s
        assert not silence.is_over()
    now_s = 102.0
    assert silence.is_over()
    silence.heard()
    now_s = 1000.0
    assert not silence.is_over()


FORKS = """
import os
while True:
    children = []
    for _ in range(8):
        if not (pid := os.fork()):
            os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)
"""


def test_processes_that_end_while_they_are_looked_at_are_no_error():
    with subprocess.Popen([sys.executable, "-c", FORKS]) as process:
        look = signs_of(lambda: [process.pid])
        try:
            until(lambda: look().cpu_s > 0)  # it runs
            for _ in range(600):
                look()
        finally:
            process.kill()
