"""What of a script's text has a value of the sandbox: names that nobody sets, and $(...)."""

from pathlib import Path

import pytest

from slipstream.deploy.interop.verl.script_run import ScriptRun, settings_of
from slipstream.deploy.interop.verl.script_text import substitutions, unset_names


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("data.train_files=$DATA_DIR/train.parquet", ["DATA_DIR"]),
        ('f="${DATA_DIR}/a" g=${SIZES[0]} h=${MODEL##*/} i=${#L[@]}', "DATA_DIR SIZES MODEL L"),
        ("n=$((GPUS * HOSTS / $(nproc) + 0x1F))", "GPUS HOSTS"),
        ("a=${A:-1} b=${B-1} c=${C:=1} d=${D:+x} e=$C", ""),
        ("echo ${A:-$B} $A", "B A"),
        ("$HOME $PATH $PWD $RANDOM ${BASH_SOURCE[0]} $0 $1 $@ $# $? $$ $! ${1} ${@:2}", ""),
        ("$NODES", ""),  # of --var
        ("A=1; export B=2; local C; read -r D E; for F in x; do G+=(1); H[0]=1; done; "
         "echo $A $B $C $D $E $F $G $H", ""),
        ("export WANDB_API_KEY\nkey=$WANDB_API_KEY", ["WANDB_API_KEY"]),
        ("printf -v A x; while read -r B; do echo $A $B; done", ""),
        ("# of $A, and don't\nb=1 # $B\nc='$C' d=\\$D e=$'\\'$E' f=x#$F", "F"),
        ("\"['$A/x', '$B']\" '$C' \"$(awk '{print $NF}' \"$D\")\"", "A B D"),
        ("cat <<EOF\ndon't: $A\nEOF\ncat <<'END'\n$B isn't\nEND\necho '$C' $D", "A D"),
        ("python3 -m verl a=1 \\\n    b=$B", "B"),
    ],
)  # fmt: skip
def test_names_that_nobody_sets(text: str, names: str | list[str]):
    expected = names.split() if isinstance(names, str) else names
    assert unset_names(text, ("NODES",)) == expected


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("host=$(hostname)", ["$(hostname)"]),
        ('N="$(nvidia-smi -L | wc -l)" # $(no)', ["$(nvidia-smi -L | wc -l)"]),
        ("a=`date` b=$(ls \"$(which \"$0\")\")", ["`date`", '$(ls "$(which "$0")")']),
        ("a=(1 2) b=$((1 + 2)) c='$(no)' (cd x) $(x) $(x)", ["$(x)"]),
        ("case $1 in a) b=$(c);; esac; d=$(e)", ["$(c)", "$(e)"]),
    ],
)  # fmt: skip
def test_commands_whose_output_is_a_value(text: str, found: list[str]):
    assert substitutions(text) == found


def test_both_are_remarks():
    script = ScriptRun(
        commands=[["python3", "-m", "verl.trainer.main_ppo", "trainer.nnodes=1"]],
        code=0,
        unset=["DATA_DIR", *(f"N{number}" for number in range(25))],
        computed=["$(hostname)", "$(nvidia-smi -L |\n wc -l)"],
    )
    unset, computed = settings_of(Path("run.sh"), script).remarks
    assert unset.startswith("run.sh expands names that neither it nor --var NAME=VALUE sets")
    assert "of yours: DATA_DIR, N0, " in unset
    assert unset.endswith(", N18, and 6 more")
    assert computed == (
        "run.sh: computed in the sandbox, so look at what they gave: $(hostname); "
        "$(nvidia-smi -L | wc -l)"
    )
