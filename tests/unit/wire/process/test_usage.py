"""CPU, memory and GPUs of a process and those below it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slipstream.wire.process.usage import ProcessUsage, gpu_gauges, tree_of

_BUSY = "x = bytearray(64 << 20)\nprint(flush=True)\nwhile True: x[0] = 1"


def test_a_child_counts_with_its_memory_and_its_cpu_time():
    clock = [0.0]
    usage = ProcessUsage(now=lambda: clock[0])
    alone = usage.gauges()["memory_bytes"]
    with subprocess.Popen([sys.executable, "-c", _BUSY], stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            assert child.pid in tree_of([os.getpid()])
            began_s = time.process_time()
            while time.process_time() - began_s < 0.2:
                pass
            clock[0] = 10.0
            gauges = usage.gauges()
        finally:
            child.kill()
    assert gauges["memory_bytes"] > alone + (50 << 20)
    assert 0.01 < gauges["cpu_cores"] < 100.0


def test_between_two_looks_the_readings_stay():
    clock = [0.0]
    usage = ProcessUsage(now=lambda: clock[0])
    assert usage.gauges().keys() == {"memory_bytes"}
    clock[0] = 6.0
    first = usage.gauges()
    assert first.keys() == {"memory_bytes", "cpu_cores"}
    clock[0] = 8.0
    assert usage.gauges() == first


def test_a_process_that_is_gone_uses_nothing(tmp_path: Path):
    assert ProcessUsage(root=1, proc=tmp_path).gauges() == {"memory_bytes": 0.0}


def test_gpus_are_those_of_the_processes_of_the_tree():
    apps = "10, GPU-a, 1000\n11, GPU-b, 500\n99, GPU-c, 7000\n"
    gpus = "GPU-a, 80\nGPU-b, 40\nGPU-c, 100\n"
    assert gpu_gauges([10, 11], apps, gpus) == {"gpu_bytes": 1500 << 20, "gpu_busy": 0.6}
    assert gpu_gauges([5], apps, gpus) == {}
    assert gpu_gauges([10], "10, GPU-a, [N/A]\n", "GPU-a, [N/A]\n") == {}
    assert gpu_gauges([10], "", gpus) == {}


def test_what_the_driver_says_otherwise_is_refused():
    with pytest.raises(ValueError, match="3 columns"):
        gpu_gauges([10], "No devices were found\n", "")
