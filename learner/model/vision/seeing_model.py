"""The first stage of a model that sees: images' tokens take the place of embeddings.

Shapes: T tokens of this rank, M of them of images; H hidden size.
"""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from typing_extensions import override

from slipstream.learner.model.vision.images import SeenLayout
from slipstream.learner.model.vision.tower import VisionTower


class SeeingModel(GPTModel):  # type: ignore[misc]  # megatron is untyped
    """The chunk with the embedding, and with a vision tower."""

    vision: VisionTower

    def see_by(self, tower: VisionTower, *, is_trained: bool) -> None:
        """Take a tower; what it sees reaches the first layers, too, if it has features for them."""
        for parameter in tower.parameters():
            # Each rank computes images that its own tokens are of: ranks sum the gradients.
            parameter.sequence_parallel = self.config.sequence_parallel  # type: ignore[attr-defined]  # a mark
        self.vision = tower.requires_grad_(is_trained)
        self._is_trained = is_trained
        # The tower comes first: weights that other ranks have updated are gathered in this order.
        modules = self._modules
        modules.update({name: modules.pop(name) for name in [*modules] if name != "vision"})
        for number in range(len(tower.shape.deepstack_visual_indexes)):
            layer = self.decoder.layers[number]
            layer.register_forward_hook(partial(_with_features, number), with_kwargs=True)

    @override
    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: SeenLayout,
        **named: object,
    ) -> Tensor:
        """Return what Megatron's model returns of the tokens, some of them of images."""
        seen = self._seen(packed_seq_params)
        embedded: Tensor = self.embedding(input_ids=input_ids, position_ids=position_ids)
        output: Tensor = super().forward(
            input_ids,
            position_ids,
            attention_mask,
            decoder_input=_with_images(embedded, seen, packed_seq_params),
            packed_seq_params=packed_seq_params,
            **named,
        )
        return output

    def _seen(self, layout: SeenLayout) -> list[Tensor]:
        """Return tokens of images and features for layers, whole; none where there are none.

        A tower that is trained sees a blank image then: every weight waits for a gradient, and
        ranks that hold parts of the weights for each other gather them in the same passes.
        """
        if layout.images is not None:
            pixels, grids = layout.images.pixels, layout.images.grids
        elif self._is_trained:
            pixels, grids = self.vision.blank
        else:
            return []
        with nullcontext() if self._is_trained else torch.no_grad():
            seen: list[Tensor] = self.vision(pixels, grids)
        return seen


def _with_images(embedded: Tensor, seen: list[Tensor], layout: SeenLayout) -> Tensor:
    """Return embeddings [T, 1, H] with the tokens of images; features are handed to layers."""
    layout.features.clear()
    if layout.images is None:
        return embedded + sum(output.sum() for output in seen) * 0.0 if seen else embedded
    rows, places = layout.images.rows, layout.images.places
    tokens, *features = (output[rows].unsqueeze(1).to(embedded.dtype) for output in seen)
    embedded = embedded.index_copy(0, places, tokens)
    if not features:
        return embedded
    handed: Tensor = _HandOver.apply(embedded, layout.features, *features)  # type: ignore[no-untyped-call]  # torch leaves apply untyped
    return handed


def _with_features(
    number: int,
    _layer: torch.nn.Module,
    _arguments: object,
    named: dict[str, Any],
    output: tuple[Tensor, Tensor | None],
) -> tuple[Tensor, Tensor | None] | None:
    """Add the features of images for a layer to its output, [T, 1, H]."""
    layout: SeenLayout = named["packed_seq_params"]
    if not layout.features or layout.images is None:
        return None
    hidden, context = output
    return hidden.index_add(0, layout.images.places, layout.features[number]), context


class _HandOver(torch.autograd.Function):
    """Hidden states as they are; features go to layers apart from the graph.

    A layer that is computed again has a backward pass of its own in the middle of the whole one,
    which must not reach the tower: gradients of features are collected, and go on from here when
    all layers are done.
    """

    @staticmethod
    @override
    def forward(ctx: Any, hidden: Tensor, handed: list[Tensor], *features: Tensor) -> Tensor:
        ctx.features = [feature.detach() for feature in features]
        for feature, leaf in zip(features, ctx.features, strict=True):
            leaf.requires_grad_(feature.requires_grad)
        handed.extend(ctx.features)
        return hidden.view_as(hidden)

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [feature.grad for feature in ctx.features]
        return gradient, None, *gradients
