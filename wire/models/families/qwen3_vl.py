"""Qwen3-VL: Qwen3 with a vision tower, whose blocks on the way are seen by the first layers, too.

Those features are DeepStack's (Meng et al. 2024, arXiv:2406.04334).
"""

from slipstream.wire.models.families.qwen3 import QWEN3
from slipstream.wire.models.families.tables import Family, Size, Tower, tower_table

_BLOCK: dict[str, tuple[Size, ...]] = {
    "norm1.weight": ("vision_hidden",),
    "norm1.bias": ("vision_hidden",),
    "norm2.weight": ("vision_hidden",),
    "norm2.bias": ("vision_hidden",),
    "attn.qkv.weight": ("vision_qkv", "vision_hidden"),
    "attn.qkv.bias": ("vision_qkv",),
    "attn.proj.weight": ("vision_hidden", "vision_hidden"),
    "attn.proj.bias": ("vision_hidden",),
    "mlp.linear_fc1.weight": ("vision_inner", "vision_hidden"),
    "mlp.linear_fc1.bias": ("vision_inner",),
    "mlp.linear_fc2.weight": ("vision_hidden", "vision_inner"),
    "mlp.linear_fc2.bias": ("vision_hidden",),
}


def _merger(normed: Size) -> dict[str, tuple[Size, ...]]:
    """Return the shapes of a merger whose norm has so many channels."""
    return {
        "norm.weight": (normed,),
        "norm.bias": (normed,),
        "linear_fc1.weight": ("vision_square", "vision_square"),
        "linear_fc1.bias": ("vision_square",),
        "linear_fc2.weight": ("hidden", "vision_square"),
        "linear_fc2.bias": ("hidden",),
    }


_TOWER = Tower(
    ends=tower_table(
        {
            "patch_embed.proj.weight": ("vision_hidden", "colors", "frames", "patch", "patch"),
            "patch_embed.proj.bias": ("vision_hidden",),
            "pos_embed.weight": ("vision_places", "vision_hidden"),
            **{f"merger.{name}": shape for name, shape in _merger("vision_hidden").items()},
        }
    ),
    lists={
        "blocks": tower_table(_BLOCK),
        "deepstack_merger_list": tower_table(_merger("vision_square")),
    },
    config={
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "patch_size": 16,
        "out_hidden_size": 3584,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24],
    },
    fixed={"hidden_act": "gelu_pytorch_tanh"},
    interleaves_axes=True,
    axes=(24, 20, 20),
)
QWEN3_VL = Family(
    model_type="qwen3_vl_text",
    models="Qwen3-VL-2B to 32B",
    wrapped_by="qwen3_vl",
    tower=_TOWER,
    config=QWEN3.config,
    layer=QWEN3.layer,
    mlp=QWEN3.mlp,
    ends=QWEN3.ends,
    keys=frozenset({"mrope_section"}),
)
