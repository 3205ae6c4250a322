"""GLM-4 (0414): norms after attention and MLP too, and half of a head's channels turn, in pairs."""

from slipstream.wire.models.families.tables import (
    ENDS,
    GROUPED_ATTENTION,
    INNER_MULTIPLE,
    QKV_BIAS,
    Family,
    HfTensor,
    OptionalTable,
    Parameter,
    copy,
    down,
)

GLM4 = Family(
    model_type="glm4",
    models="GLM-4-9B-0414, GLM-4-32B-0414, GLM-Z1",
    layer={
        **GROUPED_ATTENTION,
        "self_attn_bda.norm.weight": copy("post_self_attn_layernorm.weight", "hidden"),
        "mlp_bda.norm.weight": copy("post_mlp_layernorm.weight", "hidden"),
    },
    options=(OptionalTable("attention_bias", True, QKV_BIAS),),
    mlp={
        "mlp.linear_fc1.weight": Parameter(
            "gate_up",
            (
                HfTensor(
                    "mlp.gate_up_proj.weight",
                    ("inner", "hidden"),
                    row_multiple=INNER_MULTIPLE,
                    below=("inner",),
                ),
            ),
            "mlp.gate_up_proj.weight",
        ),
        "mlp.linear_fc2.weight": down("mlp.down_proj.weight"),
    },
    ends=ENDS,
    keys=frozenset({"partial_rotary_factor"}),
    defaults={"attention_bias": True, "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-7},
    turns_pairs=True,
)
