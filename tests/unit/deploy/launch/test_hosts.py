"""What `slipstream run --on hosts` prints for each host."""

import io
import shlex
from pathlib import Path

import pytest
from rich.console import Console

from slipstream.deploy.config import RunConfig, run_config
from slipstream.deploy.launch.hosts import (
    HostCommands,
    address_of,
    host_commands,
    print_check_commands,
)
from slipstream.deploy.launch.plan import plan_roles
from slipstream.wire.errors import ConfigError
from tests.support.blank_model import write_blank_model

WEIGHTS = "tcp://10.0.0.1:5600"


def config_of(folder: Path, hosts: list[str], **generators: object) -> RunConfig:
    write_blank_model(folder / "model", hidden=16, layers=1)
    return run_config(
        {
            "run": {"name": "r", "dir": str(folder / "my runs"), "model": str(folder / "model")},
            "data": {"file": "train.jsonl"},
            "generators": {"device": "cuda", "count": 3, **generators},
            "deploy": {"hosts": hosts, "gpus_per_host": 2},
        }
    )


def test_a_learner_of_two_nodes_meets_on_the_first_host(tmp_path: Path):
    config = config_of(tmp_path, ["10.0.0.1", "gpu-b", "gpu-c"])
    config = config.with_settings("learner", ranks=4, ranks_per_node=2)
    found = commands_of(config.with_settings("generators", count=1))
    near = shlex.split(found["10.0.0.1"].roles[1])
    far = shlex.split(found["gpu-b"].roles[0])
    meeting = ["--rendezvous", "10.0.0.1:29400"]
    assert near[2:4] == far[2:4] == ["CUDA_VISIBLE_DEVICES=0,1", "start-learner"]
    assert near[6:10] == ["--node", "0", *meeting]
    assert far[6:10] == ["--node", "1", *meeting]
    assert far[10:] == [
        "run.broker=tcp://10.0.0.1:5555",
        "run.key_file=gpu-b-learner_part.key",
        f"run.dir={tmp_path}/my runs",
    ]
    assert "start-generator" in found["gpu-c"].roles[0]


def commands_of(config: RunConfig) -> dict[str, HostCommands]:
    resolved = config.run.folder / "resolved.toml"
    plans = plan_roles(config, resolved, gpus=())
    return {
        one.host: one for one in host_commands(config, plans, resolved=resolved, address="10.0.0.1")
    }


def test_roles_on_the_first_host_listen_and_the_others_get_a_key_each(tmp_path: Path):
    found = commands_of(config_of(tmp_path, ["10.0.0.1", "gpu b"]))
    head, far = found["10.0.0.1"], found["gpu b"]
    assert head.once == [
        shlex.join(
            [
                *("slipstream", "keys", "make", "gpu-b-generator", "--role", "generator"),
                *("--keys", str(tmp_path / "my runs" / "keys")),
            ]
        )
    ]
    broker, near, learner, worker = map(shlex.split, head.roles)
    assert broker[2] == "start-broker"
    assert broker[-1] == "broker.listen=tcp://0.0.0.0:5555"
    shared = ["OMP_NUM_THREADS=1", "OMP_WAIT_POLICY=passive"]
    assert near[:4] == [*shared, "CUDA_VISIBLE_DEVICES=1", "start-generator"]
    assert learner[2:4] == ["CUDA_VISIBLE_DEVICES=0", "start-learner"]
    assert learner[-1] == f"weightbus.listen={WEIGHTS}"
    assert worker[2] == "start-reward-worker"
    assert not any("run.broker" in word for word in (*near, *learner, *worker))
    fetch = [shlex.split(one)[1] for one in far.once]
    assert fetch == [
        f"10.0.0.1:{tmp_path}/my runs/r/resolved.toml",
        f"10.0.0.1:{tmp_path}/my runs/keys/clients/gpu-b-generator.key",
    ]
    assert [shlex.split(command)[2] for command in far.roles] == [
        "CUDA_VISIBLE_DEVICES=0",
        "CUDA_VISIBLE_DEVICES=1",
    ]
    assert shlex.split(far.roles[0])[3:] == [
        *("start-generator", "--config", "resolved.toml", "--name", "generator-1"),
        *("run.broker=tcp://10.0.0.1:5555", "run.key_file=gpu-b-generator.key"),
    ]


def test_one_host_listens_nowhere_and_needs_no_key(tmp_path: Path):
    found = commands_of(config_of(tmp_path, ["here"], count=1))
    assert list(found) == ["here"]
    assert found["here"].once == []
    assert not any("listen=" in command for command in found["here"].roles)


def test_generators_on_cpus_are_on_the_hosts_after_the_first(tmp_path: Path):
    config = config_of(tmp_path, ["a", "b", "c"], device="cpu")
    plans = plan_roles(config, tmp_path / "r.toml", gpus=())
    assert [plan.host for plan in plans] == ["a", "b", "c", "b", "a", "a"]
    assert all("CUDA_VISIBLE_DEVICES" not in plan.environment for plan in plans)


def test_an_address_that_is_not_known_is_asked_for():
    assert address_of("10.0.0.1") == "10.0.0.1"
    with pytest.raises(ConfigError, match=r"deploy.hosts begins with no.such.invalid, .* set "):
        address_of("no.such.invalid")
    with pytest.raises(ConfigError, match=r"localhost, which is 127.0.0.1 here: .* others reach"):
        address_of("localhost")


def test_a_check_is_printed_for_each_host_with_its_number_and_key(tmp_path: Path):
    config = config_of(tmp_path, ["10.0.0.1", "gpu-b"])
    output = io.StringIO()
    console = Console(file=output, width=200)
    print_check_commands(config, tmp_path / "run.toml", ["run.steps=3"], console)
    lines = [shlex.split(line) for line in output.getvalue().splitlines()]
    here, there = (words for words in lines if words[:2] == ["slipstream", "check"])
    meet = ["--on", "hosts", "--node", "0", "--rendezvous", "10.0.0.1:29400", "run.steps=3"]
    assert here[2:] == ["--config", str(tmp_path / "run.toml"), *meet]
    assert there[2:4] == ["--config", "run.toml"]
    assert there[6:8] == ["--node", "1"]
    assert there[-2:] == ["run.broker=tcp://10.0.0.1:5555", "run.key_file=gpu-b-generator.key"]


def test_a_check_of_one_host_needs_no_commands(tmp_path: Path):
    config = config_of(tmp_path, ["localhost"]).with_settings("generators", device="cpu")
    with pytest.raises(ConfigError, match=r"deploy\.hosts names one host"):
        print_check_commands(config, tmp_path / "run.toml", [], Console())
