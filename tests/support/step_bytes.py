"""Counts the bytes that a learner step of a small model in bfloat16 moves, as on a GPU.

Usage: step_bytes FOLDER
Writes a line of JSON: per group and operator, bytes in units of the group and per token.
"""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from slipstream.learner.batches.packing import TrainTrajectory, pack
from slipstream.learner.batches.plan import MinibatchPlan
from slipstream.learner.config import LearnerSection
from slipstream.learner.model import device
from slipstream.wire.models.hf_config import load_hf_config
from slipstream.wire.process.phases import PhaseClock
from tests.support.moved_bytes import (
    ACCUMULATION,
    LOGITS,
    OTHER,
    PRODUCTS,
    ROWS,
    MovedBytes,
    OneOperator,
    count_kernels,
    memory,
)
from tests.support.tiny_models import FAMILIES, SHAPE
from tests.support.waiting import HANG_S

if TYPE_CHECKING:
    from slipstream.learner.model.cuda_attention import AttentionBounds
    from slipstream.learner.model.rank_model import RankModel

_LENGTH, _SEQUENCES, _MICROBATCHES = 24, 2, 3
_TOKENS = _LENGTH * _SEQUENCES  # of a microbatch
_VOCABULARY = 700  # no multiple of a block


def _group(counter: MovedBytes) -> None:
    from megatron.core.models.common.embeddings.language_model_embedding import (
        LanguageModelEmbedding,
    )
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.mlp import MLP

    from slipstream.learner.model.layers import TorchRMSNorm
    from slipstream.learner.model.rotary import Rotary, Rotation
    from slipstream.learner.training import policy
    from slipstream.learner.training.passes import ModelPasses
    from slipstream.learner.training.trainable import Trainable

    counter.grouped(LanguageModelEmbedding, "forward", "embedding")
    counter.grouped(SelfAttention, "forward", "attention")
    counter.grouped(MLP, "forward", "mlp")
    counter.grouped(TorchRMSNorm, "forward", "norms")
    counter.grouped(Rotary, "at", "rotary")
    counter.grouped(Rotation, "turned", "rotary")
    counter.grouped(policy, "linear_logprobs", LOGITS)
    counter.grouped(Trainable, "update", "update")
    counter.grouped(ModelPasses, "train", OTHER)


def _compute_as_a_gpu(counter: MovedBytes) -> None:
    """Count from shapes what a GPU computes by one operator, and a CPU by several."""
    from slipstream.algos import linear_logprobs
    from slipstream.learner.model import attention

    def product(left: Tensor, right: Tensor) -> Tensor:
        with counter.paused():
            result = left.float() @ right.float()
        counter.add_product("product", [left, right], [result])
        return result

    def normed(x: Tensor, _shape: object, weight: Tensor, eps: float) -> Tensor:
        def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
            return torch.rms_norm(x, weight.shape, weight, eps)

        taken = memory(x) + memory(weight) + 4 * x.numel() // x.size(-1)  # a number of each row
        sizes = taken + memory(x), taken + 2 * memory(x) + memory(weight)
        return OneOperator.apply(counter, rms_norm, sizes, x, weight)

    def attend(
        query: Tensor, key: Tensor, value: Tensor, bounds: "AttentionBounds", scale: float
    ) -> Tensor:
        def attend_packed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return attention.bounded_attention(query, key, value, bounds, scale)

        taken, given = memory(query, key, value), memory(query) // query.size(-1) * value.size(-1)
        forward = taken + given + 4 * query.size(0) * query.size(1)  # a sum of each row
        sizes = forward, forward + taken + given
        return OneOperator.apply(counter, attend_packed, sizes, query, key, value)

    F.rms_norm = normed
    linear_logprobs._product = product
    attention.has_kernel = lambda query: query.dtype == torch.bfloat16
    attention.cuda_attention = attend


def _units(model: "RankModel") -> dict[str, int]:
    """Return the bytes of the unit of each group, in the step."""
    config, tokens = model.hf_config, _TOKENS * _MICROBATCHES
    layers, hidden = config.num_hidden_layers, config.hidden_size
    turned = (config.num_attention_heads + config.num_query_groups) * config.kv_channels
    parameters = sum(weight.numel() for weight in model.parameters())
    products = sum(
        (4 if "embedding" in name else 3) * (weight.numel() + _TOKENS * sum(weight.shape))
        for name, weight in model.named_parameters()
        if weight.dim() == 2
    )
    return {
        PRODUCTS: 2 * products * _MICROBATCHES,
        LOGITS: 4 * tokens * config.vocab_size,
        ROWS: 4 * tokens * hidden,
        "mlp": 2 * tokens * layers * config.intermediate_size,
        "attention": 2 * tokens * layers * hidden,
        "rotary": tokens * layers * turned,
        "norms": 2 * tokens * (2 * layers + 1) * hidden,
        "embedding": 2 * _MICROBATCHES * config.vocab_size * hidden,
        OTHER: 2 * tokens * hidden,
        ACCUMULATION: _MICROBATCHES * parameters,
        "update": parameters,
    }


def _sequences() -> list[TrainTrajectory]:
    rng = np.random.default_rng(4)
    mask = np.arange(_LENGTH) >= _LENGTH // 8
    return [
        TrainTrajectory(
            token_ids=rng.integers(3, 500, _LENGTH).astype(np.int32),
            loss_mask=mask,
            behavior_logprobs=np.where(mask, -6.0, 0.0).astype(np.float32),
            temperature=1.0,
        )
        for _ in range(_SEQUENCES * _MICROBATCHES)
    ]


def main(folder: Path) -> None:
    device.prepare()
    device.set_threads(1)
    from slipstream.learner.model.gpt import build_model
    from slipstream.learner.model.topology import destroy_topology, init_topology
    from slipstream.learner.training.optimizer import use_fused_kernels
    from slipstream.learner.training.policy import Policy
    from slipstream.learner.training.step import train_step
    from tests.support.ranks.policy import algorithm, random_outcomes

    topology = init_topology(rank=0, world_size=1, store=HashStore(), seed=1, timeout_s=HANG_S)
    config = {**SHAPE, **FAMILIES["qwen2"], "vocab_size": _VOCABULARY, "model_type": "qwen2"}
    (folder / "config.json").write_text(json.dumps(config))
    model = build_model(load_hf_config(folder), dtype=torch.bfloat16, extra={})
    model.train()
    policy = Policy(model, LearnerSection(clip_grad=1e-3), topology)
    use_fused_kernels(policy._optimizer)
    sequences = _sequences()
    parts = [range(i, i + _SEQUENCES) for i in range(0, len(sequences), _SEQUENCES)]
    batches = [pack([sequences[i] for i in part], device.device()) for part in parts]
    plan = MinibatchPlan((tuple(tuple(part) for part in parts),))
    data, chosen = random_outcomes(sequences), algorithm()

    def step() -> None:
        train_step(policy, [batches], [plan], data, chosen, PhaseClock())

    step()  # the first makes the optimizer's state
    counter = MovedBytes(
        is_logits=lambda tensor: tensor.shape == (_TOKENS, _VOCABULARY),
        gradients=policy._gradient_buffers(),
    )
    _group(counter)
    _compute_as_a_gpu(counter)
    if os.environ.get("TRITON_INTERPRET") == "1":  # noqa: TID251 Triton reads it
        count_kernels(counter)
    with counter:
        step()
    tokens, units = _TOKENS * _MICROBATCHES, _units(model)
    destroy_topology()
    rows = [
        {"group": group, "name": name, "units": count / units[group], "per token": count / tokens}
        for (group, name), count in sorted(counter.moved.items())
    ]
    sys.stdout.write(json.dumps(rows) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
