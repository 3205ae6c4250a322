"""DeepSeek-V2: latent attention, dense layers first, experts chosen by groups.

DeepSeek-AI 2024 (arXiv:2405.04434), section 2.1.2 (attention) and 2.2 (experts).
"""

from slipstream.wire.models.families.latent import (
    COMPRESSED_QUERIES,
    LATENT_ATTENTION,
    LATENT_KEYS,
    WHOLE_QUERIES,
)
from slipstream.wire.models.families.tables import (
    ENDS,
    EXPERTS,
    MLP,
    SHARED_EXPERTS,
    Family,
    RouterTraits,
)

# Keys of training, of device-limited routing in its own code, and of unused code.
DEEPSEEK_IGNORED = frozenset(
    {"auto_map", "aux_loss_alpha", "ep_size", "seq_aux", "qk_head_dim", "head_dim"}
)
DEEPSEEK_KEYS = LATENT_KEYS | {
    "first_k_dense_replace",
    "moe_intermediate_size",
    "n_shared_experts",
    "n_group",
    "topk_group",
    "num_experts_per_tok",
    "routed_scaling_factor",
    "norm_topk_prob",
}

DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    models="DeepSeek-V2, DeepSeek-V2-Lite, DeepSeek-Coder-V2",
    config={
        "attention_bias": False,
        "moe_layer_freq": 1,
        "scoring_func": "softmax",
        "norm_topk_prob": False,  # its own code scales or normalizes, others do both
    },
    layer=LATENT_ATTENTION,
    options=(WHOLE_QUERIES, COMPRESSED_QUERIES),
    mlp=MLP,
    sparse={**EXPERTS, **SHARED_EXPERTS},
    ends=ENDS,
    keys=DEEPSEEK_KEYS | {"topk_method"},
    renamed={"n_routed_experts": "num_experts"},
    defaults={"topk_method": "greedy", "n_shared_experts": 2},
    ignored=DEEPSEEK_IGNORED,
    router=RouterTraits(group_score="best"),
    is_latent=True,
    turns_pairs=True,
    has_dp_attention=True,
)
