"""`slipstream import-verl`: commands, scripts and files in, one TOML file and a report out."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from slipstream.deploy.commands.import_verl import read, vocab_size_of
from slipstream.deploy.interop.verl.hydra import Given
from slipstream.wire.errors import ConfigError

COMMAND = "python3 -m verl.trainer.main_ppo"
SCRIPT = """#!/usr/bin/env bash
NNODES=${NNODES:-1}
TRAIN=(data.train_files=$HOME/a.parquet data.train_batch_size=64)
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo "${TRAIN[@]}" \\
    actor_rollout_ref.rollout.n=4 trainer.nnodes=$NNODES "$@"
"""


def called(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/home/me", **variables}
    return subprocess.run(
        [sys.executable, "-m", "slipstream.deploy.main", "import-verl", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_script_becomes_a_file_and_a_report(tmp_path: Path):
    (tmp_path / "run grpo.sh").write_text(SCRIPT)
    out = tmp_path / "new" / "run.toml"
    done = called("run grpo.sh", "--out", str(out), "trainer.test_freq=-1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    table = tomllib.loads(out.read_text())
    assert table["data"] == {"file": "/home/me/a.parquet"}
    assert table["run"]["groups_per_step"] == 64
    assert table["eval"] == {"every_steps": 0, "at_end": False}
    assert "  data.train_batch_size=64 -> run.groups_per_step = 64" in done.stderr
    assert "(verl's default)" in done.stderr
    assert f"next: slipstream run --config {out} --dry-run" in done.stderr


def test_a_file_that_is_there_is_kept_unless_forced(tmp_path: Path):
    out = tmp_path / "run.toml"
    out.write_text("mine")
    words = (f"{COMMAND} data.train_files=a.parquet", "--out", "run.toml")
    done = called(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.endswith(
        "run.toml exists already: give another --out, or --force to write over it\n"
    )
    assert out.read_text() == "mine"
    assert called(*words, "--force", cwd=tmp_path).returncode == 0
    assert tomllib.loads(out.read_text())["data"] == {"file": "a.parquet"}


def test_an_unknown_key_fails_with_the_nearest_one_and_may_be_left_out(tmp_path: Path):
    words = ("--", *COMMAND.split(), "data.shuffle=False", "data.trian_files=a")
    done = called(*words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert 'data.trian_files="a": not known; did you mean data.train_files?' in done.stderr
    assert "nothing is written" in done.stderr
    done = called("--allow-unknown", *words, cwd=tmp_path)
    assert done.returncode == 0
    assert "#   data.trian_files: not known; did you mean data.train_files?" in done.stdout
    assert tomllib.loads(done.stdout)["data"] == {"shuffle": False}


def test_the_report_is_for_programs_too(tmp_path: Path):
    done = called(f"{COMMAND} data.shuffle=False trainer.nnodes=2", "--json", cwd=tmp_path)
    report = json.loads(done.stderr)
    assert {"key": "data.shuffle", "kind": "kept"}.items() <= report["told"][0].items()
    assert report["written"] == "stdout"
    assert any(line.startswith("deploy.hosts: ") for line in report["todo"])
    assert tomllib.loads(done.stdout)


def test_a_configuration_is_read_and_further_keys_win(tmp_path: Path):
    path = tmp_path / "config.yaml"
    path.write_text("defaults: [x]\ndata:\n  seed: 3\n  shuffle: false\n  val_files: ${a.b}\n")
    given = read([str(path), "data.seed=4", "~data.shuffle"])
    assert given.values == {"data.seed": 4}
    assert given.deleted == ("data.shuffle",)
    assert len(given.ignored) == 2


def test_a_script_reads_no_variable_of_the_environment_but_home(tmp_path: Path):
    (tmp_path / "x.sh").write_text(
        f"KEY=$AWS_SECRET_ACCESS_KEY\n{COMMAND} data.train_files=$HOME/a.parquet "
        "trainer.project_name=$AWS_SECRET_ACCESS_KEY trainer.experiment_name=x-$KEY"
    )
    secrets = {"AWS_SECRET_ACCESS_KEY": "S3CRET"}
    done = called("x.sh", "--allow-unknown", cwd=tmp_path, **secrets)
    assert done.returncode == 0, done.stderr
    assert "S3CRET" not in done.stdout + done.stderr
    assert tomllib.loads(done.stdout)["data"] == {"file": "/home/me/a.parquet"}
    for key in ("trainer.project_name", "trainer.experiment_name"):
        assert f"{key}: depends on AWS_SECRET_ACCESS_KEY: give {key}=VALUE" in done.stderr


def test_what_is_written_is_for_its_owner_alone(tmp_path: Path):
    command = f"{COMMAND} data.train_files=a.parquet"
    assert called(command, "--out", "run.toml", cwd=tmp_path).returncode == 0
    assert (tmp_path / "run.toml").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a: &a [1, 2]\nb: &b [*a, *a]\nc: [*b, *b]", "has an alias"),
        ("a: &a\n  b: *a", "has an alias"),
        ("a: &a {x: 1}\nb:\n  <<: *a", "has an alias"),
        ("a: " + "[" * 3_000 + "]" * 3_000, "nested more than 40 deep"),
        ("a: " + "{b: " * 3_000 + "}" * 3_000, "nested more than 40 deep"),
        ("a: [" + "1," * 100_000 + "]", "holds more than 20000 keys and values"),
        ("a: [" + "1," * 200_000 + "]", "holds more than 262144 characters"),
        ("a: " + "1" * 5_000, "is not valid YAML"),
        ("a: 2001-99-99", "is not valid YAML"),
    ],
)
def test_yaml_beyond_a_bound_is_refused_with_it(tmp_path: Path, text: str, why: str):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=why):
        read([str(path)])


def test_a_value_that_depends_on_a_program_is_told(tmp_path: Path):
    (tmp_path / "x.sh").write_text(f"N=$(nproc)\n{COMMAND} trainer.n_gpus_per_node=${{GPUS:-$N}}")
    done = called("x.sh", cwd=tmp_path)
    assert done.returncode == 1
    key = "trainer.n_gpus_per_node"
    assert f"{key}: depends on $(nproc): give {key}=VALUE as a further word" in done.stderr
    done = called("x.sh", "trainer.n_gpus_per_node=2", cwd=tmp_path)
    assert tomllib.loads(done.stdout)["deploy"] == {"gpus_per_host": 2}


def test_keys_alone_are_a_command():
    assert read(["data.seed=4", "data.shuffle=False"]).values["data.seed"] == 4
    assert read(["data.seed=4 data.shuffle=False"]).values["data.shuffle"] is False


def test_of_several_commands_the_first_is_translated():
    given = read([f"{COMMAND} data.seed=1\n{COMMAND} data.seed=2"])
    assert given.values == {"data.seed": 1}
    assert given.ignored == ("the command starts verl 2 times: the first one is translated",)


def test_what_is_no_command_is_refused():
    for text, why in [
        ("missing.sh", r"missing.sh is no file, and no command of verl's: expected a script"),
        ("pip install verl", r"starts no program of verl's: expected one such as"),
        (f"{COMMAND} 'x", r"cannot be read as a shell script: a ' is not closed"),
    ]:
        with pytest.raises(ConfigError, match=why):
            read([text])


def test_what_is_no_text_is_refused(tmp_path: Path):
    for name, content, why in [
        ("x.sh", b"\xff\xfe", "cannot read the script"),
        ("x.yaml", b"a: [", "is not valid YAML"),
        ("x.yaml", b"- a", "holds no table of settings"),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=why):
            read([str(tmp_path / name)])


def test_the_vocabulary_is_that_of_the_models_folder(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"vocab_size": 32000}')
    path = "actor_rollout_ref.model.path"
    assert vocab_size_of(Given({path: str(tmp_path)})) == 32000
    assert vocab_size_of(Given({path: "Qwen/Qwen2-7B"})) == 0
    assert vocab_size_of(Given({})) == 0
