"""`slipstream render` writes everything or nothing, and over nothing by accident."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from slipstream.wire.errors import ConfigError
from tests.support.blank_model import write_blank_model
from tests.support.commands import call_command
from tests.support.waiting import HANG_S, until


@pytest.fixture
def config(tmp_path: Path) -> Path:
    write_blank_model(tmp_path / "model", hidden=16, layers=1)
    path = tmp_path / "run.toml"
    path.write_text(
        f'run.name = "demo"\nrun.model = "{tmp_path / "model"}"\ndata.file = "train.jsonl"\n'
        'generators.device = "cpu"\n'
    )
    return path


def render(
    target: str, config: Path, overrides: Sequence[str], *, out: Path, force: bool = False
) -> int:
    return call_command("render", target, *overrides, config=config, out=out, force=force)


@pytest.mark.parametrize("target", ["slurm", "kubernetes", "compose", "skypilot"])
def test_it_says_what_it_wrote_and_what_is_next(
    target: str, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "out of it"
    assert render(target, config, [], out=out) == 0
    printed = capsys.readouterr().out
    written = sorted(path.name for path in out.iterdir())
    assert sorted(line for line in printed.splitlines() if line.startswith("wrote ")) == [
        f"wrote {out / name}" for name in written
    ]
    following = printed.splitlines()[-1].removeprefix("next: ")
    assert following != printed.splitlines()[-1]
    subprocess.run(["bash", "-n", "-c", following], check=True)
    for path in out.iterdir():
        if path.suffix in {".sh", ".sbatch"}:
            subprocess.run(["bash", "-n", path], check=True)
            assert os.access(path, os.X_OK)
        if path.suffix == ".yaml":
            assert list(yaml.safe_load_all(path.read_text()))


def test_files_that_are_there_are_kept_unless_forced(config: Path, tmp_path: Path):
    render("slurm", config, [], out=tmp_path / "out")
    (tmp_path / "out" / "job.sbatch").write_text("mine")
    with pytest.raises(ConfigError, match=r"holds job.sbatch, run.toml already: .* --force"):
        render("slurm", config, [], out=tmp_path / "out")
    assert (tmp_path / "out" / "job.sbatch").read_text() == "mine"
    render("slurm", config, [], out=tmp_path / "out", force=True)
    assert (tmp_path / "out" / "job.sbatch").read_text() != "mine"


def test_nothing_is_written_where_a_setting_is_bad(config: Path, tmp_path: Path):
    for override, why in [
        ("run.nmae=x", "did you mean"),
        ('deploy.kubernetes.overrides=["run.modle=/m"]', "unknown setting run.modle"),
        ("deploy.kubernetes.namespace=Not_A_Name", "namespace"),
    ]:
        with pytest.raises(ConfigError, match=why):
            render("kubernetes", config, [override], out=tmp_path / "out")
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("target", "file"),
    [("kubernetes", "settings.yaml"), ("compose", "run.toml"), ("skypilot", "run.toml")],
)
def test_settings_there_differ_where_the_target_says_so(
    config: Path, tmp_path: Path, target: str, file: str
):
    overrides = [f'deploy.{target}.overrides=["run.model=/there/model"]']
    render(target, config, overrides, out=tmp_path / "out")
    text = (tmp_path / "out" / file).read_text()
    assert 'model = "/there/model"' in text
    assert str(tmp_path / "model") not in text


def test_what_one_host_cannot_have_is_refused_for_compose(config: Path, tmp_path: Path):
    """Else engines would get GPUs that the learner has, and its second node would be missing."""
    for overrides in [
        ["generators.device=cuda", "generators.count=3", "deploy.gpus_per_host=2"],
        ["learner.ranks=2", "learner.ranks_per_node=1"],
    ]:
        with pytest.raises(ConfigError, match=r"compose is for one host, .* the run needs 2"):
            render("compose", config, overrides, out=tmp_path / "out")


def test_the_password_of_redis_is_shown_to_the_broker_alone(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Reward workers run code that a model wrote, beside the settings' folder."""
    monkeypatch.chdir(tmp_path)
    render("compose", config, ["deploy.max_restarts=3"], out=tmp_path / "out")
    services = yaml.safe_load((tmp_path / "out" / "compose.yaml").read_text())["services"]
    shown = {name for name, service in services.items() if "redis_password" in str(service)}
    assert shown == {"redis", "broker"}
    for name in services.keys() - {"redis"}:
        assert services[name]["tmpfs"] == [str(tmp_path / "out")], "it lies in a mounted folder"
        assert services[name]["restart"] == "on-failure:3"
    with pytest.raises(ConfigError, match="a folder within it as --out"):
        render("compose", config, [], out=tmp_path)


def test_each_kind_of_role_has_the_image_that_was_named(config: Path, tmp_path: Path):
    """Those for GPUs hold the libraries of one kind each."""
    images = '={ learner = "l:1", generator = "g:1" }'
    overrides = [
        f"deploy.{one}.image{end}"
        for one in ("compose", "kubernetes")
        for end in ("=c:1", f"s{images}")
    ]
    overrides.append("generators.count=1")
    render("compose", config, overrides, out=tmp_path / "compose")
    services = yaml.safe_load((tmp_path / "compose" / "compose.yaml").read_text())["services"]
    found = {name: service["image"] for name, service in services.items() if name != "redis"}
    wanted = {"broker": "c:1", "learner": "l:1", "generator-0": "g:1", "reward-worker-0": "c:1"}
    assert found == wanted
    render("kubernetes", config, overrides, out=tmp_path / "k8s")
    for file, image in (("broker", "c:1"), ("learner", "l:1"), ("generators", "g:1")):
        things = list(yaml.safe_load_all((tmp_path / "k8s" / f"{file}.yaml").read_text()))
        pods = [one["spec"]["template"]["spec"] for one in things if "template" in one["spec"]]
        (pod,) = pods
        assert [one["image"] for one in (*pod["containers"], *pod["initContainers"])] == [image] * 2
    with pytest.raises(ConfigError, match="images"):
        render("compose", config, ['deploy.compose.images={ lerner = "x" }'], out=tmp_path / "no")


def test_script_of_skypilot_is_bash_on_every_node(config: Path, tmp_path: Path):
    render("skypilot", config, ["generators.count=2"], out=tmp_path / "out")
    task = yaml.safe_load((tmp_path / "out" / "task.yaml").read_text())
    assert task["num_nodes"] == 2
    for part in (task["run"], task["setup"]):
        subprocess.run(["bash", "-n"], input=part, text=True, check=True)
    assert "SKYPILOT_NODE_RANK" in task["run"]
    assert "SKYPILOT_NODE_IPS" in task["run"]


ROLE = """#!/bin/bash
trap 'echo "${0##*/} ends" >>"$ENDED"; exit 0' TERM
: >"$ENDED.${0##*/}"
while :; do sleep 0.02; done
"""


def test_a_node_of_skypilot_that_is_told_to_end_waits_for_nobody(config: Path, tmp_path: Path):
    """Its learner saves and ends in order, though the run is not complete: so must the others."""
    render("skypilot", config, ["deploy.skypilot.storage=s3://b"], out=tmp_path / "out")
    task = yaml.safe_load((tmp_path / "out" / "task.yaml").read_text())
    assert task["file_mounts"]["/shared"]["mode"] == "MOUNT_CACHED", "the ledger is appended to"
    tools, ended = tmp_path / "tools", tmp_path / "ended"
    tools.mkdir()
    roles = ["start-broker", "start-generator", "start-learner", "start-reward-worker"]
    for role in roles:
        (tools / role).write_text(ROLE)
        (tools / role).chmod(0o755)
    (tmp_path / "slipstream-keys").mkdir()
    environment = {
        "PATH": f"{tools}:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "ENDED": str(ended),
        "SKYPILOT_NODE_RANK": "0",
        "SKYPILOT_NODE_IPS": "127.0.0.1",
    }
    with subprocess.Popen(["bash", "-c", task["run"]], env=environment) as node:
        until(lambda: all(Path(f"{ended}.{role}").exists() for role in roles), str)
        node.terminate()
        try:
            assert node.wait(HANG_S) == 0
        finally:
            node.kill()
    order = ended.read_text().split(" ends\n")[:-1]
    assert sorted(order) == roles
    assert (order[0], order[-1]) == ("start-learner", "start-broker")
