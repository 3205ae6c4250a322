"""Qwen2.5-VL: Qwen2.5 with a vision tower (Bai et al. 2025, arXiv:2502.13923, section 2.1).

Most blocks of the tower attend within windows of an image, the others to all of it.
"""

from slipstream.wire.models.families.qwen2 import QWEN2, WINDOW_KEYS
from slipstream.wire.models.families.tables import Family, Size, Tower, tower_table

_BLOCK: dict[str, tuple[Size, ...]] = {
    "norm1.weight": ("vision_hidden",),
    "norm2.weight": ("vision_hidden",),
    "attn.qkv.weight": ("vision_qkv", "vision_hidden"),
    "attn.qkv.bias": ("vision_qkv",),
    "attn.proj.weight": ("vision_hidden", "vision_hidden"),
    "attn.proj.bias": ("vision_hidden",),
    "mlp.gate_proj.weight": ("vision_inner", "vision_hidden"),
    "mlp.gate_proj.bias": ("vision_inner",),
    "mlp.up_proj.weight": ("vision_inner", "vision_hidden"),
    "mlp.up_proj.bias": ("vision_inner",),
    "mlp.down_proj.weight": ("vision_hidden", "vision_inner"),
    "mlp.down_proj.bias": ("vision_hidden",),
}
_TOWER = Tower(
    ends=tower_table(
        {
            "patch_embed.proj.weight": ("vision_hidden", "colors", "frames", "patch", "patch"),
            "merger.ln_q.weight": ("vision_hidden",),
            "merger.mlp.0.weight": ("vision_square", "vision_square"),
            "merger.mlp.0.bias": ("vision_square",),
            "merger.mlp.2.weight": ("hidden", "vision_square"),
            "merger.mlp.2.bias": ("hidden",),
        }
    ),
    lists={"blocks": tower_table(_BLOCK)},
    config={
        "depth": 32,
        "hidden_size": 3584,
        "intermediate_size": 3420,
        "patch_size": 14,
        "out_hidden_size": 3584,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
    fixed={"hidden_act": "silu"},
    interleaves_axes=False,
    axes=(16, 24, 24),
)
QWEN2_5_VL = Family(
    model_type="qwen2_5_vl_text",
    models="Qwen2.5-VL-3B to 72B",
    wrapped_by="qwen2_5_vl",
    tower=_TOWER,
    config={},
    layer=QWEN2.layer,
    mlp=QWEN2.mlp,
    ends=QWEN2.ends,
    keys=frozenset({"mrope_section"}),
    ignored=WINDOW_KEYS | {"attention_bias"},
)
