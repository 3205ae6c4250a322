"""Health of a role: what decides it, and the probe that asks for it over a real socket."""

import json
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.broker.listening.health_port import serving
from slipstream.wire.errors import ConfigError
from slipstream.wire.process.health import (
    Health,
    HealthObservation,
    probe,
    why_not_live,
    why_not_ready,
)
from slipstream.wire.process.ports import free_port
from tests.support.clock import Clock
from tests.support.waiting import HANG_S

ROOT = Path(__file__).parents[4]


class Counting:
    """A main loop that turns when the test says so."""

    turns = 0
    missing = ""


def observed(health: Health, clock: Clock, seconds: float) -> HealthObservation:
    """Return what is seen after so many seconds, looked at once a second."""
    for _ in range(round(seconds)):
        clock.now_s += 1.0
        health.observe()
    return health.observe()


def test_the_time_since_the_last_progress_is_reported_and_decides_nothing_by_default():
    clock, loop = Clock(1000.0), Counting()
    health = Health("r", now=clock)
    with health.main_loop(lambda: loop.turns):
        assert observed(health, clock, 5_000).idle_s == 5_000
        assert health.answer("/health/live")[0] == 200
        loop.turns += 1
        assert health.observe().idle_s == 0


def test_a_loop_that_turns_is_live_and_one_that_is_stuck_past_the_setting_is_not():
    clock, loop = Clock(1000.0), Counting()
    health = Health("r", stuck_s=60.0, now=clock)
    with health.main_loop(lambda: loop.turns):
        for _ in range(10):
            observed(health, clock, 59)
            assert health.answer("/health/live")[0] == 200
            loop.turns += 1
            health.observe()
        observed(health, clock, 60)
        status, body = health.answer("/health/live")
        assert (status, body["live"]) == (503, False)
        assert body["reason"] == "no progress for 60 s (run.stuck_s = 60)"
        assert health.answer("/health/ready")[0] == 503
        loop.turns += 1
        assert health.answer("/health/live")[0] == 200


def test_time_in_which_the_process_itself_did_not_run_is_not_held_against_it():
    clock = Clock(1000.0)
    health = Health("r", stuck_s=60.0, now=clock)
    with health.main_loop(lambda: 0):
        clock.now_s += 3_600.0  # stopped by a signal, or the machine slept
        assert health.observe().idle_s == 5.0


def test_a_role_that_starts_is_live_however_long_and_not_ready():
    clock = Clock(1000.0)
    health = Health("r", stuck_s=1.0, now=clock)
    assert health.answer("/health/ready")[1]["reason"] == "it starts"
    health.waits_for("its engine to start")
    observed(health, clock, 100)
    assert health.answer("/health/live")[0] == 200
    status, body = health.answer("/health/ready")
    assert (status, body["reason"]) == (503, "it waits for its engine to start")


def test_a_role_is_ready_while_nothing_is_missing_and_until_it_is_asked_to_end():
    loop, asked = Counting(), threading.Event()
    health = Health("r")
    health.drains_when(asked.is_set)
    loop.missing = "no version yet"
    with health.main_loop(lambda: loop.turns, lambda: loop.missing):
        assert health.answer("/health/ready")[1]["reason"] == "no version yet"
        loop.missing = ""
        assert health.answer("/health/ready")[0] == 200
        asked.set()
        status, body = health.answer("/health/ready")
        assert (status, body["reason"]) == (503, "it was asked to end")
        assert health.answer("/health/live")[0] == 200


def test_a_loop_that_has_ended_is_neither_live_nor_ready_whatever_ended_it():
    health = Health("r")
    with pytest.raises(RuntimeError), health.main_loop(lambda: 0):
        raise RuntimeError
    for path in ("/health/live", "/health/ready"):
        status, body = health.answer(path)
        assert (status, body["reason"]) == (503, "its main loop has ended")
    status, body = health.answer("/health")
    assert (status, body["live"], body["ready"]) == (200, False, False)


def test_what_a_role_lacks_is_no_reason_to_restart_it():
    seen = HealthObservation("running", 0.0, "its store does not answer", is_draining=False)
    assert why_not_live(seen, 10.0) == ""
    assert why_not_ready(seen, 10.0) == "its store does not answer"


# ---- over a socket -------------------------------------------------------------


@pytest.fixture
def port() -> Iterator[int]:
    health = Health("generator-0")
    port = free_port()
    with serving(health, port), health.main_loop(lambda: 0):
        yield port


def test_answers_are_json_with_a_status_that_a_probe_understands(port: int):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=HANG_S) as answer:
        assert answer.headers["content-type"] == "application/json"
        body = json.load(answer)
    assert body.pop("idle_s") >= 0.0
    assert body == {
        "live": True,
        "ready": True,
        "reason": "",
        "role": "generator-0",
        "state": "running",
    }
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=HANG_S)
    with pytest.raises(urllib.error.HTTPError, match="405"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", data=b"x", timeout=HANG_S)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("attacker.example", b"403"),
        ("127.0.0.1.attacker.example:1", b"403"),
        ("", b"403"),
        ("localhost:8081", b"200"),
        ("127.0.0.1", b"200"),
        ("[::1]:8081", b"200"),
    ],
)
def test_a_page_that_had_its_own_name_point_here_reads_nothing(port: int, host: str, status: bytes):
    with socket.create_connection(("127.0.0.1", port), timeout=HANG_S) as client:
        client.sendall(f"GET /health HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        assert client.recv(100).split()[1] == status


def test_only_loopback_is_listened_at(port: int):
    for other in ("127.0.0.2", "::1"):
        family = socket.AF_INET6 if ":" in other else socket.AF_INET
        with socket.socket(family) as client:
            assert client.connect_ex((other, port)) != 0


def test_clients_that_say_nothing_stop_no_probe_of_another(port: int):
    with (
        socket.create_connection(("127.0.0.1", port)),
        socket.create_connection(("127.0.0.1", port)) as talker,
    ):
        talker.sendall(b"GET /health/li")
        assert probe(port, "live", timeout_s=HANG_S)[0]


@pytest.mark.parametrize("request_", [b"\r\n\r\n", b"\xff\xfe\r\n\r\n", b"x" * 5_000])
def test_what_is_no_request_gets_an_answer_and_ends_nothing(port: int, request_: bytes):
    with socket.create_connection(("127.0.0.1", port), timeout=HANG_S) as client:
        client.sendall(request_)
        assert client.recv(100).startswith(b"HTTP/1.0 400")
    assert probe(port, "live", timeout_s=HANG_S)[0]


def test_a_port_that_is_taken_is_an_error_that_names_the_option(port: int):
    match = rf"127\.0\.0\.1:{port}: .* \(--health {port}\)"
    with pytest.raises(ConfigError, match=match), serving(Health(), port):
        pass


def test_nothing_listens_afterwards_nor_at_port_0():
    port = free_port()
    with serving(Health(), port):
        assert probe(port, "live", timeout_s=HANG_S)[0]
    is_live, line = probe(port, "live", timeout_s=HANG_S)
    assert (is_live, json.loads(line)["live"]) == (False, False)
    assert f"no answer at 127.0.0.1:{port}" in line
    with serving(Health(), 0):
        assert not any(thread.name == "health" for thread in threading.enumerate())


def test_a_stuck_loop_is_noticed_without_a_probe_that_looks_at_it():
    """The time is that since the progress, not since the probe before."""
    clock, looked = Clock(1000.0), threading.Semaphore(0)

    def signs() -> int:
        clock.now_s += 1.0
        looked.release()
        return 0

    health, port = Health(now=clock), free_port()
    with serving(health, port), health.main_loop(signs):
        for _ in range(4):
            assert looked.acquire(timeout=HANG_S)
        _, line = probe(port, "live", timeout_s=HANG_S)
    assert json.loads(line)["idle_s"] >= 3.0


# ---- as a program --------------------------------------------------------------

HEAVY = {"torch", "zmq", "msgspec", "aiohttp", "asyncio", "slipstream.wire.messages"}


def program(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-X", "importtime", "-m", "slipstream.wire.process.health"]
    return subprocess.run(
        [*command, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


def test_the_program_tells_by_its_exit_code_and_imports_nothing_heavy():
    health, port = Health("broker"), free_port()
    with serving(health, port):
        starting = program("--port", str(port), "ready")
        with health.main_loop(lambda: 0):
            running = program("--port", str(port), "ready")
            live = program("--port", str(port), "live")
    gone = program("--port", str(port), "live")
    assert [done.returncode for done in (starting, running, live, gone)] == [1, 0, 0, 1]
    assert json.loads(starting.stdout)["reason"] == "it starts"
    assert json.loads(running.stdout)["ready"] is True
    assert "no answer" in json.loads(gone.stdout)["reason"]
    imported = {line.rpartition("|")[2].strip() for line in live.stderr.splitlines()}
    assert "slipstream.wire.process" in imported
    assert HEAVY.isdisjoint(imported)
