"""Latent attention (MLA), as in DeepSeek's families and their kin.

DeepSeek-AI 2024, "DeepSeek-V2" (arXiv:2405.04434), section 2.1: keys and values are expanded from
a compressed vector of each token, and the channels that turn with the position are one key head
that all query heads share. Queries may be compressed too.
"""

from slipstream.wire.models.families.tables import (
    NORMS,
    HfTensor,
    OptionalTable,
    Parameter,
    Table,
    copy,
)

LATENT_ATTENTION: Table = {
    **NORMS,
    "self_attention.linear_kv_down_proj.weight": Parameter(
        "copy",
        (HfTensor("self_attn.kv_a_proj_with_mqa.weight", ("key_rank_and_rotary", "hidden")),),
        divided="whole",
    ),
    "self_attention.kv_layernorm.weight": copy("self_attn.kv_a_layernorm.weight", "key_rank"),
    "self_attention.linear_kv_up_proj.weight": copy(
        "self_attn.kv_b_proj.weight", "keys_and_values", "key_rank", divided="rows"
    ),
    "self_attention.linear_proj.weight": copy("self_attn.o_proj.weight", "hidden", "outputs"),
}
WHOLE_QUERIES = OptionalTable(
    "q_lora_rank",
    False,
    {
        "self_attention.linear_q_proj.weight": copy(
            "self_attn.q_proj.weight", "queries", "hidden", divided="rows"
        )
    },
)
COMPRESSED_QUERIES = OptionalTable(
    "q_lora_rank",
    True,
    {
        "self_attention.linear_q_down_proj.weight": copy(
            "self_attn.q_a_proj.weight", "query_rank", "hidden", divided="whole"
        ),
        "self_attention.q_layernorm.weight": copy("self_attn.q_a_layernorm.weight", "query_rank"),
        "self_attention.linear_q_up_proj.weight": copy(
            "self_attn.q_b_proj.weight", "queries", "query_rank", divided="rows"
        ),
    },
)
# SGLang keeps both compressing projections as one where there are two.
FUSED_BY_ENGINE = ("self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight")
FUSED_NAME = "self_attn.fused_qkv_a_proj_with_mqa.weight"
LATENT_KEYS = frozenset(
    {"q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"}
)
