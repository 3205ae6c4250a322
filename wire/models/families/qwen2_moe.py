"""Qwen1.5-MoE and Qwen2-MoE: experts, and one more that every token passes through a gate."""

from slipstream.wire.models.families.qwen2 import WINDOW_KEYS
from slipstream.wire.models.families.tables import (
    ENDS,
    EXPERTS,
    GROUPED_ATTENTION,
    MLP,
    QKV_BIAS,
    UNTIED,
    Family,
    copy,
    mlp,
)

# Every layer has experts: the engine reads these keys, the learner knows no other layers.
EVERY_LAYER = {"decoder_sparse_step": 1, "mlp_only_layers": []}
QWEN_MOE_KEYS = frozenset(
    {"num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"}
)

QWEN2_MOE = Family(
    model_type="qwen2_moe",
    models="Qwen1.5-MoE, Qwen2-57B-A14B",
    config={"qkv_bias": True, **EVERY_LAYER, **UNTIED},
    layer={**GROUPED_ATTENTION, **QKV_BIAS},
    mlp=MLP,
    sparse={
        **EXPERTS,
        **mlp("mlp.shared_expert", "mlp.shared_experts", "shared_inner"),
        "mlp.shared_experts.gate_weight": copy(
            "mlp.shared_expert_gate.weight", "one", "hidden", divided="whole"
        ),
    },
    ends=ENDS,
    keys=QWEN_MOE_KEYS | {"shared_expert_intermediate_size"},
    ignored=WINDOW_KEYS,
    has_dp_attention=True,
)
