"""Words of a script: what bash would start, as far as it can be known."""

import subprocess
from pathlib import Path

import pytest

from slipstream.deploy.interop.verl.shell import read_script, unknown_names

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
printf '%s\n' \
    "${DATA[@]}" --flag=${HALF} \
    "${EXTRA[@]}" chunks=$CHUNKS \
    quoted='["console","file"]' upper${name:+_set} "path=${HOME}/${gpus}x" "$@" 2>&1 | cat
"""


@pytest.mark.parametrize("variables", [{}, {"DEVICE": "npu", "SIZE": "5"}, {"LENGTH": "100"}])
def test_the_words_are_those_of_bash(variables: dict[str, str]):
    environment = {"HOME": "/home/me", "PATH": "/usr/bin:/bin", **variables}
    command = ["bash", "-c", SCRIPT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    script = read_script(SCRIPT, environment)
    found = next(words for words in script.commands if words[0] == "printf")
    assert found[2:] == done.stdout.splitlines()
    assert not script.skipped


def words(text: str, **variables: str) -> list[str]:
    """Return the words of the last command."""
    return read_script(text, variables).commands[-1]


def test_continued_lines_may_have_comments_between_them():
    assert words("run a \\\n  # why\n  b \\\n  c") == ["run", "a", "b", "c"]


def test_redirections_and_documents_are_no_words():
    assert words("cat > x << EOF\nrun $X 'not closed\nEOF\nrun a >> log 2>&1 < in") == ["run", "a"]
    assert words("run a &> log") == ["run", "a"]


def test_what_a_program_prints_is_not_known():
    found = words('X=$(date +%Y)\nrun name=a-${X} plain=1 "z=`hostname`"')
    assert [unknown_names(word) for word in found] == [[], ["$(date +%Y)"], [], ["`hostname`"]]


def test_a_variable_that_nobody_sets_is_named():
    assert unknown_names(words("run size=$SIZE")[1]) == ["SIZE"]
    assert words("run size=${SIZE:-4}")[1] == "size=4"
    assert words("run size=$SIZE", SIZE="2")[1] == "size=2"
    assert unknown_names(words("TP=${1:-$OTHER}\nrun $TP")[1]) == ["OTHER"]


def test_an_unknown_branch_is_told_and_what_it_may_set_depends_on_it():
    text = (
        "D=${D:-$(probe)}\nN=0\nM=0\nX=(a)\nK=0\n"
        "case $D in\n gpu) N=8 ;;\n *) X+=(b) ;;\nesac\n"
        'if [ "$D" = gpu ]; then M=1; else M=2; fi\n'
        "for i in 1 2; do K=1; done\n"
        'run $N $M "${X[@]}" $K'
    )
    script = read_script(text, {})
    run = next(words for words in script.commands if words[0] == "run")
    assert [unknown_names(word) for word in run[1:]] == 3 * [["$(probe)"]] + [["K"]]
    assert script.skipped == [
        "line 6: a case of $(probe), which is not known",
        "line 10: an if whose condition is not known",
        "line 11: a loop is not followed",
    ]
    script = read_script(text.replace("for i in 1 2; do K=1; done\n", ""), {"D": "gpu"})
    assert script.commands[-1] == ["run", "8", "1", "a", "0"]


def test_what_a_program_answers_is_not_known_and_may_be_negated():
    assert words("if ! false; then A=1; else A=2; fi\nrun $A")[1] == "1"
    assert words("if [ a = b ] || ! [ -z x ]; then A=1; else A=2; fi\nrun $A")[1] == "1"
    assert unknown_names(words("if ! probe; then A=1; else A=2; fi\nrun $A")[1]) == ["A"]
    assert unknown_names(words("if [ -f x ]; then A=1; fi\nrun $A")[1]) == ["A"]


def test_a_variable_behind_an_unknown_test_is_not_known():
    found = words('[ "$A" -gt 1 ] && B=1 || B=2\nrun $B')
    assert unknown_names(found[1]) == ["A"]


def test_an_if_without_its_end_ends_with_the_branch_of_its_case():
    text = "case a in\n b) if [ x = y ]; then A=1\n ;;\n a) A=2 ;;\nesac\nrun $A"
    assert words(text) == ["run", "2"]


def test_functions_are_not_entered():
    script = read_script("die() {\n  run inner\n}\nrun outer", {})
    assert [command for command in script.commands if command[0] == "run"] == [["run", "outer"]]


@pytest.mark.parametrize("text", ["run 'a", 'run "a', "run $(a", "run ${a", "A=(1 2", "run `a"])
def test_what_is_not_closed_is_refused(text: str):
    with pytest.raises(ValueError, match="is not closed"):
        read_script(text, {})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("#" * 2_000_000, "65536 at most"),
        ("run " + "${A:-" * 100 + "1" + "}" * 100, "more than 40 deep"),
        ("run " + "(" * 3_000 + ")" * 3_000, "more than 40 deep"),
        ("run $" + "(" * 3_000 + ")" * 3_000, "more than 40 deep"),
        ("A=" + "(" * 3_000 + ")" * 3_000, "more than 40 deep"),
        ("a=xx\n" + "a=$a$a\n" * 40 + "run $a", "more than 1000000 characters"),
        ("a=(x x)\n" + 'a=("${a[@]}" "${a[@]}")\n' * 40, "more than 1000000 characters"),
        ("a=x\n" + "a=${a//x/xxxx}\n" * 40, "more than 1000000 characters"),
        ("a=" + "1" * 20_000 + "\nrun $((" + "a+" * 20_000 + "1))", "1000000 characters"),
        ("HOME=" + "x" * 20_000 + "\n" + "run ~/a\n" * 5_000, "more than 1000000 characters"),
    ],
)
def test_a_script_beyond_a_bound_is_refused_with_it(text: str, why: str):
    with pytest.raises(ValueError, match=why):
        read_script(text, {})


def test_a_test_of_many_parts_is_not_known():
    assert words(f"[ {'! ' * 40}x ] && A=1\nrun $A") == ["run", "1"]
    assert unknown_names(words(f"[ {'! ' * 5_000}x ] && A=1\nrun $A")[1]) == ["A"]


def test_nothing_is_run(tmp_path: Path):
    target = tmp_path / "made"
    read_script(f"touch {target}\nX=$(touch {target})\nrun $((1 << 99)) $((2**999)) $X", {})
    assert not target.exists()
