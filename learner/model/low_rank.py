"""The numbers that adapters begin with, without Megatron."""

import hashlib
import math

import torch
from torch import Tensor


def drawn(rank: int, size: int, *, seed: int, name: str) -> Tensor:
    """Return a whole A [r, I] as PEFT draws it: uniform within 1 / sqrt(I). float32, on the host.

    Each tensor has its own numbers, from the run's seed and its name.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    bound = 1.0 / math.sqrt(size)
    return torch.empty(rank, size).uniform_(-bound, bound, generator=generator)
