#!/usr/bin/env bash
# Resolves what images and GPU machines install, for Linux on x86_64: deploy/constraints-gpu.txt, and a
# lock with hashes for each kind and Python (GPUs: 3.12 alone). Nothing is installed; minutes, and a package index.
# The CPU locks hold the versions of deploy/constraints-cpu.txt.
set -euo pipefail
cd "$(dirname "$0")/../.."
uv=$(command -v uv || echo .venv/bin/uv)
compile() { # OUTPUT ARGUMENTS...
    "$uv" pip compile --quiet --upgrade --config-file deploy/locks/uv.toml --no-annotate \
        --python-platform x86_64-manylinux_2_35 --custom-compile-command 'make locks' --output-file "$@"
}
extras() { printf -- '--extra %s ' "$@"; }

learner=$(extras learner cluster redis-server storage flash-4 linear-attention)
generator=$(extras generators data rewards sandbox storage)
build=$PWD/.cache/locks
mkdir -p "$build"
# Learner and generators together, then each of them from what was chosen: one torch, one NCCL.
# shellcheck disable=SC2086
compile "$build/gpu.txt" --python-version 3.12 pyproject.toml $learner $generator
for kind in learner generator; do
    # shellcheck disable=SC2086
    compile "deploy/locks/gpu-$kind-3.12.txt" --python-version 3.12 --generate-hashes \
        --constraints "$build/gpu.txt" pyproject.toml ${!kind}
done
for python in 3.11 3.12; do
    # torch for a CPU is in an index of its own, with torchvision; a CUDA build's libraries are not needed.
    grep -vE '^(torch|torchvision|cuda-.*|nvidia-.*)==' deploy/constraints-cpu.txt |
        "$uv" pip compile --quiet --no-deps --generate-hashes --no-annotate --python-version $python \
            --config-file deploy/locks/uv.toml --python-platform x86_64-manylinux_2_35 \
            --custom-compile-command 'make locks' --output-file "deploy/locks/cpu-$python.txt" -
done
# Compiled on the machine, against its torch: what that takes has a lock of its own, for both.
printf 'flash-attn>=2.8\neinops\nninja\nsetuptools\nwheel\n' >"$build/flash-attn.in"
compile deploy/locks/flash-attn.txt --no-deps --generate-hashes --python-version 3.12 \
    --constraints "$build/gpu.txt" "$build/flash-attn.in"
{
    echo '# What a GPU machine installs, by `make locks`; deploy/locks/gpu-*.txt have the hashes.'
    grep '==' "$build/gpu.txt"
} >deploy/constraints-gpu.txt
