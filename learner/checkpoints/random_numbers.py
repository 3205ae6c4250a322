"""Random numbers that go on where a checkpoint was written."""

import random
from collections.abc import Mapping
from typing import Any, Protocol

import torch


class Device(Protocol):
    """Where a device's random numbers are read and set."""

    def get_rng_state(self) -> torch.Tensor:
        """Return the state, bytes of a length that is the device's own."""

    def set_rng_state(self, state: torch.Tensor, /) -> None:
        """Go on from a state."""


class Tracker(Protocol):
    """Megatron's, by name."""

    def set_states(self, states: dict[str, Any], /) -> None:
        """Go on from states."""


def restore(state: Mapping[str, Any], device: Device, tracker: Tracker) -> bool:
    """Go on with the random numbers of a rank.

    Args:
        state: of the checkpoint.
        device: of this rank.
        tracker: of this rank.

    Returns:
        False if those of the device were a GPU's and this is a CPU, or the other way round: they
        are left as they are.
    """
    random.setstate(state["python"])
    same = len(state["cuda"]) == len(device.get_rng_state())
    if same:
        device.set_rng_state(state["cuda"])
        tracker.set_states(state["megatron"])
    torch.set_rng_state(state["torch"])  # after those of a device that is this CPU
    return same
