"""Qwen3.5, also under later names: gated delta networks; attention in every fourth layer.

Dense, or with experts in every layer. Published folders have an encoder of pictures too, and layers
that predict further tokens: both are kept as they are.
"""

from slipstream.wire.models.families.delta import HYBRID_DEFAULTS, HYBRID_KEYS, SPLIT_DELTA, hybrid
from slipstream.wire.models.families.qwen2_moe import QWEN2_MOE, QWEN_MOE_KEYS
from slipstream.wire.models.families.tables import ENDS, MLP, NORMS, UNTIED, Family

# The gate of linear attention: SGLang computes what output_gate_type says, transformers SiLU.
_FIXED = {
    "attention_bias": False,
    "attn_output_gate": True,
    "mlp_only_layers": [],  # published of dense models, too
    "output_gate_type": "swish",
}
_KEYS = HYBRID_KEYS | {"mrope_section", "mtp_num_hidden_layers"}
_RENAMED = {"mtp_num_hidden_layers": "num_nextn_predict_layers"}
_IGNORED = frozenset({"mamba_ssm_dtype", "mtp_use_dedicated_embeddings"})

QWEN3_5 = Family(
    model_type="qwen3_5_text",
    models="Qwen3.5-0.8B to 27B, Qwen3.6-27B, Qwen3.8-27B",
    wrapped_by="qwen3_5",
    config=_FIXED,
    layer=NORMS,
    kinds=hybrid(SPLIT_DELTA),
    mlp=MLP,
    ends=ENDS,
    keys=_KEYS,
    renamed=_RENAMED,
    defaults=HYBRID_DEFAULTS,
    ignored=_IGNORED,
    further="mtp.",
    gates_attention=True,
    centres_norms=True,
)
QWEN3_5_MOE = Family(
    model_type="qwen3_5_moe_text",
    models="Qwen3.5-35B-A3B, Qwen3.5-122B-A10B, Qwen3.5-397B-A17B, Qwen3.6-35B-A3B",
    wrapped_by="qwen3_5_moe",
    config={**_FIXED, **UNTIED},
    layer=NORMS,
    kinds=hybrid(SPLIT_DELTA),
    mlp=MLP,
    sparse=QWEN2_MOE.sparse,
    ends=ENDS,
    keys=QWEN_MOE_KEYS | _KEYS | {"shared_expert_intermediate_size"},
    renamed={"num_local_experts": "num_experts", **_RENAMED},
    defaults={**HYBRID_DEFAULTS, "norm_topk_prob": True},
    ignored=_IGNORED,
    further="mtp.",
    gates_attention=True,
    centres_norms=True,
)
