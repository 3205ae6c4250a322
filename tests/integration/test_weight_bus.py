"""The weight bus between real processes: whatever dies, no token comes from a mixture of versions.

The engines are plain tensors (tests/support/bus/engine.py), so that they can be made to fail at any
point; test_transports.py does the same publishes with SGLang. No deadline of the bus runs out in a
test that does not set it: what happens there does not wait for one.
"""

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.bus.harness import WeightBus, weight_bus
from tests.support.nursery import ROOT
from tests.support.waiting import HANG_S, state_of, until, until_ended, until_stopped

pytestmark = pytest.mark.integration
TRANSPORTS: tuple[str, ...] = ("collective", "tcp", "disk")
ENGINE_STEPS = ("pause", "checksums", "label", "resume")
NUM_BUCKETS = 6
GIVEN_UP_S = 20.0  # a stopped engine; a sound one that is that slow comes back like any other


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every test runs with groups as gloo makes them and with the manners of NCCL."""
    is_quick = metafunc.function in WITH_BOTH_MANNERS
    nccl = "nccl" if is_quick else pytest.param("nccl", marks=pytest.mark.slow)
    metafunc.parametrize("manners", ["gloo", nccl])


@pytest.fixture
def bus(folder: Path, manners: str) -> Iterator[WeightBus]:
    with weight_bus(folder, manners=manners) as running:
        yield running


# ---- nothing fails -------------------------------------------------------------


def test_every_transport_brings_every_version_whole_and_the_newest_wins(bus: WeightBus):
    for name in TRANSPORTS:
        bus.start(name, name)
    for step in range(4):
        bus.brings(step, *TRANSPORTS)
    for step in range(4, 20):
        bus.publish(step)
    for name in TRANSPORTS:
        bus.signal(name, signal.SIGSTOP)
    for step in range(20, 40):
        bus.publish(step)
    for name in TRANSPORTS:
        bus.signal(name, signal.SIGCONT)
    for name in TRANSPORTS:
        bus.wait_for(name, 39)
        assert len(bus.labels(name)) < 36, "no version was skipped"
        assert bus.labels(name)[:4] == ["v1.0", "v1.1", "v1.2", "v1.3"]
    bus.check_tokens()
    weights = bus.folder / "runs" / "bus" / "weights"
    until(lambda: 0 < len(list(weights.iterdir())) <= 3, "old versions stay on disk")


def test_a_late_joiner_is_served_alone_and_is_in_the_next_collective(bus: WeightBus):
    bus.start("early")
    bus.brings(0, "early")
    paused = bus.log_of("early").count("paused")
    bus.start("late")
    bus.wait_for("late", 0)
    assert bus.log_of("early").count("paused") == paused, "the joiner disturbed somebody"
    assert "in a collective" not in bus.log_of("late")
    bus.brings(1, "late", "early")
    assert "in a collective of 2" in bus.log_of("late")
    bus.check_tokens()


def test_another_torch_gets_its_weights_over_tcp_with_a_warning(bus: WeightBus):
    bus.start("other", "collective", "--torch-version", "1.2.3")
    bus.brings(0, "other")
    bus.brings(1, "other")
    assert "in a collective" not in bus.log_of("other")
    log = (bus.folder / "learner.log").read_text()
    assert "other gets its weights over tcp instead of collective: its torch is 1.2.3" in log


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
        until(lambda: why in bus.log_of(name), lambda: bus.log_of(name))  # noqa: B023
        assert "paused" not in bus.log_of(name)
        assert bus.newest_label(name) == ""


def test_beyond_the_slots_a_publish_takes_no_memory_in_the_relay(folder: Path, manners: str):
    mib = 1024 * 1024
    sizes = ("--count", "16", "--size", str(2 * mib // 4))  # 32 MiB
    with weight_bus(folder, manners=manners, sizes=sizes, bucket_bytes=4 * mib) as bus:
        for name in TRANSPORTS:
            bus.start(name, name, "--token-s", "0.2")
        until(lambda: "disk joined" in (folder / "learner.log").read_text())
        bus.publish(0)
        before = bus.relay_memory("RssAnon")
        for step in range(1, 5):
            bus.brings(step, *TRANSPORTS)
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
    bus: WeightBus, faults: dict[str, tuple[str, list[int]]], num_versions: int
):
    for transport, (step, counts) in faults.items():
        bus.start_faulty(transport, step, counts, "raise", transport)
    bus.start("sound")
    for number in range(num_versions):
        bus.brings(number, "sound")
        for name in faults:
            bus.wait_for(name, number)
    for name, (step, counts) in faults.items():
        assert bus.log_of(name).count(f"failed: injected at {step}") == len(counts)
    bus.check_tokens()


def test_a_version_that_fails_next_to_the_live_weights_stops_no_token(bus: WeightBus):
    """What is torn is the shadow; only a copy that fails midway leaves an engine paused."""
    faults = {"stage": ("in_stage", [2, 1]), "copy": ("in_copy", [2, 1])}
    for (name, (step, counts)), transport in zip(faults.items(), ("mapped", "tcp"), strict=True):
        bus.start_faulty(name, step, counts, "raise", transport, "--shadow")
    bus.start("sound", "disk", "--shadow")
    for number in range(4):
        bus.brings(number, "sound")
        for name in faults:
            bus.wait_for(name, number)
    for name, (step, counts) in faults.items():
        assert bus.log_of(name).count(f"failed: injected at {step}") == len(counts)
    pauses = {name: bus.log_of(name).count("paused") for name in (*faults, "sound")}
    assert pauses == {"stage": 4, "copy": 4 + 2, "sound": 4}
    bus.check_tokens()


def test_engines_that_die_in_a_transfer_affect_no_other_and_may_come_back(bus: WeightBus):
    for transport in TRANSPORTS:
        step, count = ("in_bucket", 3) if transport == "collective" else ("in_folder", 2)
        bus.start_faulty(transport, step, [count], "kill", transport)
    bus.start("sound")
    bus.brings(0, *TRANSPORTS, "sound")
    bus.publish(1)
    bus.wait_for("sound", 1)  # waiting for a deadline of the dead would never end
    for name in TRANSPORTS:
        assert bus.agents[name].wait(HANG_S) == -signal.SIGKILL
    bus.brings(2, "sound")
    for name in TRANSPORTS:
        bus.start(name, name)
    for name in TRANSPORTS:
        bus.wait_for(name, 2)
    bus.brings(3, *TRANSPORTS, "sound")
    bus.check_tokens()


def stop_one_in_a_transfer(bus: WeightBus) -> None:
    """Publish 0 to two engines and 1, in which one of them is stopped; the other gets 2 and 3."""
    bus.start_faulty("stopped", "in_bucket", [3], "stop")
    bus.start("sound")
    bus.brings(0, "stopped", "sound")
    bus.publish(1)
    until_stopped(bus.agents["stopped"].pid)
    bus.wait_for("sound", 1)
    for number in (2, 3):
        bus.brings(number, "sound")


def test_stopped_engine_in_a_transfer_delays_no_other(bus: WeightBus):
    stop_one_in_a_transfer(bus)
    assert bus.newest_label("stopped") == "v1.0"
    assert "stopped does not run" not in (bus.folder / "learner.log").read_text()
    bus.signal("stopped", signal.SIGCONT)
    bus.wait_for("stopped", 3)
    assert "adopted v1.1" in bus.log_of("stopped"), "it was given up"
    bus.check_tokens()


def test_an_engine_that_is_stopped_in_a_transfer_is_left_out_and_repaired_later(
    folder: Path, manners: str
):
    with weight_bus(
        folder, manners=manners, timeout_s=GIVEN_UP_S, member_silence_s=GIVEN_UP_S
    ) as bus:
        stop_one_in_a_transfer(bus)
        log = folder / "learner.log"
        until(lambda: "stopped does not run v1.1" in log.read_text(), log.read_text)
        bus.signal("stopped", signal.SIGCONT)
        bus.wait_for("stopped", 3)
        assert bus.labels("stopped") == ["v1.0", "v1.3"]
        bus.check_tokens()


def test_two_of_three_engines_die_in_a_transfer_and_the_third_continues(folder: Path, manners: str):
    with weight_bus(folder, manners=manners, engines_per_group=3) as bus:
        for name in ("first", "second"):
            bus.start_faulty(name, "in_bucket", [2], "kill", is_armed=False)
        bus.start("third")
        bus.publish(0)
        for name in ("first", "second", "third"):
            bus.wait_for(name, 0)
        bus.publish(1)
        for name in ("first", "second", "third"):
            bus.wait_for(name, 1)
        until(lambda: "in a collective of 4" in bus.log_of("third"))
        for name in ("first", "second"):
            bus.arm(name)
        bus.brings(2, "third")
        for name in ("first", "second"):
            bus.start(name)
            bus.wait_for(name, 2)
        bus.publish(3)
        for name in ("first", "second", "third"):
            bus.wait_for(name, 3)
        bus.publish(4)
        for name in ("first", "second", "third"):
            bus.wait_for(name, 4)
        until(
            lambda: bus.log_of("third").count("in a collective of 4") >= 2, "no group was made anew"
        )
        bus.check_tokens()


def test_one_of_a_group_that_is_stopped_costs_the_others_its_deadline_once(
    folder: Path, manners: str
):
    with weight_bus(folder, manners=manners, engines_per_group=2, timeout_s=GIVEN_UP_S) as bus:
        bus.start_faulty("stopped", "in_bucket", [2], "stop", is_armed=False)
        bus.start("sound")
        for step in (0, 1):
            bus.brings(step, "stopped", "sound")
        until(lambda: "in a collective of 3" in bus.log_of("sound"))
        bus.arm("stopped")
        bus.brings(2, "sound")
        bus.brings(3, "sound")
        since = bus.log_of("sound").rpartition("in a collective of 3")[2]
        assert "in a collective of 2" in since, "it is still in a group with the stopped one"
        bus.signal("stopped", signal.SIGCONT)
        bus.wait_for("stopped", 3)
        bus.check_tokens()


# ---- the relay and the learner -------------------------------------------------


def test_killed_relay_is_restarted_and_no_engine_stops_generating(bus: WeightBus):
    bus.start("one")
    bus.brings(0, "one")
    before = bus.relay
    paused = bus.log_of("one").count("paused")
    with (bus.folder / "sockets" / "relay.lock").open() as lock:
        bus.kill_relay()
        fcntl.flock(lock, fcntl.LOCK_EX)  # there can be no other one while we hold it
        bus.publish(1)  # and the learner does not wait for one
        assert bus.relay == before
    bus.wait_for("one", 1)
    assert bus.relay != before
    assert bus.log_of("one").count("paused") == paused + 1
    bus.check_tokens()


def test_engines_torn_by_the_death_of_the_relay_are_repaired_by_the_next_one(bus: WeightBus):
    for transport in TRANSPORTS:
        step, count = ("in_bucket", 3) if transport == "collective" else ("in_folder", 2)
        bus.start_faulty(transport, step, [count], "stop", transport)
    bus.brings(0, *TRANSPORTS)
    bus.publish(1)
    for name in TRANSPORTS:
        until_stopped(bus.agents[name].pid)
    relay = bus.relay
    bus.kill_relay()
    until_ended(relay)
    until(lambda: bus.relay not in {0, relay}, "no other relay")
    weights = bus.folder / "runs" / "bus" / "weights"
    assert (weights / "v1.1-1").is_dir(), "it was removed from under the engine that reads it"
    for name in TRANSPORTS:
        bus.signal(name, signal.SIGCONT)
    for name in TRANSPORTS:
        bus.wait_for(name, 1)
    bus.check_tokens()


def test_a_learner_that_dies_in_its_copy_publishes_nothing_and_the_next_one_finds_its_relay(
    bus: WeightBus,
):
    bus.start("one")
    bus.brings(3, "one")
    relay = bus.relay
    bus.publish_half(4)
    bus.kill_learner()
    bus.start("late")
    until(lambda: bus.newest_label("late") == "v1.3", lambda: bus.log_of("late"))
    bus.start_learner()
    bus.publish(2)  # it went back to an earlier checkpoint, under a new epoch
    bus.wait_for("one", 2)
    bus.wait_for("late", 2)
    assert bus.relay == relay
    assert bus.labels("one") == ["v1.3", "v2.2"]
    bus.check_tokens()


def test_a_relay_that_was_left_with_other_settings_is_replaced(bus: WeightBus):
    bus.start("one")
    bus.brings(3, "one")
    relay = bus.relay
    bus.kill_learner()
    config = bus.folder / "run.toml"
    config.write_text(config.read_text() + "\n# other settings\n")
    bus.start_learner()
    bus.brings(2, "one")
    assert bus.relay not in {0, relay}
    assert state_of(relay) in "ZX"
    assert "has other settings of [weightbus]" in (bus.folder / "learner.log").read_text()
    bus.check_tokens()


def test_transfer_completes_when_the_learner_dies_in_it(bus: WeightBus):
    bus.start_faulty("slow", "in_bucket", [3], "stop")
    bus.brings(0, "slow")
    bus.publish(1)
    until_stopped(bus.agents["slow"].pid)
    bus.kill_learner()
    bus.signal("slow", signal.SIGCONT)
    bus.wait_for("slow", 1)
    bus.check_tokens()


def test_the_relay_ends_with_a_learner_that_ends_in_order(bus: WeightBus):
    bus.publish(0)
    until(bus.relay_lives)
    bus.command("end")
    assert bus.learner_ends() == 0
    until(lambda: not bus.relay_lives())


def test_the_relay_ends_some_time_after_a_learner_that_died(folder: Path, manners: str):
    with weight_bus(folder, manners=manners, linger_s=3.0) as bus:
        bus.publish(0)
        until(bus.relay_lives)
        bus.kill_learner()
        assert bus.relay_lives() or _has_lingered(bus), "it ended with the learner"
        until(lambda: not bus.relay_lives())
        assert _has_lingered(bus)


def test_the_relay_ends_when_its_lifeline_is_cut(bus: WeightBus):
    bus.publish(0)
    until(bus.relay_lives)
    bus.command("end")
    assert bus.learner_ends() == 0
    read, write = os.pipe()
    config = str(bus.folder / "run.toml")
    relay = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "slipstream.weightbus.relay.main",
            "--config",
            config,
            "--lifeline",
            str(read),
        ],
        cwd=ROOT,
        pass_fds=[read],
    )
    os.close(read)
    try:
        until(lambda: bus.relay == relay.pid)
        time.sleep(0.2)  # in which it might end by itself
        assert relay.poll() is None
        os.close(write)
        assert relay.wait(HANG_S) == 0
    finally:
        relay.kill()
        relay.wait()


def test_a_relay_that_hangs_is_replaced(bus: WeightBus):
    bus.start("one")
    bus.brings(0, "one")
    before = bus.relay
    bus.kill_relay(signal.SIGSTOP)
    bus.brings(1, "one")
    assert bus.relay != before
    bus.check_tokens()


def _has_lingered(bus: WeightBus) -> bool:
    return "weightbus.linger_s" in (bus.folder / "learner.log").read_text()


# What `make test` runs over gloo with the manners of NCCL too; `make test-slow` runs all of it.
WITH_BOTH_MANNERS = (
    test_every_transport_brings_every_version_whole_and_the_newest_wins,
    test_a_late_joiner_is_served_alone_and_is_in_the_next_collective,
    test_engines_that_die_in_a_transfer_affect_no_other_and_may_come_back,
    test_two_of_three_engines_die_in_a_transfer_and_the_third_continues,
    test_engines_torn_by_the_death_of_the_relay_are_repaired_by_the_next_one,
)
