"""Mixtral: Mistral's attention without a window, eight experts, two for a token."""

from slipstream.wire.models.families.tables import (
    ENDS,
    GROUPED_ATTENTION,
    MLP,
    UNTIED,
    Family,
    experts,
)

MIXTRAL = Family(
    model_type="mixtral",
    models="Mixtral-8x7B, Mixtral-8x22B",
    config={"sliding_window": None, **UNTIED},
    layer=GROUPED_ATTENTION,
    mlp=MLP,
    sparse=experts("block_sparse_moe", "w1", "w3", "w2"),
    ends=ENDS,
    keys=frozenset({"num_experts_per_tok"}),
    # Its intermediate_size is that of an expert, and it has no other MLP.
    renamed={"num_local_experts": "num_experts"},
    defaults={
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
        "norm_topk_prob": True,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    ignored=frozenset({"router_jitter_noise"}),
)
