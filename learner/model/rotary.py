"""Rotary position embedding by position id: one table of angles for all layers of a microbatch.

Su et al., "RoFormer" (arXiv:2104.09864), with the two ways in which models are made to read more
than they were first trained on: Llama 3's and YaRN (Peng et al., arXiv:2309.00071).

Shapes: T tokens, h heads of d channels. Channel i turns with channel i + d/2, as in the models of
Hugging Face.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.learner.model.hf_config import HfConfig, RopeParameters

_YARN_FAST, _YARN_SLOW = 32.0, 1.0  # turns over the first training's context


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosine and sine of each token's angles, [T, 1, d/2] float32, to be shared by all layers."""

    cos: Tensor
    sin: Tensor

    def turned(self, heads: Tensor) -> Tensor:
        """Return queries or keys [T, h, d], turned in float32, in their own type."""
        first, second = heads.float().chunk(2, dim=-1)
        turned = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        return torch.cat(turned, dim=-1).to(heads.dtype)


@dataclass(frozen=True, slots=True)
class Rotary:
    """Frequencies of the channels of a head."""

    frequencies: Tensor  # [d/2] float32 on the model's device, radians per position
    scale: float = 1.0  # of cosine and sine: YaRN's attention factor, on queries and keys alike

    @classmethod
    def of(cls, hf: HfConfig, device: torch.device) -> "Rotary":
        """Read a model's config.json."""
        channels = torch.arange(0, hf.kv_channels, 2, dtype=torch.int64).float()
        frequencies, scale = 1.0 / hf.rotary_base ** (channels / hf.kv_channels), 1.0
        match hf.rope.scaling:
            case "llama3":
                frequencies = _llama3(frequencies, hf.rope, hf.trained_positions)
            case "yarn":
                frequencies, scale = _yarn(frequencies, hf.rope, hf), hf.rope.yarn_scale
            case _:
                pass
        return cls(frequencies.to(device), scale)

    def at(self, position_ids: Tensor) -> Rotation:
        """Return the rotation of tokens at these positions, [T] int."""
        angles = (position_ids.float()[:, None] * self.frequencies)[:, None]
        return Rotation(angles.cos() * self.scale, angles.sin() * self.scale)


def _llama3(frequencies: Tensor, rope: RopeParameters, trained_positions: int) -> Tensor:
    """Scale down frequencies below ``low_freq_factor`` turns per trained context.

    Those above ``high_freq_factor`` turns stay, and between both the scale changes gradually.
    """
    turns = trained_positions * frequencies / (2 * math.pi)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    share = ((turns - low) / (high - low)).clamp(0.0, 1.0)  # of the frequency that stays
    return frequencies * (share + (1.0 - share) / rope.factor)


def _yarn(frequencies: Tensor, rope: RopeParameters, hf: HfConfig) -> Tensor:
    """Slow channels by a ramp over their number, between fast and slow ones."""
    size = hf.kv_channels

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
