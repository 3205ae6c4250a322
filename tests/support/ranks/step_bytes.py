"""Counts the bytes that a learner step of a small model in bfloat16 moves, as on a GPU.

Usage: step_bytes WORK_FOLDER
Writes WORK_FOLDER/0.json: a row of each group and operator, with its bytes in units of ``_units``
and per token.
"""

import os
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # noqa: TID251 Triton reads it while it is imported

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor

from slipstream.algos import weight_gradients
from slipstream.algos.logprobs import linear_logprobs, sampling
from slipstream.learner.config import LearnerSection
from slipstream.learner.training.algorithm import algorithm_of
from slipstream.wire.models.hf_config import HfConfig
from slipstream.wire.process.phases import PhaseClock
from tests.support import bigrams
from tests.support.moved_bytes import LOGITS, OTHER, MovedBytes, OneOperator, count_kernels, memory
from tests.support.ranks.policy import random_outcomes
from tests.support.ranks.program import finish, join_ranks, run, settings_of
from tests.support.tiny_models import write_tiny_model

_VOCABULARY = 700  # no multiple of a block
_MICROBATCHES = ((0, 1, 2, 3), (4, 5, 6, 7))  # of sequences
_TOKENS = 40  # of a microbatch
_CHOSEN = 24  # number of chosen tokens, whose states alone meet the output layer


def _group(counter: MovedBytes) -> None:
    """Name the parts of a step."""
    from megatron.core.models.common.embeddings import language_model_embedding
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.mlp import MLP

    from slipstream.learner.model import rotary
    from slipstream.learner.model.layers import TorchRMSNorm
    from slipstream.learner.training import states
    from slipstream.learner.training.passes import ModelPasses
    from slipstream.learner.training.trainable import Trainable

    counter.grouped(language_model_embedding.LanguageModelEmbedding, "forward", "embedding")
    counter.grouped(SelfAttention, "forward", "attention")
    counter.grouped(MLP, "forward", "mlp")
    counter.grouped(TorchRMSNorm, "forward", "norms")
    counter.grouped(rotary.Rotary, "at", "rotary")
    counter.grouped(rotary.Rotation, "turned", "rotary")
    counter.grouped(states, "linear_logprobs", LOGITS)
    counter.grouped(Trainable, "update", "update")
    counter.grouped(ModelPasses, "train", OTHER)


def _compute_as_a_gpu(counter: MovedBytes) -> None:
    """Count from shapes what a GPU computes by one operator, and a CPU by several."""
    from slipstream.learner.model import attention
    from slipstream.learner.model.cuda_attention import AttentionBounds
    from tests.support.bounded_attention import bounded_attention

    def product(left: Tensor, right: Tensor) -> Tensor:
        with counter.paused():
            result = left.float() @ right.float()
        counter.add_product("product", [left, right], [result])
        return result

    def add_product(total: Tensor, by_output: Tensor, inputs: Tensor) -> None:
        with counter.paused():
            total.addmm_(by_output.t().to(total.dtype), inputs.to(total.dtype))
        counter.add_product("addmm", [total, by_output, inputs], [total])

    def normed(x: Tensor, _shape: object, weight: Tensor, eps: float) -> Tensor:
        def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
            return torch.rms_norm(x, weight.shape, weight, eps)

        taken = memory(x) + memory(weight) + 4 * x.numel() // x.size(-1)  # a number of each row
        sizes = taken + memory(x), taken + 2 * memory(x) + memory(weight)
        return OneOperator.apply(counter, rms_norm, sizes, x, weight)

    def attend(
        query: Tensor, key: Tensor, value: Tensor, bounds: AttentionBounds, scale: float
    ) -> Tensor:
        def attend_packed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return bounded_attention(query, key, value, bounds, scale)

        taken, given = memory(query, key, value), memory(query) // query.size(-1) * value.size(-1)
        forward = taken + given + 4 * query.size(0) * query.size(1)  # a sum of each row
        sizes = forward, forward + taken + given
        return OneOperator.apply(counter, attend_packed, sizes, query, key, value)

    F.rms_norm = normed
    sampling.product = product
    weight_gradients._add_chunks = add_product
    linear_logprobs.KEPT_BYTES = 0  # as with the logits of many tokens
    attention.has_kernel = lambda query: query.dtype == torch.bfloat16
    attention.cuda_attention = attend


def _units(hf: HfConfig, tokens: int, chosen: int, parameters: int) -> dict[str, int]:
    """Return the bytes of the unit of each group, in the step."""
    layers, hidden = hf.num_hidden_layers, 2 * tokens * hf.hidden_size
    return {
        "products": tokens,
        LOGITS: 4 * chosen * hf.vocab_size,
        "rows": 4 * chosen * hf.hidden_size,
        "mlp": 2 * tokens * layers * hf.intermediate_size,
        "attention": hidden * layers,
        "rotary": tokens * layers * (hf.num_attention_heads + hf.num_query_groups) * hf.kv_channels,
        "norms": hidden * (2 * layers + 1),
        "embedding": hidden,
        OTHER: hidden,
        "accumulation": len(_MICROBATCHES) * parameters,
        "update": parameters,
    }


def main(work: Path) -> None:
    learner = LearnerSection(dtype="bfloat16", clip_grad=1e-3)  # every gradient is clipped
    topology = join_ranks(work, 0, 1, learner)
    from slipstream.learner.starting_policy import build_policy
    from slipstream.learner.training.step import train_step

    folder = write_tiny_model(work / "model", "qwen2", vocab_size=_VOCABULARY)
    settings = settings_of(folder, learner, {})
    policy = build_policy(settings, algorithm_of(settings), topology)

    def step(*microbatches: tuple[int, ...]) -> None:
        batches, plan = bigrams.minibatch(*microbatches)
        data = random_outcomes(bigrams.sequences(max(plan.members) + 1))
        train_step(policy, [batches], [plan], data, algorithm_of(settings), PhaseClock())

    step(*_MICROBATCHES[:1])  # makes the optimizer's state
    counter = MovedBytes(
        is_logits=lambda tensor: tensor.shape == (_CHOSEN, _VOCABULARY),
        gradients=policy._gradient_buffers(),
    )
    _group(counter)
    _compute_as_a_gpu(counter)
    count_kernels(counter)
    with counter:
        step(*_MICROBATCHES)
    tokens, chosen = (count * len(_MICROBATCHES) for count in (_TOKENS, _CHOSEN))
    parameters = sum(weight.numel() for weight in policy.model.parameters())
    units = _units(policy.model.hf_config, tokens, chosen, parameters)
    moved = counter.moved.most_common()
    rows = [(group, name, size / units[group], size / tokens) for (group, name), size in moved]
    finish(work / "0.json", rows)


if __name__ == "__main__":
    run(main)
