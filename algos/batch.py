"""The packed microbatch a loss sees.

Shapes: T tokens of all sequences of one microbatch laid end to end.
"""

from dataclasses import dataclass, fields

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """Everything per token, aligned: index t always means the token chosen at t.

    Whoever builds it writes 0.0 outside the mask, so that no formula meets a NaN there.
    """

    current_logprobs: Tensor  # [T] float32, the policy being optimized, carries gradient
    proximal_logprobs: Tensor  # [T] float32, the policy at the start of this learner step
    behavior_logprobs: Tensor  # [T] float32, the policy that sampled the token
    advantages: Tensor  # [T] float32
    loss_mask: Tensor  # [T] bool
    lags: Tensor | None = None  # [T] int, learner steps between the token's policy and this step
    global_num_tokens: int  # masked-in tokens over all microbatches and data-parallel ranks

    def __post_init__(self) -> None:
        """Reject misaligned tensors here, so that no loss has to."""
        want = self.current_logprobs.shape
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor) and value.shape != want:
                raise ValueError(
                    f"{field.name} has shape {tuple(value.shape)}, expected {tuple(want)}"
                )
        if self.global_num_tokens < 1:
            raise ValueError(f"global_num_tokens must be >= 1, got {self.global_num_tokens}")
