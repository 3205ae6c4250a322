"""Initial numbers of adapters, without Megatron."""

import hashlib
import math
from pathlib import Path

import torch
from torch import Tensor

from slipstream.wire.errors import ConfigError

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def drawn(rank: int, size: int, *, seed: int, name: str) -> Tensor:
    """Return a whole A [r, I], drawn as in PEFT: uniform within 1 / sqrt(I). float32, on the host.

    Each tensor has its own numbers, from the run's seed and its name.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    bound = 1.0 / math.sqrt(size)
    return torch.empty(rank, size).uniform_(-bound, bound, generator=generator)


def refuse_no_numbers(name: str, tensor: Tensor, folder: Path) -> None:
    """Refuse a tensor of a PEFT folder that no adapter can start from.

    Raises:
        ConfigError: its type is no float type, or it holds a number that is not finite.
    """
    if tensor.dtype not in _FLOATS:
        raise ConfigError(
            f"{folder}: tensor {name} must be of {', '.join(map(str, _FLOATS))}, got "
            f"{tensor.dtype} (lora.adapter)"
        )
    if not bool(tensor.isfinite().all()):
        raise ConfigError(
            f"{folder}: tensor {name} must hold finite numbers, and holds infinity or none "
            "(lora.adapter)"
        )
