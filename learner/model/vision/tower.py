"""The vision tower: patches of images to tokens of a language model.

Of Qwen2.5-VL (Bai et al. 2025, arXiv:2502.13923, section 2.1) and of Qwen3-VL. Parameters have the
names of Hugging Face. An image's tokens do not depend on the others of its microbatch.

Shapes: N patches of all images in squares of m x m; C numbers of a patch; E channels of the tower,
H of the language model.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from slipstream.learner.model.cuda_attention import attention_in_segments, has_kernel
from slipstream.learner.model.grouped_attention import grouped_attention
from slipstream.learner.model.rotary import Rotation
from slipstream.learner.model.vision.images import Grid
from slipstream.learner.model.vision.patch_layout import PatchLayout, Segments
from slipstream.wire.models.vision_config import VisionConfig

_EPSILON = 1e-6


class VisionTower(torch.nn.Module):
    """Blocks over the patches of images, and mergers of squares of patches into tokens."""

    pos_embed: torch.nn.Embedding

    def __init__(self, config: VisionConfig, dtype: torch.dtype, *, recomputes: bool) -> None:
        """Make a tower with random weights; ``recomputes`` keeps only what goes into blocks."""
        super().__init__()
        self.shape = config
        self._recomputes = recomputes
        self.patch_embed = torch.nn.ModuleDict({"proj": PatchProjection(config)})
        if config.places:
            places = config.num_position_embeddings
            self.pos_embed = torch.nn.Embedding(places, config.hidden_size)
        kind = WindowedBlock if config.window else PlainBlock
        self.blocks = torch.nn.ModuleList(kind(config) for _ in range(config.depth))
        if config.window:
            self.merger: torch.nn.Module = WindowedMerger(config)
        else:
            self.merger = Merger(config)
        self.deepstack_merger_list = torch.nn.ModuleList(
            Merger(config, norms_squares=True) for _ in config.deepstack_visual_indexes
        )
        self.to(dtype)

    @property
    def blank(self) -> tuple[Tensor, tuple[Grid, ...]]:
        """Smallest image, all of its numbers 0: its patches and their rows and columns."""
        merge = self.shape.spatial_merge_size
        weight = next(self.parameters())
        return weight.new_zeros(merge**2, self.shape.channels), ((merge, merge),)

    @override
    def forward(self, pixels: Tensor, grids: Sequence[Grid]) -> list[Tensor]:
        """Return the tokens of images, [N/m^2, H], and what each first layer adds to them.

        Args:
            pixels: [N, C], by image, each by squares.
            grids: rows and columns of each image, multiples of m.
        """
        layout = PatchLayout.of(self.shape, grids, pixels.device)
        hidden: Tensor = self.patch_embed["proj"](pixels)
        if layout.places is not None and layout.shares is not None:
            around = self.pos_embed(layout.places) * layout.shares[:, :, None]
            hidden = hidden + around.sum(1).to(hidden.dtype)
        hidden = self._by_square(hidden, layout.order)
        features: list[Tensor] = []
        for number, block in enumerate(self.blocks):
            is_whole = layout.windows is None or number in self.shape.fullatt_block_indexes
            segments = layout.images if is_whole or layout.windows is None else layout.windows
            if self._recomputes and torch.is_grad_enabled():
                hidden = checkpoint(
                    block,
                    hidden,
                    segments,
                    layout.rotation,
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
            else:
                hidden = block(hidden, segments, layout.rotation)
            if number in self.shape.deepstack_visual_indexes:
                features.append(self.deepstack_merger_list[len(features)](hidden))
        tokens: Tensor = self.merger(hidden)
        return [tokens if layout.inverse is None else tokens[layout.inverse], *features]

    def _by_square(self, hidden: Tensor, order: Tensor | None) -> Tensor:
        """Return patches with their squares in another order."""
        if order is None:
            return hidden
        squares = hidden.view(len(order), -1, hidden.size(-1))
        return squares[order].flatten(0, 1)


class PatchProjection(torch.nn.Module):
    """Projection of the numbers of a patch, stored as the filter of a convolution."""

    bias: torch.nn.Parameter | None

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        pixels = (config.patch_size, config.patch_size)
        colors = config.channels // (config.temporal_patch_size * config.patch_size**2)
        shape = (config.hidden_size, colors, config.temporal_patch_size, *pixels)
        self.weight = torch.nn.Parameter(0.02 * torch.randn(shape))
        bias = None if config.window else torch.nn.Parameter(torch.zeros(config.hidden_size))
        self.register_parameter("bias", bias)

    @override
    def forward(self, pixels: Tensor) -> Tensor:
        """Return [N, E] of [N, C]."""
        return F.linear(pixels.to(self.weight.dtype), self.weight.flatten(1), self.bias)


class _Attention(torch.nn.Module):
    """Attention of patches to those of their segment, in both directions."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = torch.nn.Linear(config.hidden_size, config.hidden_size)
        self._heads = config.num_heads

    @override
    def forward(self, hidden: Tensor, segments: Segments, rotation: Rotation) -> Tensor:
        """Return [N, E] of [N, E]."""
        query, key, value = self.qkv(hidden).view(len(hidden), 3, self._heads, -1).unbind(1)
        query, key, scale = rotation.turned(query), rotation.turned(key), value.size(-1) ** -0.5
        if has_kernel(query):
            output = attention_in_segments(query, key, value, segments.for_kernels, scale)
        else:
            output = grouped_attention(query, key, value, segments.groups, scale, is_causal=False)
        projected: Tensor = self.proj(output.flatten(1))
        return projected


class _Block(torch.nn.Module):
    norm1: torch.nn.Module
    norm2: torch.nn.Module
    attn: torch.nn.Module
    mlp: torch.nn.Module

    @override
    def forward(self, hidden: Tensor, segments: Segments, rotation: Rotation) -> Tensor:
        """Return [N, E] of [N, E]."""
        hidden = hidden + self.attn(self.norm1(hidden), segments, rotation)
        added: Tensor = self.mlp(self.norm2(hidden))
        return hidden + added


class WindowedBlock(_Block):
    """A block of Qwen2.5-VL."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.norm1 = torch.nn.RMSNorm(config.hidden_size, eps=_EPSILON)
        self.norm2 = torch.nn.RMSNorm(config.hidden_size, eps=_EPSILON)
        self.attn = _Attention(config)
        self.mlp = _GatedMlp(config)


class PlainBlock(_Block):
    """A block of Qwen3-VL."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.norm1 = torch.nn.LayerNorm(config.hidden_size, eps=_EPSILON)
        self.norm2 = torch.nn.LayerNorm(config.hidden_size, eps=_EPSILON)
        self.attn = _Attention(config)
        self.mlp = _Mlp(config.hidden_size, config.intermediate_size, config.hidden_size, "tanh")


class _GatedMlp(torch.nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        outer, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = torch.nn.Linear(outer, inner)
        self.up_proj = torch.nn.Linear(outer, inner)
        self.down_proj = torch.nn.Linear(inner, outer)

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return output


class _Mlp(torch.nn.Module):
    def __init__(self, outer: int, inner: int, output: int, approximate: str = "none") -> None:
        super().__init__()
        self.linear_fc1 = torch.nn.Linear(outer, inner)
        self.linear_fc2 = torch.nn.Linear(inner, output)
        self._approximate = approximate

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        inner = F.gelu(self.linear_fc1(hidden), approximate=self._approximate)
        output: Tensor = self.linear_fc2(inner)
        return output


class Merger(_Mlp):
    """Squares of patches to tokens; the norm is of patches, or of squares."""

    def __init__(self, config: VisionConfig, *, norms_squares: bool = False) -> None:
        """Make the merger of a tower."""
        square = config.hidden_size * config.spatial_merge_size**2
        super().__init__(square, square, config.out_hidden_size)
        normed = square if norms_squares else config.hidden_size
        self.norm = torch.nn.LayerNorm(normed, eps=_EPSILON)
        self._normed, self._squared = normed, square

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        """Return [N/m^2, H] of [N, E]."""
        normed = self.norm(hidden.view(-1, self._normed))
        return super().forward(normed.view(-1, self._squared))


class WindowedMerger(torch.nn.Module):
    """Squares of patches to tokens, in Qwen2.5-VL."""

    def __init__(self, config: VisionConfig) -> None:
        """Make the merger of a tower."""
        super().__init__()
        square = config.hidden_size * config.spatial_merge_size**2
        self.ln_q = torch.nn.RMSNorm(config.hidden_size, eps=_EPSILON)
        self._squared = square
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(square, square),
            torch.nn.GELU(),
            torch.nn.Linear(square, config.out_hidden_size),
        )

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        """Return [N/m^2, H] of [N, E]."""
        normed: Tensor = self.ln_q(hidden)
        merged: Tensor = self.mlp(normed.view(-1, self._squared))
        return merged
