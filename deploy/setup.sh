#!/usr/bin/env bash
# Makes .venv with everything that a machine without a GPU needs, pinned. A second call does
# nothing. uv installs where it can be had; pip does where it cannot, and for what uv could not.
# On a GPU machine every file is compared with its hash in deploy/locks.
#   ./deploy/setup.sh
#   PYTHON=/path/to/python3.11 ./deploy/setup.sh    another interpreter
#   SETUP_WITH=pip ./deploy/setup.sh                never uv
#   ./deploy/setup.sh gpu                           .venv for a machine with GPUs; gigabytes
#   FLASH_ATTN=no ./deploy/setup.sh gpu             without flash-attn, which may compile for an hour
#   ./deploy/setup.sh rehearsal                     .rehearsal, with the versions of a GPU machine
set -euo pipefail
cd "$(dirname "$0")/.."

case "${1:-cpu}" in
cpu)
    venv=.venv target=setup wanted='3.11 or 3.12'
    pythons=(python3.11 python3.12 python3 python)
    ;;
gpu)
    venv=.venv target=setup-gpu wanted='3.11 or 3.12'
    pythons=(python3.12 python3.11 python3 python)
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
pins="$constraints deploy/requirements-cpu.txt deploy/requirements-cpu-nodeps.txt"
[ "$target" != setup-gpu ] || pins=$(echo deploy/locks/gpu-*.txt deploy/locks/flash-attn.txt)
# shellcheck disable=SC2086
stamp=$({ cat $pins pyproject.toml deploy/setup.sh deploy/uv_sources.py && echo "$target ${FLASH_ATTN:-}"; } |
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
    case "$(describe "$candidate")" in
    "CPython 3.12" | "CPython ${wanted%% *}")
        python=$candidate
        break
        ;;
    '') ;;
    *) seen+=("$candidate is $(describe "$candidate")") ;;
    esac
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
    echo "setup: name one with PYTHON=/path/to/python${wanted%% *} make ${target}" >&2
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

with_pip() { "$new" -m pip install --disable-pip-version-check "$@" >>"$log" 2>&1; }
by=pip sources=()
find_uv() { # which works here, and where it is to look
    local words
    if ! uv=$(command -v uv); then
        uv=$venv/bin/uv
        with_pip --quiet -c "$constraints" uv || return 1
    fi
    words=$("$uv" --version 2>>"$log") || return 1
    "$new" deploy/uv_sources.py >"$venv/uv-sources" 2>>"$log" || return 1
    mapfile -t sources <"$venv/uv-sources"
    by=$(cut -d' ' -f1,2 <<<"$words")
}
if [ "${SETUP_WITH:-uv}" != pip ] && ! find_uv; then
    echo "setup: uv cannot be used here ($log); pip installs"
fi
install() { # what for, arguments that uv and pip have in common
    part=$1
    shift
    local began=$SECONDS who=$by
    printf 'setup: %s: ' "$part"
    if [ "$by" = pip ] ||
        ! "$uv" pip install --python "$new" "${sources[@]}" "$@" >>"$log" 2>&1; then
        [ "$by" = pip ] || who="pip, as uv could not"
        with_pip "$@" || { echo failed && failed; }
    fi
    printf '%d s (%s)\n' $((SECONDS - began)) "$who"
}

if [ "$target" = setup-gpu ]; then
    locks=deploy/locks
    series=$(cut -d. -f1,2 <<<"$version")
    install "1 of 3, learner and generators" --require-hashes \
        -r "$locks/gpu-learner-$series.txt" -r "$locks/gpu-generator-$series.txt"
    if [ "${FLASH_ATTN:-}" = no ]; then
        echo "setup: 2 of 3, flash-attn: left out (FLASH_ATTN=no)"
    else
        install "2 of 3, flash-attn" --require-hashes --no-deps --no-build-isolation \
            -r "$locks/flash-attn.txt"
    fi
    install "3 of 3, slipstream" --no-deps --no-build-isolation --editable .
else
    install "1 of 4, torch" -c "$constraints" torch pip setuptools wheel
    install "2 of 4, libraries" -c "$constraints" -r deploy/requirements-cpu.txt
    install "3 of 4, sglang without its CUDA requirements" \
        --no-deps -c "$constraints" -r deploy/requirements-cpu-nodeps.txt
    install "4 of 4, slipstream" --no-deps --no-build-isolation --editable .
fi
echo "$stamp" >"$venv/.slipstream-setup"
echo "setup: done in $((SECONDS - started)) s"
