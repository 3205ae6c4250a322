"""`slipstream import-verl`: commands and files in, one TOML file and a report out."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from slipstream.deploy.commands.import_verl import read, variables_of, vocab_size_of
from slipstream.deploy.interop.verl.hydra import HydraSettings
from slipstream.wire.errors import ConfigError

COMMAND = "python3 -m verl.trainer.main_ppo"
WORDS = (
    *COMMAND.split(),
    *("algorithm.adv_estimator=grpo", "data.train_files=/home/me/a.parquet"),
    *("data.train_batch_size=64", "actor_rollout_ref.rollout.n=4", "trainer.nnodes=1"),
)


def called(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command."""
    path = os.pathsep.join(sys.path)  # this checkout
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/home/me", "PYTHONPATH": path, **variables}
    return subprocess.run(
        [sys.executable, "-m", "slipstream.deploy.main", "import-verl", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_command_becomes_a_file_and_a_report(tmp_path: Path):
    out = tmp_path / "new" / "run.toml"
    done = called("--out", str(out), "--", *WORDS, "trainer.test_freq=-1", cwd=tmp_path)
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
    words = ("--out", "run.toml", "--", *COMMAND.split(), "data.train_files=a.parquet")
    done = called(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.endswith(
        "run.toml exists already: give another --out, or --force to write over it\n"
    )
    assert out.read_text() == "mine"
    assert called("--force", *words, cwd=tmp_path).returncode == 0
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
    words = (*COMMAND.split(), "data.shuffle=False", "trainer.nnodes=2")
    done = called("--json", "--", *words, cwd=tmp_path)
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
    assert len(given.remarks) == 2


def test_what_is_written_is_for_its_owner_alone(tmp_path: Path):
    words = ("--out", "run.toml", "data.train_files=a.parquet")
    assert called(*words, cwd=tmp_path).returncode == 0
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


def test_keys_alone_are_a_command():
    assert read(["data.seed=4", "data.shuffle=False"]).values["data.seed"] == 4


def test_a_script_is_refused_with_the_option_that_runs_it(tmp_path: Path):
    path = tmp_path / "run grpo.sh"
    path.write_text(f"{COMMAND} data.seed=1")
    with pytest.raises(ConfigError, match=r"is no \.yaml file.*import-verl --run .*run grpo\.sh"):
        read([str(path)])


def test_a_variable_is_a_name_and_a_value(tmp_path: Path):
    assert variables_of(["A=1", "B_2=x=y z", "C="]) == {"A": "1", "B_2": "x=y z", "C": ""}
    for text in ("A", "1A=2", "=1"):
        with pytest.raises(ConfigError, match=f"--var {text}: expected NAME=VALUE"):
            variables_of([text])
    done = called("--var", "A=1", "data.seed=1", cwd=tmp_path)
    assert done.returncode == 2
    assert "--var sets a variable of a script: --run SCRIPT is missing" in done.stderr


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "something to read is required: expected a command after --, such as -- python3"),
        (["missing.sh"], "missing.sh is no file, and no command of verl's: expected a command"),
        (["pip", "install", "verl"], "pip is no file, and no command of verl's: expected a comm"),
        ([f"{COMMAND} data.seed=1"], "a command in quotes is one word: leave the quotes out"),
        (["data.seed=4 data.shuffle=False"], "a command in quotes is one word"),
    ],
)
def test_what_is_no_command_is_refused(words: list[str], reason: str):
    with pytest.raises(ConfigError, match=reason):
        read(words)


def test_what_is_no_text_is_refused(tmp_path: Path):
    for name, content, why in [
        ("x.yaml", b"a: [", "is not valid YAML"),
        ("x.yaml", b"- a", "holds no table of settings"),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=why):
            read([str(tmp_path / name)])


def test_the_vocabulary_is_that_of_the_models_folder(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"vocab_size": 32000}')
    path = "actor_rollout_ref.model.path"
    assert vocab_size_of(HydraSettings({path: str(tmp_path)})) == 32000
    assert vocab_size_of(HydraSettings({path: "Qwen/Qwen2-7B"})) == 0
    assert vocab_size_of(HydraSettings({})) == 0
