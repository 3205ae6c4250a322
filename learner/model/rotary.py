"""Rotary position embedding by position id: one table of angles for all layers of a microbatch.

Su et al., "RoFormer" (arXiv:2104.09864), with two ways to extend models beyond the context of their
first training: Llama 3's and YaRN (Peng et al., arXiv:2309.00071).

Shapes: T tokens, h heads of d channels; the first r channels turn. Channel i turns with channel
i + r/2, as in most models of Hugging Face, or with its neighbor.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.learner.model.kernels.rotary import turn
from slipstream.wire.models.hf_config import HfConfig, RopeParameters

_YARN_FAST, _YARN_SLOW = 32.0, 1.0  # turns over the first training's context


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosine and sine of each token's angles, [T, 1, r/2] float32, to be shared by all layers."""

    cos: Tensor
    sin: Tensor
    in_pairs: bool = False

    def turned(self, heads: Tensor, first: int = 0) -> Tensor:
        """Return queries or keys [T, h, d], turned in float32, in their own type.

        Args:
            heads: [T, h, d], with any strides.
            first: first of the r channels that turn: 0, or d - r. Other channels stay.
        """
        return turn(heads, self.cos, self.sin, in_pairs=self.in_pairs, first=first)


@dataclass(frozen=True, slots=True)
class Rotary:
    """Frequencies of the turning channels of a head."""

    frequencies: Tensor  # [r/2] float32 on the model's device, radians per position
    scale: float = 1.0  # factor of cosine and sine, for queries and keys (YaRN's attention factor)
    in_pairs: bool = False
    # [r/2] axis whose position turns each channel; None where tokens have one position.
    axes: Tensor | None = None

    @classmethod
    def of(cls, hf: HfConfig, device: torch.device) -> "Rotary":
        """Read a model's config.json."""
        channels = torch.arange(0, hf.rotary_channels, 2, dtype=torch.int64).float()
        frequencies, scale = 1.0 / hf.rotary_base ** (channels / hf.rotary_channels), 1.0
        match hf.rope.scaling:
            case "llama3":
                frequencies = _llama3(frequencies, hf.rope, hf.trained_positions)
            case "yarn":
                frequencies, scale = _yarn(frequencies, hf.rope, hf), hf.rope.rotary_scale
            case _:
                pass
        axes = torch.tensor(hf.rotary_axes, device=device) if hf.rotary_axes else None
        return cls(frequencies.to(device), scale, hf.family.turns_pairs, axes)

    def at(self, position_ids: Tensor) -> Rotation:
        """Return the rotation of tokens at these positions, [T] or [3, T] int."""
        at = position_ids.float()
        by_channel = at[:, None] if at.dim() == 1 or self.axes is None else at[self.axes].T
        angles = (by_channel * self.frequencies)[:, None]
        return Rotation(angles.cos() * self.scale, angles.sin() * self.scale, self.in_pairs)


def _llama3(frequencies: Tensor, rope: RopeParameters, trained_positions: int) -> Tensor:
    """Scale down frequencies below ``low_freq_factor`` turns per trained context.

    Frequencies above ``high_freq_factor`` turns stay; in between, the scale changes gradually.
    """
    turns = trained_positions * frequencies / (2 * math.pi)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    share = ((turns - low) / (high - low)).clamp(0.0, 1.0)  # share of the frequency that stays
    return frequencies * (share + (1.0 - share) / rope.factor)


def _yarn(frequencies: Tensor, rope: RopeParameters, hf: HfConfig) -> Tensor:
    """Slow down channels by a ramp over their number, between fast and slow ones."""
    size = hf.rotary_channels

    def channel(turns: float) -> float:
        """Return the channel with this number of turns over the first context."""
        ratio = hf.trained_positions / (turns * 2 * math.pi)
        return size * math.log(ratio) / (2 * math.log(hf.rotary_base))

    low, high = channel(rope.beta_fast or _YARN_FAST), channel(rope.beta_slow or _YARN_SLOW)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = (torch.arange(size // 2).float() - low) / (high - low if high > low else 0.001)
    slowed = ramp.clamp(0.0, 1.0)
    return frequencies * (1.0 - slowed + slowed / rope.factor)
