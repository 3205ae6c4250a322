"""Gated delta networks among layers of full attention, as in Qwen3-Next and Qwen3.5.

Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks" (arXiv:2412.06464): a layer keeps a matrix of
each head instead of keys and values, and every token corrects what it holds under the token's key.
Several heads of values share a head of queries and keys. The other layers have attention whose
output passes a gate of each channel, computed with the queries.
"""

from collections.abc import Mapping

from slipstream.wire.models.families.tables import (
    FULL_ATTENTION,
    QK_NORM,
    HfTensor,
    LayerKind,
    Parameter,
    Table,
    copy,
)

LINEAR_ATTENTION = "linear_attention"
GATED_ATTENTION: Table = {
    **QK_NORM,
    "self_attention.linear_qkv.weight": Parameter(
        "qkv",
        (
            HfTensor("self_attn.q_proj.weight", ("queries_and_gates", "hidden")),
            HfTensor("self_attn.k_proj.weight", ("keys", "hidden")),
            HfTensor("self_attn.v_proj.weight", ("keys", "hidden")),
        ),
        "self_attn.qkv_proj.weight",
    ),
    "self_attention.linear_proj.weight": copy("self_attn.o_proj.weight", "hidden", "outputs"),
}
_ALIKE: Table = {
    "self_attention.conv1d.weight": Parameter(
        "delta",
        (
            HfTensor(
                "linear_attn.conv1d.weight",
                ("linear_keys", "one", "taps"),
                below=("linear_keys", "linear_values"),
                last_like="linear_attn.out_proj.weight",
            ),
        ),
    ),
    "self_attention.A_log": Parameter(
        "copy", (HfTensor("linear_attn.A_log", ("linear_heads",), dtype="float32"),), divided="rows"
    ),
    "self_attention.dt_bias": copy("linear_attn.dt_bias", "linear_heads", divided="rows"),
    "self_attention.norm.weight": copy("linear_attn.norm.weight", "linear_head"),
    "self_attention.out_proj.weight": copy(
        "linear_attn.out_proj.weight", "hidden", "linear_values"
    ),
}
# Rows of queries, keys and values one after the other, and of gates, decays and strengths apart.
SPLIT_DELTA: Table = {
    "self_attention.in_proj.weight": Parameter(
        "delta",
        (
            HfTensor(
                "linear_attn.in_proj_qkv.weight",
                ("linear_keys", "hidden"),
                below=("linear_keys", "linear_values"),
                last_like="linear_attn.out_proj.weight",
                engine_name="linear_attn.in_proj_qkvz.weight",
            ),
            HfTensor(
                "linear_attn.in_proj_z.weight",
                ("linear_values", "hidden"),
                engine_name="linear_attn.in_proj_qkvz.weight",
            ),
            HfTensor(
                "linear_attn.in_proj_b.weight",
                ("linear_heads", "hidden"),
                engine_name="linear_attn.in_proj_ba.weight",
            ),
            HfTensor(
                "linear_attn.in_proj_a.weight",
                ("linear_heads", "hidden"),
                engine_name="linear_attn.in_proj_ba.weight",
            ),
        ),
    ),
    **_ALIKE,
}
# Rows of all of a head of keys one after the other.
FUSED_DELTA: Table = {
    "self_attention.in_proj.weight": Parameter(
        "delta",
        (
            HfTensor("linear_attn.in_proj_qkvz.weight", ("linear_projections", "hidden")),
            HfTensor("linear_attn.in_proj_ba.weight", ("linear_gates", "hidden")),
        ),
    ),
    **_ALIKE,
}


def hybrid(delta: Table) -> dict[str, LayerKind]:
    """Return the kinds of layers of a model with this form of gated delta networks."""
    return {
        LINEAR_ATTENTION: LayerKind(delta, is_linear=True),
        FULL_ATTENTION: LayerKind(GATED_ATTENTION),
    }


HYBRID_KEYS = frozenset(
    {
        "full_attention_interval",
        "linear_conv_kernel_dim",
        "linear_key_head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_value_head_dim",
        "partial_rotary_factor",
    }
)
HYBRID_DEFAULTS: Mapping[str, object] = {
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "partial_rotary_factor": 0.25,
}
