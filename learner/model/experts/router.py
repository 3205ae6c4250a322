"""Chooses each token's experts as the model's family does, and weighs them.

Shapes: T tokens, E experts in n groups, k experts per token.
"""

from collections.abc import Callable

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from typing_extensions import override

from slipstream.learner.model.experts.expert_choices import ExpertChoices
from slipstream.learner.model.experts.routing_rules import chosen_experts, scores_of, weights_of
from slipstream.wire.models.hf_config import HfConfig


class PolicyRouter(TopKRouter):  # type: ignore[misc]  # megatron is untyped
    """Replaces Megatron's router, whose rules do not fit every family.

    ``correction_bias`` is part of the weights but no parameter: no gradient reaches it, and it
    stays unchanged.
    """

    def __init__(self, hf: HfConfig, config: TransformerConfig, **arguments: object) -> None:
        super().__init__(config=config, **arguments)
        self._hf = hf
        self._rule = hf.family.router
        self.choices: ExpertChoices | None = None  # choices of the present microbatch
        bias = None
        if self._rule.has_bias:
            bias = torch.zeros(hf.num_routed_experts, device=self.weight.device)
        self.correction_bias: Tensor | None
        self.register_buffer("correction_bias", bias)

    @override
    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the weights of each token's experts, [T, k] float32, and these, [T, k] int64."""
        logits = logits.view(-1, self._hf.num_routed_experts)
        logits = self.apply_z_loss(logits, padding_mask=padding_mask)
        scores = scores_of(logits, self._rule.score)
        with torch.no_grad():
            chosen = chosen_experts(
                scores,
                count=self._hf.experts_per_token,
                bias=self.correction_bias,
                groups=self._hf.num_router_groups,
                taken_groups=self._hf.topk_group or 1,
                group_score=self._rule.group_score,
            )
            if self.choices is not None:
                sparse = sum(map(self._hf.is_sparse, range(self.layer_number - 1)))  # earlier
                chosen = self.choices.decided(sparse, chosen)
        weights = weights_of(
            scores, chosen, is_share=self._hf.norm_topk_prob, factor=self._hf.routed_scaling_factor
        )
        return weights, chosen

    @override
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PolicyRouter":
        """Move with the model, but keep the bias in float32: its differences are small."""
        bias = self.correction_bias
        super()._apply(fn, recurse)
        if bias is not None:
            self.correction_bias = bias.to(self.weight.device)
        return self
