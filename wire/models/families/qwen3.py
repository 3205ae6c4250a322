"""Qwen3: queries and keys are normalized per head."""

from slipstream.wire.models.families.qwen2 import WINDOW_KEYS
from slipstream.wire.models.families.tables import ENDS, GROUPED_ATTENTION, MLP, QK_NORM, Family

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
