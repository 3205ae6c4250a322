"""What other systems compute on one batch, and that batch in the packed layout.

Each file PEER__FUNCTION.npz of tests/golden/algos holds what went into the peer's function, what
came out of it and its settings. The arrays are padded rows: 32 responses in 8 groups of 4, up to
17 tokens each.

Shapes: N = 32 rows, L = 17 columns; T tokens of the rows laid end to end, without the padding.
"""

import json
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.algos.packing import Packing
from slipstream.algos.reduce import Denominators, Rule

FOLDER = Path(__file__).parents[1] / "golden" / "algos"
MASKS = ("mask_prefix", "mask_holes", "mask_empty")

VERL = "verl-0.9.1"
SLIME = "slime-624b824a"
AREAL = "areal-4aef98d8"

WIDTH = 17  # columns of the padded batch: verl's constant where none is given
RULES: dict[str, Rule] = {  # ours, by verl's name
    "token-mean": "token-mean",
    "token-sum": "token-sum",
    "seq-mean-token-mean": "sequence-mean-token-mean",
    "seq-mean-token-sum": "sequence-mean-token-sum",
    "seq-mean-token-sum-norm": "sequence-mean-token-sum-norm",
}

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Golden:
    """One file, by its name without ".npz". Get it from ``golden``, which reads it once."""

    name: str

    @cached_property
    def _arrays(self) -> dict[str, Array]:
        with np.load(FOLDER / f"{self.name}.npz", allow_pickle=False) as file:
            return dict(file)

    @cached_property
    def inputs(self) -> dict[str, Array]:
        """What went into the peer's function."""
        return {k.removeprefix("in_"): v for k, v in self._arrays.items() if k.startswith("in_")}

    @cached_property
    def hparams(self) -> dict[str, Any]:
        """The peer's settings."""
        settings: dict[str, Any] = json.loads(str(self._arrays["meta"]))["hparams"]
        return settings

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        """The names that ``out`` takes."""
        return tuple(k.removeprefix("out_") for k in self._arrays if k.startswith("out_"))

    def input(self, name: str) -> Tensor:
        """Return one input: float64 as it is, integers as int64."""
        return torch.from_numpy(self.inputs[name].copy())

    def out(self, name: str) -> Tensor:
        """Return one output."""
        return torch.from_numpy(np.array(self._arrays[f"out_{name}"]))


@cache
def golden(peer: str, function: str) -> Golden:
    """Return a peer's golden file: ``golden(VERL, "grpo")``."""
    return Golden(f"{peer}__{function}")


@cache
def batch() -> dict[str, Array]:
    """Return the batch itself: lengths [N], group [N], rewards [N], masks and logprobs [N, L]."""
    with np.load(FOLDER / "inputs.npz", allow_pickle=False) as file:
        return dict(file)


@dataclass(frozen=True)
class Layout:
    """The batch packed: each row's first ``lengths`` tokens, mask holes and all, end to end."""

    valid: Tensor  # [N, L] bool, what is not padding
    packing: Packing

    def pack(self, padded: Tensor | Array) -> Tensor:
        """Return the tokens of padded rows. Shapes [N, L] -> [T]; gradient flows through."""
        return torch.as_tensor(padded)[self.valid]

    def pad(self, packed: Tensor, filled: float = 0.0) -> Tensor:
        """Return packed tokens as padded rows. Shapes [T] -> [N, L]."""
        padded = torch.full(self.valid.shape, filled, dtype=packed.dtype)
        padded[self.valid] = packed.detach()
        return padded

    @property
    def mask(self) -> Tensor:
        """Return the mask in the padded layout, [N, L] bool."""
        return self.pad(self.packing.mask, filled=False)


@cache
def layout(mask: str) -> Layout:
    """Return the batch's layout under one of MASKS."""
    return layout_of(torch.from_numpy(batch()[mask].astype(bool)))


def layout_of(mask: Tensor) -> Layout:
    """Return the batch's layout under any mask [N, L] bool."""
    lengths = torch.from_numpy(batch()["lengths"])
    valid = torch.arange(mask.shape[1]) < lengths.unsqueeze(1)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return Layout(valid, Packing.of(mask[valid], cu_seqlens))


def denominators_of(packing: Packing, *, length: float = WIDTH) -> Denominators:
    """Return what a batch of one rank is divided by."""
    return Denominators(
        num_tokens=float(packing.counts.sum()),
        num_sequences=float((packing.counts > 0).sum()),
        length=length,
    )


def close(ours: Tensor, theirs: Tensor, *, atol: float = 1e-9) -> None:
    """Assert that a value is a peer's, to 1e-5 of it."""
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-5, atol=atol)
