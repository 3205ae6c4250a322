"""Variables that libraries on a GPU read once. Set before anything imports torch."""

from collections.abc import Mapping

_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # one name before torch 2.9, and now


def gpu_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables to add to a learner's environment on a GPU; set ones stay.

    One queue to the GPU keeps kernels and communication in the order of their launch, on which
    Megatron's tensor parallelism relies. Segments of memory that grow are not torn into pieces by
    microbatches of unlike lengths.
    """
    wanted = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", _ALLOCATOR[0]: "expandable_segments:True"}
    if any(name in environment for name in _ALLOCATOR):
        del wanted[_ALLOCATOR[0]]
    return {name: value for name, value in wanted.items() if name not in environment}
