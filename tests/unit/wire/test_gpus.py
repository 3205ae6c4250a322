import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.wire import gpus

HOST = {"0": "GPU-aa11", "1": "GPU-aa22", "2": "GPU-bb33"}
LISTED = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-aa11)
  MIG 1g.10gb     Device  0: (UUID: MIG-77)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-aa22)
"""


def test_the_variable_chooses_as_it_does_for_cuda():
    for variable, usable in [
        (None, ("0", "1", "2")),
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),  # what a job without GPUs gets of Slurm
        ("2,1", ("2", "1")),  # a job's GPUs, in its order
        (" 1 , 2 ", ("1", "2")),
        ("0,-1,2", ("0",)),  # CUDA stops at the first that is none
        ("0,7,1", ("0",)),
        ("1,1", ("1",)),
        ("GPU-bb33,0", ("GPU-bb33", "0")),
        ("GPU-b", ("GPU-b",)),
        ("GPU-aa", ()),  # two begin so
        ("MIG-77", ("MIG-77",)),
    ]:
        assert gpus.chosen_gpus(variable, HOST) == usable


def test_host_without_gpus_has_none_whatever_a_variable_names():
    for variable in (None, "0", "GPU-aa11", "MIG-77"):
        assert gpus.chosen_gpus(variable, {}) == ()


def test_names_of_gpus_whose_uuids_are_hidden_are_taken_as_far_as_there_are_any():
    assert gpus.chosen_gpus("GPU-cc44", {"0": "", "1": ""}) == ("GPU-cc44",)
    assert gpus.chosen_gpus("GPU-c,GPU-d,GPU-e", {"0": "", "1": ""}) == ("GPU-c", "GPU-d")
    assert gpus.chosen_gpus("GPU-cc44", HOST) == ()


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that is on the path alone, and where /proc and /dev of a host are looked for."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.defpath}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpus.gpus_of_host.cache_clear()
    yield tmp_path
    gpus.gpus_of_host.cache_clear()


def found(host: Path) -> dict[str, str]:
    return gpus.gpus_of_host(host / "proc", host)


def usable(host: Path) -> tuple[str, ...]:
    return gpus.usable_gpus(host / "proc", host)


def driver(host: Path, script: str) -> None:
    (host / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (host / "nvidia-smi").chmod(0o755)


def test_the_driver_lists_what_a_container_hides_in_proc(
    host: Path, monkeypatch: pytest.MonkeyPatch
):
    (host / "listed").write_text(LISTED)
    driver(host, f"[ $1 = -L ] && cat '{host}/listed'")
    assert found(host) == {"0": "GPU-aa11", "1": "GPU-aa22"}
    assert usable(host) == ("0", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aa22")
    assert usable(host) == ("GPU-aa22",)


@pytest.mark.parametrize("script", [None, "echo cannot talk to the driver; exit 9"])
def test_without_a_driver_that_answers_proc_and_then_devices_are_counted(
    host: Path, script: str | None
):
    if script is not None:
        driver(host, script)
    assert usable(host) == ()
    for name in ("nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (host / name).touch()
    gpus.gpus_of_host.cache_clear()
    assert usable(host) == ("0", "1"), "CUDA counts what a container has from 0"
    for name in ("0000:01:00.0", "0000:02:00.0", "0000:03:00.0"):
        (host / "proc" / name).mkdir(parents=True)
    gpus.gpus_of_host.cache_clear()
    assert usable(host) == ("0", "1", "2")
    information = host / "proc" / "0000:02:00.0" / "information"
    information.write_text("Model: \t H100\nGPU UUID: \t GPU-aa22-0f\nVideo BIOS: \t ??\n")
    gpus.gpus_of_host.cache_clear()
    assert found(host) == {"0": "", "1": "GPU-aa22-0f", "2": ""}
