"""Scripts that start verl, run by bash in the sandbox: what is recorded, what they cannot do."""

import os
import socket
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.deploy.interop.verl.script_run import LIMITS, ScriptRun, run_script, settings_of
from slipstream.wire.errors import ConfigError
from tests.support.bubblewrap import bubblewrap_works
from tests.support.waiting import HANG_S

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not bubblewrap_works(), reason="bubblewrap does not work here"),
]
ROOMY = replace(LIMITS, own_s=HANG_S, cpu_s=HANG_S)
IMPATIENT = replace(LIMITS, own_s=1.0, cpu_s=1.0)
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/home/me",
    "PYTHONPATH": os.pathsep.join(sys.path),  # this checkout
}
VERL = "python3 -m verl.trainer.main_ppo"
SCRIPT = r"""#!/usr/bin/env bash
set -xeuo pipefail
: "${LENGTH:=$((1024 * 2))}"
DEVICE=${DEVICE:-gpu}
name='a b'
BATCH=${BATCH:-${SIZE:-8}}  # of prompts
export HALF=$((LENGTH / 2))
case "${DEVICE}" in
    gpu|cuda)
        gpus=8
        ;;
    npu) gpus=16 ;;
    *) echo "what?" >&2; exit 1 ;;
esac
if [ "${gpus}" -gt 4 ] && [ -n "$name" ]; then
    SEQS=64
elif [ "$gpus" = 2 ]; then
    SEQS=16
else
    SEQS=1
fi
[ "$gpus" -gt 16 ] && CHUNKS=2 || CHUNKS=null
DATA=(
    data.files="['$HOME/a.parquet', '$HOME/b.parquet']"
    # a comment
    data.size=${BATCH}
)
EXTRA=()
EXTRA+=(n.seqs=${SEQS} "x.name=${name}")
python3 -m verl.trainer.main_ppo \
    "${DATA[@]}" --flag=${HALF} \
    "${EXTRA[@]}" chunks=$CHUNKS \
    quoted='["console","file"]' upper${name:+_set} "path=${HOME}/${gpus}x" "$@" 2>&1 | cat
"""


def ran(tmp_path: Path, text: str, **variables: str) -> ScriptRun:
    path = tmp_path / "run grpo.sh"
    path.write_text(text)
    return run_script(path, {"HOME": "/home/me", **variables}, ROOMY)


@pytest.mark.parametrize("variables", [{}, {"DEVICE": "npu", "SIZE": "5"}, {"LENGTH": "100"}])
def test_words_are_those_of_bash(tmp_path: Path, variables: dict[str, str]):
    environment = {"HOME": "/home/me", "PATH": "/usr/bin:/bin", **variables}
    shown = SCRIPT.replace("python3 -m verl.trainer.main_ppo", r"printf '%s\n'")
    command = ["bash", "-c", shown]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    script = ran(tmp_path, SCRIPT, **variables)
    assert script.commands == [[*VERL.split(), *done.stdout.splitlines()]]
    assert script.code == 0


def test_a_script_has_the_settings_of_its_command(tmp_path: Path):
    text = f"""#!/usr/bin/env bash
NNODES=${{NNODES:-1}}
TRAIN=(data.train_files=$HOME/a.parquet data.train_batch_size=64)
{VERL} \\
    algorithm.adv_estimator=grpo "${{TRAIN[@]}}" \\
    actor_rollout_ref.rollout.n=4 trainer.nnodes=$NNODES "$@"
"""
    given = settings_of(tmp_path, ran(tmp_path, text))
    assert given.values == {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": "/home/me/a.parquet",
        "data.train_batch_size": 64,
        "actor_rollout_ref.rollout.n": 4,
        "trainer.nnodes": 1,
    }
    assert given.remarks == ()


def test_functions_braces_documents_and_loops_are_bashs(tmp_path: Path):
    text = f"""
name() {{ local size=$1; cat <<EOF
of "$size" $(printf '%s' x)
EOF
}}
for seed in {{1..2}}; do
    {VERL} a.name="$(name 7)" seed=$seed l=[{{a,b}}] "empty=" 'line=1
2'
done
"""
    assert [command[3:] for command in ran(tmp_path, text).commands] == [
        ['a.name=of "7" x', f"seed={seed}", "l=[a]", "l=[b]", "empty=", "line=1\n2"]
        for seed in (1, 2)
    ]


def test_programs_are_recorded_wherever_they_are_started(tmp_path: Path):
    text = """
ray start --head && torchrun --nproc 8 a.py; nohup python b.py > /dev/null 2>&1 &
exec ray job submit -- python3 -m verl.trainer.main_ppo "basename=$(basename "$0" .sh)"
"""
    commands = ran(tmp_path, text).commands
    assert sorted(commands) == [
        ["python", "b.py"],
        ["ray", "job", "submit", "--", *VERL.split(), "basename=run grpo"],
        ["ray", "start", "--head"],
        ["torchrun", "--nproc", "8", "a.py"],
    ]


def test_other_commands_and_the_end_are_remarks(tmp_path: Path):
    path = tmp_path / "run grpo.sh"
    text = f"N=$(python3 -c 'print(1)')\n{VERL} a=$N b=1 c=$C/d\n{VERL} b=2\nnvidia-smi"
    given = settings_of(path, ran(tmp_path, text))
    assert given.values == {"a": "", "b": 1, "c": "/d"}
    assert [remark.removeprefix(str(path)) for remark in given.remarks][:4] == [
        ": python3 -c 'print(1)' was recorded, not run, and printed nothing",
        " starts verl 2 times: the first one is translated",
        " expands names that neither it nor --var NAME=VALUE sets, and that have no value of "
        "yours: C",
        ": computed in the sandbox, so look at what they gave: $(python3 -c 'print(1)')",
    ]
    assert "ended with exit code 127 and printed last" in given.remarks[4]
    assert given.remarks[4].endswith("nvidia-smi: command not found")


def test_a_command_that_was_not_caught_is_named(tmp_path: Path):
    path = tmp_path / "run grpo.sh"
    with pytest.raises(ConfigError) as caught:
        settings_of(path, ran(tmp_path, f"python a.py\n/opt/{VERL} a=1"))
    message = str(caught.value)
    assert "started no program of verl's" in message
    assert "Recorded are python, python3, torchrun, ray by these names" in message
    assert "recorded was python a.py; it ended with exit code 127" in message
    assert "/opt/python3: No such file or directory. Instead, give the command's words" in message
    with pytest.raises(ConfigError, match="recorded was nothing; it ended with exit code 0 and pr"):
        settings_of(path, ran(tmp_path, "true"))


def test_no_variable_of_the_caller_is_in_the_output(tmp_path: Path):
    text = f"""
echo "$SECRET"; env >&2; cat /proc/*/environ >&2
{VERL} data.train_files=$HOME/a.parquet trainer.project_name=x$SECRET trainer.nnodes=$NODES
false
"""
    (tmp_path / "x.sh").write_text(text)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "slipstream.deploy.main", "import-verl"),
            *("--run", "x.sh", "--var", "NODES=2", "trainer.test_freq=-1"),
        ],
        cwd=tmp_path,
        env={**ENVIRONMENT, "SECRET": "S3CRET"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "S3CRET" not in done.stdout + done.stderr
    table = tomllib.loads(done.stdout)
    assert table["data"] == {"file": "/home/me/a.parquet"}
    assert table["logging"]["project"] == "x"
    assert table["eval"] == {"every_steps": 0, "at_end": False}
    assert "deploy.hosts: the names of your 2 hosts" in done.stdout
    first = done.stderr.splitlines()[0]
    assert first.startswith("running x.sh with bash in a sandbox, for at most 20 s: without net")
    assert first.endswith(
        "Its variables are PATH, HOME, NODES. python, python3, torchrun, ray are recorded, not run"
    )


def test_files_outside_are_neither_changed_nor_seen(tmp_path: Path):
    kept = tmp_path / "kept"
    kept.write_text("mine")
    text = f"""
rm -rf {tmp_path}; echo x > {kept}; echo x > {tmp_path}/made; mkdir -p $HOME/made
touch inside /tmp/inside && {VERL} seen=$(cat {kept})
"""
    assert ran(tmp_path, text, HOME=str(tmp_path)).commands == [[*VERL.split(), "seen="]]
    assert kept.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "run grpo.sh"]


@pytest.mark.parametrize("name", ["main.py", "script", "-x.sh"])
def test_a_script_may_have_any_name(tmp_path: Path, name: str):
    path = tmp_path / name
    path.write_text(f'{VERL} "a=$0" b=$(ls)')
    assert run_script(path, {}, ROOMY).commands == [[*VERL.split(), f"a={name}", f"b={name}"]]


def test_a_script_may_empty_folders(tmp_path: Path):
    text = f"touch .x y; rm -rf /tmp/* ./* .x; {VERL} a=1"
    assert ran(tmp_path, text).commands == [[*VERL.split(), "a=1"]]
    emptied = ran(tmp_path, f"{VERL} a=1; rm -rf /box/*/*; rm -rf /box/*; /bin/false")
    assert (emptied.commands, emptied.code) == ([], 1)


def test_the_network_is_not_reached(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        text = f"""
if (exec 3<> /dev/tcp/127.0.0.1/{port}); then N=1; else N=0; fi
{VERL} n=$N
"""
        assert ran(tmp_path, text).commands == [[*VERL.split(), "n=0"]]
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("echo waiting; sleep 1000", "it ran for more than 1 s. It printed last: waiting. Instead"),
        (f"{VERL} a=1 &\nwhile true; do :; done", "it ran for more than 1 s"),
        ("while true; do echo 0123456789; done", "bytes"),
        ("for i in {1..200}; do sleep 1000 & done; wait", "it"),
    ],
)
def test_a_run_beyond_a_limit_is_ended_with_it(tmp_path: Path, text: str, reason: str):
    path = tmp_path / "x.sh"
    path.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        run_script(path, {}, IMPATIENT)


def test_what_is_no_script_is_refused(tmp_path: Path):
    path = tmp_path / "x.sh"
    for content, reason in [
        (b"\xff\xfe", "cannot read the script"),
        (b"#" * 70_000, "70000 characters are no script: 65536 at most"),
    ]:
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=reason):
            run_script(path, {})
    with pytest.raises(ConfigError, match="cannot read the script"):
        run_script(tmp_path / "missing.sh", {})


def test_without_a_sandbox_no_script_is_run(tmp_path: Path):
    bubblewrap = tmp_path / "bwrap"
    bubblewrap.write_text("#!/bin/sh\necho not allowed >&2\nexit 1\n")
    bubblewrap.chmod(0o755)
    (tmp_path / "x.sh").write_text(f"touch made\n{VERL} a=1")
    done = subprocess.run(
        [sys.executable, "-m", "slipstream.deploy.main", "import-verl", "--run", "x.sh"],
        cwd=tmp_path,
        env={**ENVIRONMENT, "PATH": f"{tmp_path}:{os.defpath}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "x.sh is not run: --run needs a sandbox, which does not start here" in done.stderr
    assert "give the command's words after --, or the YAML file" in done.stderr
    assert "not allowed" in done.stderr
    assert "reward.sandbox" not in done.stderr
    assert not (tmp_path / "made").exists()
