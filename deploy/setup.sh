#!/usr/bin/env bash
# Makes .venv with everything that a CPU machine needs, pinned. A second call does nothing.
#   PYTHON=python3.11 ./deploy/setup.sh
set -euo pipefail
cd "$(dirname "$0")/.."

pins="deploy/constraints-cpu.txt deploy/requirements-cpu.txt deploy/requirements-cpu-nodeps.txt"
# shellcheck disable=SC2086
stamp=$(cat $pins pyproject.toml deploy/setup.sh | sha256sum | cut -d' ' -f1)
if [ "$(cat .venv/.slipstream-setup 2>/dev/null || true)" = "$stamp" ]; then
    exit 0
fi

python=${PYTHON:-}
for candidate in python3.11 python3 python; do
    if [ -z "$python" ] && command -v "$candidate" >/dev/null &&
        [ "$("$candidate" -c 'import sys; print(sys.version_info[:2] == (3, 11))')" = True ]; then
        python=$candidate
    fi
done
if [ -z "$python" ]; then
    echo "setup: CPython 3.11 is needed and was not found; name one with PYTHON=..." >&2
    exit 2
fi

install() { # title, arguments of pip
    printf 'setup: %s\n' "$1"
    shift
    .venv/bin/python -m pip install --quiet --disable-pip-version-check "$@"
}

started=$SECONDS
echo "setup: new environment in .venv with $("$python" --version)"
"$python" -m venv --clear .venv
install "1 of 5: pip and build tools" --upgrade -c deploy/constraints-cpu.txt pip setuptools wheel
install "2 of 5: torch" -c deploy/constraints-cpu.txt torch
install "3 of 5: libraries" -c deploy/constraints-cpu.txt -r deploy/requirements-cpu.txt
install "4 of 5: sglang (its CUDA-only requirements left out)" \
    --no-deps -r deploy/requirements-cpu-nodeps.txt
install "5 of 5: slipstream" --no-deps --no-build-isolation --editable .
echo "$stamp" > .venv/.slipstream-setup
echo "setup: done in $((SECONDS - started)) s"
