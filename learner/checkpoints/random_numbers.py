"""Random numbers that continue from a checkpoint."""

import random
from collections.abc import Mapping
from typing import Any, Protocol

import torch


class Device(Protocol):
    """Random state of a device."""

    def get_rng_state(self) -> torch.Tensor:
        """Return the state, bytes of a length specific to the device."""

    def set_rng_state(self, state: torch.Tensor, /) -> None:
        """Continue from a state."""


class Tracker(Protocol):
    """Megatron's random states, by name."""

    def set_states(self, states: dict[str, Any], /) -> None:
        """Continue from states."""


def restore(state: Mapping[str, Any], device: Device, tracker: Tracker) -> bool:
    """Continue a rank's random numbers.

    Args:
        state: random state in the checkpoint.
        device: device of this rank.
        tracker: Megatron's tracker of this rank.

    Returns:
        False if the state is a GPU's and this device a CPU, or vice versa: the device's random
        numbers then stay unchanged.
    """
    random.setstate(state["python"])
    same = len(state["cuda"]) == len(device.get_rng_state())
    if same:
        device.set_rng_state(state["cuda"])
        tracker.set_states(state["megatron"])
    torch.set_rng_state(state["torch"])  # last: the device may be this CPU
    return same
