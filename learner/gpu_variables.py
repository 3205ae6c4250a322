"""Environment variables for a GPU, set before torch is imported: libraries read them once."""

from collections.abc import Mapping

_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # before torch 2.9, since torch 2.9


def gpu_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables to add to a learner's environment on a GPU; variables already set stay.

    A single queue to the GPU keeps kernels and communication in launch order, which Megatron's
    tensor parallelism relies on. Memory segments that can grow are not fragmented by microbatches
    of different lengths.
    """
    wanted = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", _ALLOCATOR[0]: "expandable_segments:True"}
    if any(name in environment for name in _ALLOCATOR):
        del wanted[_ALLOCATOR[0]]
    return {name: value for name, value in wanted.items() if name not in environment}
