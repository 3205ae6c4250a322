"""gpt-oss: windows in every other layer, sinks in attention, and experts with biases.

OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card" (arXiv:2508.10925), section 2. Each query head
has a sink: a score that takes a share of the softmax, and has no value. The matrices of all experts
of a layer are one tensor, published in MXFP4 (learner/model/weights/mxfp4.py).
"""

from slipstream.wire.models.families.tables import (
    ENDS,
    FULL_ATTENTION,
    GROUPED_ATTENTION,
    QKV_BIAS,
    UNTIED,
    Activation,
    Family,
    LayerKind,
    copy,
    stacked,
)

_SLOPE = 1.702

GPT_OSS = Family(
    model_type="gpt_oss",
    models="gpt-oss-20b, gpt-oss-120b",
    config={"attention_bias": True, "swiglu_alpha": _SLOPE, **UNTIED},
    layer={
        **GROUPED_ATTENTION,
        **QKV_BIAS,
        "self_attention.linear_proj.bias": copy("self_attn.o_proj.bias", "hidden"),
        "self_attention.core_attention.softmax_offset": copy(
            "self_attn.sinks", "heads", divided="rows"
        ),
    },
    kinds={"sliding_attention": LayerKind(has_window=True), FULL_ATTENTION: LayerKind()},
    mlp={},
    sparse={
        "mlp.router.weight": copy("mlp.router.weight", "experts", "hidden"),
        "mlp.router.bias": copy("mlp.router.bias", "experts"),
        "mlp.experts.local_experts.*.linear_fc1.weight": stacked(
            "mlp.experts.gate_up_proj",
            "mlp.experts.w13_weight",
            "expert_inner",
            "hidden",
            below=("expert_inner",),
        ),
        "mlp.experts.local_experts.*.linear_fc1.bias": stacked(
            "mlp.experts.gate_up_proj_bias",
            "mlp.experts.w13_weight_bias",
            "expert_inner",
            below=("expert_inner",),
        ),
        "mlp.experts.local_experts.*.linear_fc2.weight": stacked(
            "mlp.experts.down_proj", "mlp.experts.w2_weight", "hidden", "expert_inner"
        ),
        "mlp.experts.local_experts.*.linear_fc2.bias": stacked(
            "mlp.experts.down_proj_bias", "mlp.experts.w2_weight_bias", "hidden", divided="first"
        ),
    },
    ends=ENDS,
    # Its intermediate_size is that of an expert, and it has no other MLP.
    keys=frozenset({"num_experts_per_tok", "sliding_window", "swiglu_limit"}),
    renamed={"num_local_experts": "num_experts"},
    defaults={
        "full_attention_interval": 2,
        "head_dim": 64,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
    },
    # Other names of num_experts_per_tok and of original_max_position_embeddings.
    ignored=frozenset({"experts_per_token", "initial_context_length"}),
    activation=Activation(slope=_SLOPE, offset=1.0, is_limited=True),
    has_dp_attention=True,
)
