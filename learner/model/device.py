"""The one place where the CPU and the GPU differ for the learner.

``prepare()`` comes first in every learner process, before anything imports megatron.core.
"""

import logging
import os
import warnings
from typing import Literal

import torch

from slipstream.learner.model import cpu_shim
from slipstream.wire.models.flops import peak_tflops_of

# This project uses Megatron's fallbacks without Transformer Engine and Apex, and
# megatron-core's default scope.
_EXPECTED_WARNINGS = (
    "Apex is not installed",
    "Transformer Engine and Apex are not installed",
    "full scope is deprecated",
    "When using async grad allreduce",  # nothing overlaps on a CPU
    "`load_state_dict` is deprecated",  # used in Megatron's reading of checkpoints
    "The next bucket's parameter all-gather operation has already",  # a layer fills a bucket
)
_LAYOUT = "full_param_layout not provided"  # megatron-core 0.19 then makes it itself


def prepare() -> None:
    """Make this process ready to import megatron.core; a second call does nothing."""
    warnings.filterwarnings("ignore", message="Please use DTensor instead")  # checkpoints
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):  # the names that Megatron uses
        warnings.filterwarnings("ignore", message=f"`torch.distributed.{name}` is deprecated")
    for message in _EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message=message, module=r"megatron\.core\.")
    logging.getLogger("megatron").setLevel(logging.WARNING)
    logging.getLogger("megatron.core.distributed.distributed_data_parallel").addFilter(_is_news)
    if not torch.cuda.is_available():
        cpu_shim.install()


def _is_news(record: logging.LogRecord) -> bool:
    return _LAYOUT not in record.getMessage()


def select(local_rank: int) -> None:
    """Give a rank its GPU among those visible to this process; does nothing without CUDA.

    ``local_rank`` is the rank's place among the ranks of its host.
    """
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank % torch.cuda.device_count())


def device() -> torch.device:
    """Return the device of this rank's model."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def peak_tflops(dtype: torch.dtype) -> float | None:
    """Return the peak speed of this rank's device in a type, in TFLOP/s; None if unknown."""
    if not torch.cuda.is_available() or dtype != torch.bfloat16:
        return None
    return peak_tflops_of(torch.cuda.get_device_name())


def backend() -> Literal["gloo", "nccl"]:
    """Return the backend of the learner's process groups."""
    return "nccl" if torch.cuda.is_available() else "gloo"


def set_threads(num_threads: int) -> None:
    """Bound the threads that one operator may use on the CPU."""
    torch.set_num_threads(num_threads)


def set_deterministic() -> None:
    """Have every operator compute the same bits each time; call it before the first operator."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # noqa: TID251 read by cuBLAS, no setting
    torch.use_deterministic_algorithms(True)
