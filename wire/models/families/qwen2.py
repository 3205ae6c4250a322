"""Qwen2 and Qwen2.5: queries, keys and values have a bias, whatever attention_bias is."""

from slipstream.wire.models.families.tables import ENDS, GROUPED_ATTENTION, MLP, QKV_BIAS, Family

WINDOW_KEYS = frozenset({"sliding_window", "max_window_layers"})  # unused without a window

QWEN2 = Family(
    model_type="qwen2",
    models="Qwen2, Qwen2.5, DeepSeek-R1-Distill-Qwen",
    config={"use_mrope": False},
    layer={**GROUPED_ATTENTION, **QKV_BIAS},
    mlp=MLP,
    ends=ENDS,
    ignored=WINDOW_KEYS | {"attention_bias"},
)
