"""Stage 0: what this machine is, and whether it can run the others."""

import inspect
import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from benchmarks.device.report import ON_A_CPU, Report, run_stage
from slipstream.learner.model.cuda_attention import flash_attn_varlen_func, taken_by
from slipstream.wire.gpus import usable_gpus

_PACKAGES = ("torch", "triton", "sglang", "megatron-core", "transformers", "msgspec", "pyzmq")
_QUERY = "name,driver_version,memory.total,memory.used,clocks.max.sm,power.limit,mig.mode.current"
_NVIDIA = Path("/proc/driver/nvidia")


def work(report: Report, _out: Path) -> None:
    report.fact("python", sys.version.split()[0])
    report.fact("platform", platform.platform())
    report.fact("cores", len(os.sched_getaffinity(0)))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    report.fact("memory_gib", round(memory / 2**30, 1))
    report.fact("shm_free_gib", round(shutil.disk_usage("/dev/shm").free / 2**30, 1))  # noqa: S108
    report.fact("packages", {name: _version(name) for name in _PACKAGES})
    report.fact("usable_gpus", list(usable_gpus()))
    report.fact("flash_attn", flash_attn_varlen_func is not None)
    with report.part("varlen"):
        from torch.nn.attention.varlen import varlen_attn

        report.fact("varlen", list(inspect.signature(varlen_attn).parameters))
        taken = taken_by(varlen_attn, {"scale": 1.0, "window_size": (-1, 0), "enable_gqa": True})
        report.holds("varlen takes scale and window", taken.keys() >= {"scale", "window_size"})
    if not torch.cuda.is_available():
        report.skip("gpu", ON_A_CPU)
        return
    with report.part("gpu"):
        _gpu(report)


def _gpu(report: Report) -> None:
    card = torch.cuda.get_device_properties(0)
    report.fact("gpu", {"name": card.name, "sms": card.multi_processor_count})
    report.fact("gpu_memory_gib", round(card.total_memory / 2**30, 1))
    report.fact("capability", torch.cuda.get_device_capability(0))
    report.fact("cuda", torch.version.cuda)
    report.fact("nccl", torch.cuda.nccl.version())
    report.fact("proc_driver", _NVIDIA.is_dir() and sorted(p.name for p in _NVIDIA.iterdir()))
    asked = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"]
    report.fact("nvidia_smi", subprocess.check_output(asked, text=True, timeout=20).strip())
    with report.part("nvml"):
        report.fact("nvml_gpu_utilization", torch.cuda.utilization())
    compiler = shutil.which("gcc") or shutil.which("cc") or os.environ.get("CC")
    report.fact("compiler", compiler)
    report.holds("triton finds a C compiler", compiler)
    report.holds("driver and CUDA count alike", len(usable_gpus()) == torch.cuda.device_count())
    pinned = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    on_device = torch.empty_like(pinned, device="cuda")
    pinned.copy_(on_device)
    begin.record()
    pinned.copy_(on_device, non_blocking=True)
    end.record()
    torch.cuda.synchronize()
    report.fact("pinned_d2h_gb_s", round(2**28 / 1e6 / begin.elapsed_time(end), 1))


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    run_stage("env", work)
