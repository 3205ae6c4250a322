"""GLM-4.5 and 4.6: DeepSeek-V3's experts behind grouped-query attention."""

from slipstream.wire.models.families.tables import (
    ENDS,
    EXPERTS,
    GROUPED_ATTENTION,
    MLP,
    QK_NORM,
    QKV_BIAS,
    ROUTER_BIAS,
    SHARED_EXPERTS,
    UNTIED,
    Family,
    OptionalTable,
    RouterTraits,
)

GLM4_MOE = Family(
    model_type="glm4_moe",
    models="GLM-4.5, GLM-4.5-Air, GLM-4.6",
    config=UNTIED,
    layer=GROUPED_ATTENTION,
    options=(
        OptionalTable("attention_bias", True, QKV_BIAS),
        OptionalTable("use_qk_norm", True, QK_NORM),
    ),
    mlp=MLP,
    sparse={**EXPERTS, **ROUTER_BIAS, **SHARED_EXPERTS},
    ends=ENDS,
    keys=frozenset(
        {
            "first_k_dense_replace",
            "moe_intermediate_size",
            "n_group",
            "n_shared_experts",
            "norm_topk_prob",
            "num_experts_per_tok",
            "num_nextn_predict_layers",
            "partial_rotary_factor",
            "routed_scaling_factor",
            "topk_group",
            "use_qk_norm",
        }
    ),
    renamed={"n_routed_experts": "num_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    defaults={
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
    },
    router=RouterTraits("sigmoid", has_bias=True),
    has_dp_attention=True,
)
