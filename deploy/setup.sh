#!/usr/bin/env bash
# Makes .venv with everything that a machine without a GPU needs, pinned. A second call does
# nothing. uv installs where it can be had; pip does where it cannot, and for what uv could not.
# On a GPU machine every file is compared with its hash in deploy/locks.
#   ./deploy/setup.sh
#   PYTHON=/path/to/python3.11 ./deploy/setup.sh    another interpreter
#   SETUP_WITH=pip ./deploy/setup.sh                never uv
#   TORCH_INDEX=URL ./deploy/setup.sh               another index of torch's CPU builds; "" for none
#   ./deploy/setup.sh gpu                           .venv for a machine with GPUs; gigabytes
#   FLASH_ATTN=no ./deploy/setup.sh gpu             without flash-attn, which may compile for an hour
#   ./deploy/setup.sh rehearsal                     .rehearsal, with the versions of a GPU machine
set -euo pipefail
cd "$(dirname "$0")/.."

case "${1:-cpu}" in
cpu)
    venv=.venv target=setup wanted='3.11, 3.12 or 3.13'
    pythons=(python3.11 python3.12 python3 python python3.13)
    ;;
gpu)
    venv=.venv target=setup-gpu wanted=3.12
    pythons=(python3.12 python3 python "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12.*/bin/python)
    ;;
rehearsal)
    venv=.rehearsal target=rehearsal-setup wanted=3.12
    pythons=(python3.12 python3 python "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12.*/bin/python)
    ;;
*)
    echo "setup: unknown environment '$1': cpu, gpu or rehearsal" >&2
    exit 2
    ;;
esac
constraints=deploy/constraints-${1:-cpu}.txt
pins="$constraints deploy/setup/requirements-cpu.txt deploy/setup/requirements-cpu-nodeps.txt"
[ "$target" != setup-gpu ] || pins=$(echo deploy/locks/gpu-*.txt deploy/locks/flash-attn.txt)
programs="deploy/setup.sh deploy/setup/uv_sources.py deploy/setup/download_size.py deploy/setup/torchvision_operators.py"
# shellcheck disable=SC2086
stamp=$({ cat $pins pyproject.toml $programs && echo "$target ${FLASH_ATTN:-}"; } |
    sha256sum | cut -d' ' -f1)
describe() { # interpreter: prints "CPython 3.11", or nothing for what is none
    "$1" -c 'import sys, platform as p
print(p.python_implementation(), "%d.%d" % sys.version_info[:2])' 2>/dev/null || true
}
is_complete() { # and it runs, as the Python that was asked for
    [ "$(cat "$venv/.slipstream-setup" 2>/dev/null || true)" = "$stamp" ] || return 1
    local have
    have=$(describe "$venv/bin/python")
    [ -n "$have" ] && { [ -z "${PYTHON:-}" ] || [ "$(describe "$PYTHON")" = "$have" ]; }
}
if is_complete; then
    exit 0
fi
exec 9<deploy # two calls at once: the second one waits, and finds nothing left to do
if command -v flock >/dev/null && ! flock --nonblock 9; then
    echo "setup: another call makes $venv; waiting for it"
    flock 9
    if is_complete; then
        exit 0
    fi
fi

candidates=("${pythons[@]}")
[ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
python='' seen=()
for candidate in "${candidates[@]}"; do
    what=$(describe "$candidate")
    series=${what#CPython }
    if [ "$what" = "CPython $series" ] && [[ " ${wanted//,/ } " == *" $series "* ]]; then
        python=$candidate
        break
    elif [ -n "$what" ]; then
        seen+=("$candidate is $what")
    fi
done
if [ -z "$python" ]; then
    printf 'setup: CPython %s is needed; ' "$wanted" >&2
    if [ -n "${PYTHON:-}" ] && [ ${#seen[@]} = 0 ]; then
        printf 'PYTHON=%s cannot be run' "$PYTHON" >&2
    elif [ ${#seen[@]} = 0 ]; then
        printf 'no Python was found on PATH' >&2
    else
        printf 'found: '
        printf '%s; ' "${seen[@]}"
    fi >&2
    echo >&2
    echo "setup: name one with PYTHON=/path/to/python${wanted%%[, ]*} make ${target}" >&2
    exit 2
fi

mkdir -p .cache
log=$PWD/.cache/setup.log
[ "$venv" = .venv ] || log=$PWD/.cache/setup-${venv#.}.log
part='the environment'
: >"$log"
failed() {
    {
        echo "setup: failed at $part; the end of $log:"
        tail -n 15 "$log" | sed 's/^/    /'
        echo "setup: nothing is used of an environment that is not complete. Once the cause is"
        echo "setup: mended, call it again; what was downloaded is kept. It needs a C compiler and"
        echo "setup: a package index (PIP_INDEX_URL, or pip's configuration, names another one)."
    } >&2
    exit 1
}

started=$SECONDS
version=$("$python" -c 'import platform; print(platform.python_version())')
where=$("$python" -c 'import sys; print(sys.executable)')
echo "setup: a new environment in $venv with CPython $version ($where)"
"$python" -m venv --clear "$venv" >>"$log" 2>&1 || failed
new=$venv/bin/python

# For an index that is asked alone: without the indexes and folders that a user configured.
alone=(env -u PIP_FIND_LINKS -u PIP_EXTRA_INDEX_URL -u PIP_INDEX_URL -u UV_FIND_LINKS
    -u UV_EXTRA_INDEX_URL -u UV_INDEX_URL -u UV_INDEX -u UV_DEFAULT_INDEX
    PIP_CONFIG_FILE=/dev/null UV_NO_CONFIG=1)
apart=(env)
with_pip() { "${apart[@]}" "$new" -m pip install --disable-pip-version-check --no-compile \
    "$@" >>"$log" 2>&1; }
by=pip sources=()
find_uv() { # which works here, and where it is to look
    local words
    if ! uv=$(command -v uv); then
        uv=$venv/bin/uv
        with_pip --quiet -c "$constraints" uv || return 1
    fi
    words=$("$uv" --version 2>>"$log") || return 1
    "$new" deploy/setup/uv_sources.py >"$venv/uv-sources" 2>>"$log" || return 1
    mapfile -t sources <"$venv/uv-sources"
    by=$(cut -d' ' -f1,2 <<<"$words")
}
if [ "${SETUP_WITH:-uv}" != pip ] && ! find_uv; then
    echo "setup: uv cannot be used here ($log); pip installs"
fi
try_install() { # what for, arguments that uv and pip have in common
    part=$1
    shift
    local began=$SECONDS who=$by
    printf 'setup: %s: ' "$part"
    if [ "$by" = pip ] ||
        ! "${apart[@]}" "$uv" pip install --python "$new" "${sources[@]}" "$@" >>"$log" 2>&1; then
        [ "$by" = pip ] || who="pip, as uv could not"
        with_pip "$@" || { echo failed && return 1; }
    fi
    printf '%d s (%s)\n' $((SECONDS - began)) "$who"
}
install() { try_install "$@" || failed; }

offers_torch() { # index: it has both for this Python; one that does not answer is left soon
    local pin name
    for name in torch torchvision; do
        pin=$(sed -n "s/^$name==//p" "$constraints")
        "${alone[@]}" "$new" -m pip index versions "$name" --index-url "$1" --timeout 5 --retries 0 \
            2>>"$log" | grep -qE "[ ,]${pin//./\\.}(\\+[a-z0-9.]+)?(,|\$)" || return 1
    done
}
install_torch() { # torch and torchvision from one place: their operators fit each other
    local index=${TORCH_INDEX-https://download.pytorch.org/whl/cpu} configured name value why
    configured=$("$new" -m pip config list 2>>"$log" || true)
    if [ "$target" != setup ] || [ -z "$index" ]; then
        why='no index of CPU builds is asked'
    elif grep -qiE "no.index='?(1|true|yes|on)" <<<"$configured"; then
        why='pip is to ask no index'
    elif [ -z "${TORCH_INDEX:-}" ] && [ -e /dev/nvidiactl ]; then
        why='this machine has a GPU'
    else
        for name in cert proxy trusted-host; do # how indexes are reached
            value=$(sed -n "s/^[a-z:]*\.$name='\(.*\)'\$/\1/p" <<<"$configured" | tail -n 1)
            name=${name^^}
            [ -z "$value" ] || alone+=("PIP_${name//-/_}=$value")
        done
        why="$index does not answer or has no such torch"
        if offers_torch "$index"; then
            if from_index_alone "$index"; then
                return
            fi
            why="$index failed"
        fi
    fi
    echo "setup: $why: torch comes from the package index, $(size_of_torch)"
    install "1 of 5, torch" -c "$constraints" torch torchvision
}
from_index_alone() {
    local sources=() apart=("${alone[@]}")
    try_install "1 of 5, torch for CPUs, from $1" \
        --no-deps --index-url "$1" -c "$constraints" torch torchvision
}
size_of_torch() { # to download, as far as the index says it
    local lock=$venv/pylock.toml
    [ "$by" != pip ] && printf 'torch\ntorchvision\n' | "$uv" pip compile --quiet --python "$new" \
        "${sources[@]}" -c "$constraints" --format pylock.toml -o "$lock" - >>"$log" 2>&1 &&
        "$new" deploy/setup/download_size.py "$lock" 2>>"$log" || echo 'gigabytes where that is a CUDA build'
}
compile() { # once, so that no role does at its start
    local began=$SECONDS
    printf 'setup: %s, bytecode: ' "$1"
    # Libraries have templates that are no Python, which it names and passes over. What no role
    # imports is left out: it is compiled where it is imported.
    env -u PYTHONPYCACHEPREFIX "$new" -m compileall -q -j 0 \
        -x '/(tests?|moto|selenium|rllib|multimodal_gen)/|/transformers/models/' \
        "$venv"/lib/python3.*/site-packages >>"$log" 2>&1 || true
    compgen -G "$venv/lib/python3.*/site-packages/*/__pycache__/*.pyc" >/dev/null ||
        printf 'none could be written (%s); ' "$log"
    printf '%d s\n' $((SECONDS - began))
}

if [ "$target" = setup-gpu ]; then
    locks=deploy/locks
    install "1 of 4, learner and generators" --require-hashes \
        -r "$locks/gpu-learner-3.12.txt" -r "$locks/gpu-generator-3.12.txt"
    if [ "${FLASH_ATTN:-}" = no ]; then
        echo "setup: 2 of 4, flash-attn: left out (FLASH_ATTN=no)"
    else
        install "2 of 4, flash-attn" --require-hashes --no-deps --no-build-isolation \
            -r "$locks/flash-attn.txt"
        # It has an older flash_attn.cute in the place of flash-attn-4's, which is put back.
        awk '/^[a-z]/ { own = /^flash-attn-4==/ } own' "$locks/gpu-learner-3.12.txt" >"$venv/flash-attn-4.txt"
        install "2 of 4, flash-attn-4" --require-hashes --no-deps --force-reinstall -r "$venv/flash-attn-4.txt"
    fi
    install "3 of 4, slipstream" --no-deps --no-build-isolation --editable .
    compile "4 of 4"
else
    install_torch
    install "2 of 5, libraries" -c "$constraints" -r deploy/setup/requirements-cpu.txt
    install "3 of 5, sglang without its CUDA requirements" \
        --no-deps -c "$constraints" -r deploy/setup/requirements-cpu-nodeps.txt
    install "4 of 5, slipstream" --no-deps --no-build-isolation --editable .
    compile "5 of 5"
    "$new" deploy/setup/torchvision_operators.py >>"$log" 2>&1 || { part=torchvision && failed; }
fi
echo "$stamp" >"$venv/.slipstream-setup"
echo "setup: done in $((SECONDS - started)) s"
