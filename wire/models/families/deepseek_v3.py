"""DeepSeek-V3 and R1, and Moonlight, which has its architecture in small.

DeepSeek-AI 2024 (arXiv:2412.19437), section 2.1: a token's experts are chosen by sigmoid scores
with a bias that balances loads, and weighed by the scores without it. The bias is no parameter of
a gradient: it stays what it was, and is published with the rest. Layers that predict further tokens
(section 2.2) are left out.
"""

from slipstream.wire.models.families.deepseek_v2 import DEEPSEEK_IGNORED, DEEPSEEK_KEYS
from slipstream.wire.models.families.latent import (
    COMPRESSED_QUERIES,
    LATENT_ATTENTION,
    WHOLE_QUERIES,
)
from slipstream.wire.models.families.tables import (
    ENDS,
    EXPERTS,
    MLP,
    ROUTER_BIAS,
    SHARED_EXPERTS,
    Family,
    RouterTraits,
)

DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    models="DeepSeek-V3, DeepSeek-R1, Moonlight-16B-A3B",
    config={
        "attention_bias": False,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "rope_interleave": True,
    },
    layer=LATENT_ATTENTION,
    options=(WHOLE_QUERIES, COMPRESSED_QUERIES),
    mlp=MLP,
    sparse={**EXPERTS, **ROUTER_BIAS, **SHARED_EXPERTS},
    ends=ENDS,
    keys=DEEPSEEK_KEYS | {"num_nextn_predict_layers"},
    renamed={"n_routed_experts": "num_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    defaults={"n_shared_experts": 1, "norm_topk_prob": True},
    ignored=DEEPSEEK_IGNORED,
    router=RouterTraits("sigmoid", has_bias=True),
    is_latent=True,
    turns_pairs=True,
    has_dp_attention=True,
)
