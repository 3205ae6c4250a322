"""Random numbers of a checkpoint go on, those of another kind of device excepted."""

import random

import torch

from slipstream.learner.checkpoints.random_numbers import restore


class Numbers:
    """A device's and Megatron's, which remember what they are given."""

    def __init__(self, num_bytes: int) -> None:
        self._state = torch.zeros(num_bytes, dtype=torch.uint8)
        self.given: list[object] = []

    def get_rng_state(self) -> torch.Tensor:
        return self._state

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.given.append(("device", len(state)))

    def set_states(self, states: dict[str, object]) -> None:
        self.given.append(states)


def saved(num_bytes: int) -> dict[str, object]:
    return {
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
        "cuda": torch.zeros(num_bytes, dtype=torch.uint8),
        "megatron": {"default": 1},
    }


def drawn() -> tuple[float, list[float]]:
    return random.random(), torch.rand(3).tolist()


def test_random_numbers_go_on_as_they_were_saved():
    state, here = saved(16), Numbers(16)
    expected = drawn()
    assert restore(state, here, here.set_states)
    assert here.given == [("device", 16), {"default": 1}]
    assert drawn() == expected


def test_those_of_another_kind_of_device_are_left_as_they_are():
    state, here = saved(16), Numbers(5056)
    expected = drawn()
    assert not restore(state, here, here.set_states)
    assert here.given == []
    assert drawn() == expected, "all others go on"
