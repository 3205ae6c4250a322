"""Whose user ids trajectories may have, and what their filter refuses."""

from pathlib import Path

import pytest

from slipstream.broker.sandbox import system_calls
from slipstream.generators.environments.confinement import spare_ids
from slipstream.generators.environments.host import raw_disks

ROOT_STATUS = "Name:\tpython\nCapEff:\t000001ffffffffff\n"
USER_STATUS = "Name:\tpython\nCapEff:\t0000000000000000\n"
WHOLE_HOST = "         0          0 4294967295\n"


def test_root_gives_each_trajectory_an_id_that_nobody_has():
    ids = spare_ids(ROOT_STATUS, WHOLE_HOST)
    assert (ids.start, len(ids)) == (1_883_242_496, 1 << 22)


def test_devices_that_pass_commands_to_a_disk_are_hidden_from_roots_trajectories(tmp_path: Path):
    disks = {"sg0", "ng0n1", "nvme0", "mtd0ro", "raw1", "dax0.0", "0:0:0:0"}
    for name in disks | {"null", "tty1", "sgx_enclave", "random"}:
        (tmp_path / name).touch()
    folders = [tmp_path, tmp_path / "mapper"]
    assert {node.name for node in raw_disks(0, folders)} == disks
    assert raw_disks(1000, folders) == []


def test_root_of_a_container_gives_those_of_its_upper_half_but_nobodys():
    ids = spare_ids(ROOT_STATUS, "0 1000 1\n1 100000 65536\n")
    assert ids == range(32_769, 65_529)


@pytest.mark.parametrize(
    ("status", "uid_map"),
    [(USER_STATUS, WHOLE_HOST), (ROOT_STATUS, "0 1000 1\n"), (ROOT_STATUS, "")],
)
def test_without_the_right_or_the_ids_there_are_none(status: str, uid_map: str):
    assert spare_ids(status, uid_map) == range(0)


@pytest.mark.parametrize(
    ("machine", "ptrace", "execve"), [("x86_64", 101, 59), ("aarch64", 117, 221)]
)
def test_the_filter_of_trajectories_refuses_a_part_of_that_of_a_models_code(
    machine: str, ptrace: int, execve: int
):
    ours, strict = (
        {value for code, _, _, value in make(machine) if code == 0x15}
        for make in (system_calls.trajectory_filter, system_calls.system_call_filter)
    )
    assert ours < strict
    assert {ptrace, 438} <= ours
    assert execve not in strict
