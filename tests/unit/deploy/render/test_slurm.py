"""What the batch script for Slurm says, and which settings it refuses."""

import shlex
import subprocess
from pathlib import Path

import pytest

from slipstream.deploy.commands.render import render
from slipstream.deploy.config import run_config
from slipstream.deploy.render.slurm import SCRIPT, Origin, slurm_files
from slipstream.wire.errors import ConfigError
from slipstream.wire.settings.load import load_table

GPUS = ("generators.device=cuda", "deploy.gpus_per_host=8", "generators.count=9")


@pytest.fixture
def inputs(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1", "ground_truth": "1"}\n')
    return (
        f"run.model={tmp_path / 'model'}",
        f"data.file={tmp_path / 'train.jsonl'}",
        "generators.device=cpu",
    )


def script(*overrides: str, folder: str = "/srv/a b") -> str:
    origin = Origin(Path("/srv/it's.toml"), overrides, Path(folder), "/usr/bin/python3")
    return slurm_files(run_config(load_table(None, overrides)), origin)[SCRIPT]


def values_of(text: str) -> dict[str, str]:
    lines = [line.partition("=") for line in text.splitlines() if not line.startswith(("#", " "))]
    return {name: value for name, _, value in reversed(lines) if name.isidentifier()}


def test_generators_get_nodes_and_gpus_of_their_own(inputs: tuple[str, ...]):
    text = script(*inputs, *GPUS)
    assert "#SBATCH --nodes=3\n" in text  # 8 generators on the second, 1 on the third
    assert "#SBATCH --gpus-per-node=8\n" in text
    assert values_of(text)["learner_gpus"] == "0"
    text = script(*inputs, *GPUS, "deploy.slurm.generators_per_node=3")
    assert "#SBATCH --nodes=4\n" in text


def test_a_job_can_be_requeued_and_is_told_before_its_end(inputs: tuple[str, ...]):
    lines = script(*inputs, "deploy.slurm.grace_s=77", "deploy.slurm.account=lab").splitlines()
    assert {"#SBATCH --requeue", "#SBATCH --signal=B:TERM@77", "#SBATCH --account=lab"} <= {*lines}
    assert not [
        line for line in lines if line.startswith(("#SBATCH --partition", "#SBATCH --gpus"))
    ]


def test_bash_reads_every_path_and_setting_as_it_was_given(inputs: tuple[str, ...]):
    odd = "run.name=$(touch it) 'a' \"b\" `c`"
    text = script(*inputs, odd)
    settings = text.split("\n\n")[1]
    shown = subprocess.run(
        ["bash", "-c", settings + '\nprintf "%s\\n" "$config" "$work_folder" "${overrides[@]}"'],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert shown[:2] == ["/srv/it's.toml", "/srv/a b"]
    assert odd in shown
    assert shlex.split(values_of(text)["config"]) == ["/srv/it's.toml"]
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_weights_go_where_keys_are_proved_unless_the_user_chose(inputs: tuple[str, ...]):
    assert "weightbus.transport=tcp" in script(*inputs)
    assert "weightbus.transport=tcp" not in script(*inputs, "weightbus.transport=disk")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (("deploy.slurm.partition=a b",), "deploy.slurm.partition"),
        (("deploy.slurm.time_limit=1:00\n#SBATCH --x",), "deploy.slurm.time_limit"),
        (("deploy.slurm.port=65535",), "deploy.slurm.port"),
        (("generators.count=0",), "generators.count"),
        (("generators.device=cuda",), "deploy.gpus_per_host"),
        ((*GPUS, "learner.ranks=9"), "learner.ranks"),
        ((*GPUS, "deploy.slurm.generators_per_node=9"), "deploy.slurm.generators_per_node"),
    ],
)
def test_what_the_script_cannot_do_is_refused(
    inputs: tuple[str, ...], settings: tuple[str, ...], named: str
):
    with pytest.raises(ConfigError, match=named):
        script(*inputs, *settings)


def test_a_file_is_replaced_on_request_only(
    inputs: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config, out = tmp_path / "run.toml", tmp_path / "a job"
    config.write_text("")
    with pytest.raises(ConfigError, match=r"deploy\.slurm\.port"):
        render(config, [*inputs, "deploy.slurm.port=65535"], out, force=False)
    assert not out.exists()
    assert render(config, [*inputs], out, force=False) == 0
    assert f"sbatch '{out / SCRIPT}'" in capsys.readouterr().out
    (out / SCRIPT).write_text("mine")
    with pytest.raises(ConfigError, match="--force"):
        render(config, [*inputs], out, force=False)
    assert (out / SCRIPT).read_text() == "mine"
    assert render(config, [*inputs], out, force=True) == 0
    assert (out / SCRIPT).read_text() != "mine"
