"""The weight bus between real processes: whatever dies, no token comes from a mixture of versions.

The engines are plain tensors (tests/bus_engine.py), so that they can be told to fail at any point;
test_transports.py does the same publishes with SGLang.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bus_harness import ROOT, WeightBus, until, weight_bus
from wire.bus import TransportName

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]
TRANSPORTS: tuple[TransportName, ...] = ("collective", "tcp", "disk")
ENGINE_STEPS = ("pause", "checksums", "label", "resume")
NUM_BUCKETS = 6


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sp-", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture
def bus(folder: Path) -> Iterator[WeightBus]:
    with weight_bus(folder) as running:
        yield running


# ---- nothing fails -------------------------------------------------------------


def test_every_transport_brings_every_version_whole_and_the_newest_wins(bus: WeightBus):
    for name in TRANSPORTS:
        bus.start(name, name)
    for step in range(4):
        bus.publish(step)
        for name in TRANSPORTS:
            bus.wait_for(name, step)
    for step in range(4, 40):
        bus.publish(step)
    for name in TRANSPORTS:
        bus.wait_for(name, 39)
        assert len(bus.labels(name)) < 36, "no version was skipped"
        assert bus.labels(name)[:4] == ["v1.0", "v1.1", "v1.2", "v1.3"]
    bus.check_tokens()
    left = list((bus.folder / "runs" / "bus" / "weights").iterdir())
    assert 0 < len(left) <= 3, "old versions stay on disk"


def test_a_late_joiner_is_served_alone_and_is_in_the_next_collective(bus: WeightBus):
    bus.start("early")
    bus.publish(0)
    bus.wait_for("early", 0)
    paused = bus.log_of("early").count("paused")
    bus.start("late")
    bus.wait_for("late", 0)
    assert bus.log_of("early").count("paused") == paused, "the joiner disturbed somebody"
    assert "in a collective" not in bus.log_of("late")
    bus.publish(1)
    bus.wait_for("late", 1)
    bus.wait_for("early", 1)
    assert "in a collective of 2" in bus.log_of("late")
    bus.check_tokens()


def test_another_torch_gets_its_weights_over_tcp_with_a_warning(bus: WeightBus):
    bus.start("other", "collective", "--torch-version", "1.2.3")
    bus.publish(0)
    bus.wait_for("other", 0)
    bus.publish(1)
    bus.wait_for("other", 1)
    assert "in a collective" not in bus.log_of("other")
    log = (bus.folder / "learner.log").read_text()
    assert "other gets its weights over tcp instead of a collective: its torch is 1.2.3" in log


def test_another_tensor_set_is_refused_before_a_byte_moves(bus: WeightBus):
    refusals = {
        "surplus": (("--count", "11"), "has unknown ['model.layers.11.norm.weight']"),
        "missing": (("--count", "13"), "lacks ['model.layers.12.norm.weight']"),
        "shape": (("--size", "4095"), "has shape (4096,), the model has (4095,)"),
        "type": (("--dtype", "bfloat16"), "has type float32, the engine bfloat16"),
    }
    for name, (options, _) in refusals.items():
        bus.start(name, "collective", *options)
    bus.publish(0)
    for name, (_, why) in refusals.items():
        until(lambda: why in bus.log_of(name), 20, lambda: bus.log_of(name))  # noqa: B023
        assert "paused" not in bus.log_of(name)
        assert bus.newest_label(name) == ""


def test_beyond_the_slots_a_publish_takes_no_memory_in_the_relay(folder: Path):
    mib = 1024 * 1024
    sizes = ("--count", "16", "--size", str(2 * mib // 4))  # 32 MiB
    with weight_bus(folder, sizes=sizes, bucket_bytes=4 * mib) as bus:
        for name in TRANSPORTS:
            bus.start(name, name, "--token-s", "0.2")
        until(lambda: "disk joined" in (folder / "learner.log").read_text(), 30)
        bus.publish(0)
        before = bus.relay_memory("RssAnon")
        for step in range(1, 5):
            bus.publish(step)
            for name in TRANSPORTS:
                bus.wait_for(name, step)
        grown = bus.relay_memory("RssAnon") - before
        assert grown < 16 * mib, f"{grown / mib:.0f} MiB: it holds a copy of the version"
        assert bus.relay_memory("RssShmem") <= 3 * 33 * mib
        bus.check_tokens()


# ---- engines that fail ---------------------------------------------------------


@pytest.mark.parametrize(
    ("faults", "num_versions"),
    [
        ({"collective": ("in_bucket", [*range(1, NUM_BUCKETS + 1)])}, NUM_BUCKETS + 2),
        (
            {
                "collective": ("before_bucket", [1, NUM_BUCKETS]),
                "tcp": ("in_folder", [1, 1]),
                "disk": ("in_folder", [1, 1]),
            },
            4,
        ),
        *(({name: (step, [2, 2]) for name in TRANSPORTS}, 4) for step in ENGINE_STEPS),
        ({"collective": ("open_group", [1, 1])}, 4),
    ],
    ids=["every-bucket", "load", *ENGINE_STEPS, "group"],
)
def test_an_engine_that_fails_at_any_point_is_repaired_before_it_generates_again(
    bus: WeightBus, faults: dict[TransportName, tuple[str, list[int]]], num_versions: int
):
    for transport, (step, counts) in faults.items():
        bus.start_faulty(transport, step, counts, "raise", transport)
    bus.start("sound")
    for number in range(num_versions):
        bus.publish(number)
        bus.wait_for("sound", number, timeout_s=5 if number else 25)
        for name in faults:
            bus.wait_for(name, number)
    for name, (step, counts) in faults.items():
        assert bus.log_of(name).count(f"failed: injected at {step}") == len(counts)
    bus.check_tokens()


def test_engines_that_die_in_a_transfer_concern_nobody_else_and_may_come_back(bus: WeightBus):
    for transport in TRANSPORTS:
        step, count = ("in_bucket", 3) if transport == "collective" else ("in_folder", 2)
        bus.start_faulty(transport, step, [count], "kill", transport)
    bus.start("sound")
    bus.publish(0)
    for name in (*TRANSPORTS, "sound"):
        bus.wait_for(name, 0)
    bus.publish(1)
    bus.wait_for("sound", 1, timeout_s=2)
    for name in TRANSPORTS:
        assert bus.agents[name].wait(5) == -signal.SIGKILL
    bus.publish(2)
    bus.wait_for("sound", 2, timeout_s=2)
    for name in TRANSPORTS:
        bus.start(name, name)
    for name in TRANSPORTS:
        bus.wait_for(name, 2)
    bus.publish(3)
    for name in (*TRANSPORTS, "sound"):
        bus.wait_for(name, 3)
    bus.check_tokens()


def test_an_engine_that_is_stopped_in_a_transfer_is_left_out_and_repaired_later(bus: WeightBus):
    bus.start_faulty("stopped", "in_bucket", [3], "stop")
    bus.start("sound")
    bus.publish(0)
    bus.wait_for("stopped", 0)
    bus.wait_for("sound", 0)
    for number in (1, 2, 3):
        bus.publish(number)
        bus.wait_for("sound", number, timeout_s=2)
    log = bus.folder / "learner.log"
    until(lambda: "stopped does not run v1.1" in log.read_text(), 15, log.read_text)
    bus.signal("stopped", signal.SIGCONT)
    bus.wait_for("stopped", 3)
    assert bus.labels("stopped") == ["v1.0", "v1.3"]
    bus.check_tokens()


def test_two_of_a_group_of_three_die_in_a_transfer_and_the_third_goes_on(folder: Path):
    with weight_bus(folder, engines_per_group=3) as bus:
        for name in ("first", "second"):
            bus.start_faulty(name, "in_bucket", [NUM_BUCKETS + 2], "kill")
        bus.start("third")
        bus.publish(0)
        for name in ("first", "second", "third"):
            bus.wait_for(name, 0)
        bus.publish(1)
        for name in ("first", "second", "third"):
            bus.wait_for(name, 1)
        assert "in a collective of 4" in bus.log_of("third")
        bus.publish(2)
        bus.wait_for("third", 2, timeout_s=20)
        for name in ("first", "second"):
            bus.start(name)
            bus.wait_for(name, 2)
        bus.publish(3)
        for name in ("first", "second", "third"):
            bus.wait_for(name, 3)
        bus.publish(4)
        for name in ("first", "second", "third"):
            bus.wait_for(name, 4)
        assert bus.log_of("third").count("in a collective of 4") >= 2, "no group was made anew"
        bus.check_tokens()


def test_one_of_a_group_that_is_stopped_costs_the_others_its_deadline_once(folder: Path):
    with weight_bus(folder, engines_per_group=2, timeout_s=3.0) as bus:
        bus.start_faulty("stopped", "in_bucket", [NUM_BUCKETS + 2], "stop")
        bus.start("sound")
        for step in (0, 1):
            bus.publish(step)
            bus.wait_for("stopped", step)
            bus.wait_for("sound", step)
        bus.publish(2)
        bus.wait_for("sound", 2, timeout_s=10)
        bus.publish(3)
        assert bus.wait_for("sound", 3, timeout_s=2) < 2
        bus.signal("stopped", signal.SIGCONT)
        bus.wait_for("stopped", 3)
        bus.check_tokens()


# ---- the relay and the learner -------------------------------------------------


def test_a_relay_that_is_killed_is_started_again_and_nobody_stops_generating(bus: WeightBus):
    bus.start("one")
    bus.publish(0)
    bus.wait_for("one", 0)
    before = bus.relay
    paused = bus.log_of("one").count("paused")
    bus.kill_relay()
    stall_s = bus.publish(1)
    assert stall_s < 1.0, "the learner waited for a relay"
    bus.wait_for("one", 1)
    assert bus.relay != before
    assert bus.log_of("one").count("paused") == paused + 1
    bus.check_tokens()


def test_engines_torn_by_the_death_of_the_relay_are_repaired_by_the_next_one(bus: WeightBus):
    for transport in TRANSPORTS:
        step, count = ("in_bucket", 3) if transport == "collective" else ("in_folder", 2)
        bus.start_faulty(transport, step, [count], "stop", transport)
    bus.publish(0)
    for name in TRANSPORTS:
        bus.wait_for(name, 0)
    bus.publish(1)
    until(lambda: all(_is_stopped(bus.agents[name].pid) for name in TRANSPORTS), 10)
    bus.kill_relay()
    time.sleep(0.5)
    for name in TRANSPORTS:
        bus.signal(name, signal.SIGCONT)
    for name in TRANSPORTS:
        bus.wait_for(name, 1)
    bus.check_tokens()


def test_a_learner_that_dies_in_its_copy_publishes_nothing_and_the_next_one_finds_its_relay(
    bus: WeightBus,
):
    bus.start("one")
    bus.publish(3)
    bus.wait_for("one", 3)
    relay = bus.relay
    bus.tell("half 4")
    time.sleep(0.3)
    bus.kill_learner()
    bus.start("late")
    until(lambda: bus.newest_label("late") == "v1.3", 20)
    bus.start_learner()
    bus.publish(2)  # it went back to an earlier checkpoint, under a new epoch
    bus.wait_for("one", 2)
    bus.wait_for("late", 2)
    assert bus.relay == relay
    assert bus.labels("one") == ["v1.3", "v2.2"]
    bus.check_tokens()


def test_a_transfer_goes_on_when_the_learner_dies_in_it(bus: WeightBus):
    bus.start_faulty("slow", "in_bucket", [3], "stop")
    bus.publish(0)
    bus.wait_for("slow", 0)
    bus.publish(1)
    until(lambda: _is_stopped(bus.agents["slow"].pid), 10)
    bus.kill_learner()
    bus.signal("slow", signal.SIGCONT)
    bus.wait_for("slow", 1)
    bus.check_tokens()


def test_the_relay_ends_with_a_learner_that_ends_in_order(bus: WeightBus):
    bus.publish(0)
    until(bus.relay_lives, 20)
    bus.tell("end")
    assert bus.learner.wait(10) == 0
    until(lambda: not bus.relay_lives(), 2)


def test_the_relay_ends_some_time_after_a_learner_that_died(folder: Path):
    with weight_bus(folder, linger_s=3.0) as bus:
        bus.publish(0)
        until(bus.relay_lives, 20)
        bus.kill_learner()
        time.sleep(1.0)
        assert bus.relay_lives()
        until(lambda: not bus.relay_lives(), 10)
        assert "weightbus.linger_s" in (folder / "learner.log").read_text()


def test_the_relay_ends_when_its_lifeline_is_cut(bus: WeightBus):
    bus.publish(0)
    until(bus.relay_lives, 20)
    bus.tell("end")
    assert bus.learner.wait(10) == 0
    read, write = os.pipe()
    config = str(bus.folder / "run.toml")
    relay = subprocess.Popen(
        [sys.executable, "-m", "learner.relay", "--config", config, "--lifeline", str(read)],
        cwd=ROOT,
        pass_fds=[read],
    )
    os.close(read)
    try:
        until(lambda: bus.relay == relay.pid, 20)
        time.sleep(1.0)
        assert relay.poll() is None
        os.close(write)
        assert relay.wait(5) == 0
    finally:
        relay.kill()
        relay.wait()


def test_a_relay_that_hangs_is_replaced(bus: WeightBus):
    bus.start("one")
    bus.publish(0)
    bus.wait_for("one", 0)
    before = bus.relay
    bus.kill_relay(signal.SIGSTOP)
    bus.publish(1)
    bus.wait_for("one", 1)
    assert bus.relay != before
    bus.check_tokens()


def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
