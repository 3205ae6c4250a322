"""Branches that only a GPU takes, beside the torch, Megatron and SGLang that are installed."""

import os
import subprocess
import sys

import pytest
import torch

from tests.support.tiny_run import ROOT
from tests.support.waiting import HANG_S

pytestmark = [pytest.mark.integration]
STAND_INS = ROOT / "benchmarks" / "device" / "standin"


def checked(what: str, **variables: str) -> list[str]:
    """Return what a program of tests.support.gpu_branches prints."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.gpu_branches", what],
        cwd=ROOT,
        env={**os.environ, **variables},  # noqa: TID251 handed on
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_every_name_and_argument_of_torch_and_megatron_exists():
    lines = checked("names")
    assert [line.partition(":")[0] for line in lines] == ["torch", "megatron"], lines
    counts = [int(line.split()[1]) for line in lines]
    assert counts[0] > 1000, "the product's uses of torch"
    assert counts[1] > 50, "and of Megatron"


@pytest.mark.skipif(torch.version.cuda is None, reason="torch without CUDA: make rehearsal has it")
def test_the_runtime_of_cuda_pins_memory():
    register = torch._C._cudart.cudaHostRegister
    assert "cudaHostRegister(arg0: " in register.__doc__
    assert register.__doc__.count("arg") == 3, "the address, the length and flags"
    assert int(torch._C._cudart.cudaError.success) == 0


def test_an_engine_for_a_gpu_can_be_imported_and_knows_its_settings_and_variables():
    lines = checked(
        "server",
        PYTHONPATH=os.pathsep.join(
            map(str, (STAND_INS / "kernels", STAND_INS / "display", ROOT / "src", ROOT))
        ),
        SGLANG_FORCE_FUSED_OP_BACKEND="torch",
        SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK="1",
    )
    assert lines[0] == "slipstream.generators.sglang.patches", "with our corrections"
    assert lines[1:3] == ["dependent launches: False", "a GEMM of newer GPUs: False"], "unasked"
    own = (
        "prefill_decode_interval=8 prefill_decode_interval_min_bs=32 attention_backend=triton "
        "decode=full prefill=breakable"
    )
    assert lines[3:5] == [
        f"retract: disable_overlap_schedule=False enable_mixed_chunk=True {own}",
        f"in_place: disable_overlap_schedule=True enable_mixed_chunk=False {own}",
    ], "FlashInfer is not installed"
    assert lines[5:], "it has variables of its own"
    assert all(line.endswith(": known") for line in lines[5:]), lines
