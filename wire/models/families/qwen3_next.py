"""Qwen3-Next: gated delta networks, attention in every fourth layer, and experts in all."""

from slipstream.wire.models.families.delta import FUSED_DELTA, HYBRID_DEFAULTS, HYBRID_KEYS, hybrid
from slipstream.wire.models.families.qwen2_moe import EVERY_LAYER, QWEN2_MOE, QWEN_MOE_KEYS
from slipstream.wire.models.families.tables import ENDS, MLP, NORMS, UNTIED, Family

QWEN3_NEXT = Family(
    model_type="qwen3_next",
    models="Qwen3-Next-80B-A3B",
    config={"attention_bias": False, **EVERY_LAYER, **UNTIED},
    layer=NORMS,
    kinds=hybrid(FUSED_DELTA),
    mlp=MLP,
    sparse=QWEN2_MOE.sparse,
    ends=ENDS,
    keys=QWEN_MOE_KEYS | HYBRID_KEYS | {"shared_expert_intermediate_size"},
    renamed={"num_local_experts": "num_experts"},
    defaults={**HYBRID_DEFAULTS, "norm_topk_prob": True},
    further="mtp.",
    gates_attention=True,
    centres_norms=True,
)
