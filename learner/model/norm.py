"""Norm of all models here."""

import torch
from megatron.core.transformer import TransformerConfig


class TorchRMSNorm(torch.nn.RMSNorm):
    """Root-mean-square norm that marks its gradient to be summed over tensor parallelism.

    Megatron's own wrapper refuses sequence parallelism; the mark on the weight has its gradients
    summed there.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_kwargs: object
    ) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # a mark
