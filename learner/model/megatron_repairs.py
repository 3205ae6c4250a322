"""Defects of Megatron-Core that are worked around; a test fails when one of them is gone upstream.

- Without Transformer Engine the import of ``te_general_gemm`` in its router fails as a whole and
  leaves the name undefined: every forward pass with ``moe_router_dtype`` raises a NameError.
- Pipeline stages tell each other the shapes of what they send (``variable_seq_lengths``) by one
  batch of messages in one group. Of two stages whose chunks are interleaved each is both before and
  after the other, and takes the message for one direction as that for the other. The tensors
  themselves go by ``_p2p_ops``, which keeps the directions apart; so do their shapes now.
- Gradients of experts are summed over too few ranks where ``expert_model_parallel_size`` is 1 and
  ``tensor_model_parallel_size`` is not: see ``mark_expert``.
"""

import torch
from megatron.core.pipeline_parallel import p2p_communication
from megatron.core.transformer.moe import moe_utils
from torch import Tensor

from slipstream.learner.model.device import device


def install() -> None:
    """Repair what is repaired by a replacement; a second call does nothing."""
    vars(moe_utils).setdefault("te_general_gemm", None)
    p2p_communication.P2PCommunicator._communicate_shapes = _communicate_shapes


def mark_expert(parameter: torch.nn.Parameter) -> None:
    """Have an expert's gradient summed over the ranks that hold the same expert."""
    parameter.allreduce = False  # type: ignore[attr-defined]  # Megatron's mark


def _communicate_shapes(
    stage: p2p_communication.P2PCommunicator,
    tensor_send_next: Tensor | None,
    tensor_send_prev: Tensor | None,
    recv_prev: bool,
    recv_next: bool,
) -> tuple[list[int], list[int]]:
    """Take the place of the method: return the shapes from the stages before and after."""

    def sent(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else torch.tensor(tensor.size(), device=device())

    def room(is_wanted: bool) -> Tensor | None:
        return torch.zeros(3, dtype=torch.int64, device=device()) if is_wanted else None

    from_previous, from_next = room(recv_prev), room(recv_next)
    requests = p2p_communication._p2p_ops(
        tensor_send_prev=sent(tensor_send_prev),
        tensor_recv_prev=from_previous,
        tensor_send_next=sent(tensor_send_next),
        tensor_recv_next=from_next,
        group=stage.pp_group,
        prev_pipeline_rank=stage.prev_rank,
        next_pipeline_rank=stage.next_rank,
    )
    for request in requests.values():
        request.wait()
    nothing = [0, 0, 0]
    return (
        nothing if from_previous is None else from_previous.tolist(),
        nothing if from_next is None else from_next.tolist(),
    )
