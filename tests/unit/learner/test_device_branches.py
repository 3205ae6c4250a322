"""Every branch of the learner by device has its reason here: tests on a CPU enter all else."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.support.tiny_run import ROOT

REASONS = {
    "checkpoints/part.py:write": "device: a new thread takes the first",
    "checkpoints/staging.py:copy": "device: pinned memory",
    "model/cpu_shim.py:_is_cuda": "CPU: Megatron names CUDA where it means the device",
    "model/cuda_attention.py:has_kernel": "kernel",
    "model/device.py:backend": "device: NCCL or gloo",
    "model/device.py:device": "device",
    "model/device.py:peak_tflops": "device: its name",
    "model/device.py:prepare": "device",
    "model/device.py:select": "device",
    "model/gpt.py:build_model": "device: weights are made where they stay",
    "model/weights/shards.py:_copy": "device: pinned memory",
    "publish/weight_writer.py:_mapped": "device: pinned memory",
    "record/profiling.py:before": "device: its events",
    "starting_policy.py:load_model": "type: bfloat16 there, float32 on a CPU",
    "training/offload.py:_copied": "device: pinned memory",
    "training/offload.py:put_away": "device: copies that are not complete",
    "training/pipeline_clock.py:_mark": "device: its clock",
}


def branches(path: Path) -> Iterator[str]:
    """Yield the functions of a module that ask for a tensor's device, or for that of this rank."""
    for function in ast.walk(ast.parse(path.read_text("utf-8"))):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            asks = isinstance(node, ast.Attribute) and node.attr in {"is_cuda", "is_available"}
            if isinstance(node, ast.Compare) and isinstance(node.left, ast.Attribute):
                kinds = [each.value for each in node.comparators if isinstance(each, ast.Constant)]
                asks = node.left.attr == "type" and not {"cuda", "cpu"}.isdisjoint(kinds)
            if asks:
                yield f"{path.relative_to(ROOT / 'learner').as_posix()}:{function.name}"


def test_every_branch_by_device_has_a_reason():
    seen = {name for path in (ROOT / "learner").rglob("*.py") for name in branches(path)}
    assert seen == REASONS.keys()
