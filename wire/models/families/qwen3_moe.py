"""Qwen3-MoE: Qwen3 with experts in every layer."""

from slipstream.wire.models.families.qwen2 import WINDOW_KEYS
from slipstream.wire.models.families.qwen2_moe import EVERY_LAYER, QWEN_MOE_KEYS
from slipstream.wire.models.families.tables import (
    ENDS,
    EXPERTS,
    GROUPED_ATTENTION,
    MLP,
    QK_NORM,
    UNTIED,
    Family,
)

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    models="Qwen3-30B-A3B, Qwen3-235B-A22B",
    config={
        "attention_bias": False,
        **EVERY_LAYER,
        **UNTIED,
        # Keys of Qwen3-Coder for what the whole family has.
        "qkv_bias": False,
        "shared_expert_intermediate_size": 0,
        "use_qk_norm": True,
    },
    layer={**GROUPED_ATTENTION, **QK_NORM},
    mlp=MLP,
    sparse=EXPERTS,
    ends=ENDS,
    renamed={"num_local_experts": "num_experts"},  # written so by transformers 5
    keys=QWEN_MOE_KEYS,
    ignored=WINDOW_KEYS,
    has_dp_attention=True,
)
