"""Random numbers that continue from a checkpoint."""

import random
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch


class Device(Protocol):
    """Random state of a device."""

    def get_rng_state(self) -> torch.Tensor:
        """Return the state, bytes of a length specific to the device."""

    def set_rng_state(self, state: torch.Tensor, /) -> None:
        """Continue from a state."""


def restore(
    state: Mapping[str, Any], device: Device, set_megatron: Callable[[dict[str, Any]], None]
) -> bool:
    """Continue a rank's random numbers.

    Args:
        state: random state in the checkpoint.
        device: device of this rank.
        set_megatron: sets Megatron's random states, by name.

    Returns:
        False if the state is a GPU's and this device a CPU, or vice versa: the device's random
        numbers then stay unchanged.
    """
    random.setstate(state["python"])
    same = len(state["cuda"]) == len(device.get_rng_state())
    if same:
        device.set_rng_state(state["cuda"])
        set_megatron(state["megatron"])
    torch.set_rng_state(state["torch"])  # last: the device may be this CPU
    return same
