"""Qwen3: queries and keys are normalized per head."""

from slipstream.wire.models.families.parts import ENDS, GROUPED_ATTENTION, MLP, QK_NORM, Family
from slipstream.wire.models.families.qwen2 import WINDOW_KEYS

QWEN3 = Family(
    model_type="qwen3",
    models="Qwen3",
    config={"attention_bias": False},
    layer={**GROUPED_ATTENTION, **QK_NORM},
    mlp=MLP,
    ends=ENDS,
    ignored=WINDOW_KEYS,
    has_dp_attention=True,
)
