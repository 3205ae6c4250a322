"""The shape of a vision tower, read from the vision_config of a model's config.json."""

import math
from collections.abc import Mapping
from typing import Annotated

import msgspec

from slipstream.wire.models.families.tables import Size, Tower

_Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
_Blocks = tuple[Annotated[int, msgspec.Meta(ge=0, le=1023)], ...]
_COLORS = 3
_ROTARY = {"rope_type": "axial", "rope_theta": 10_000.0}
# Keys of training, of kernels and of videos.
_IGNORED = frozenset(
    {
        "_attn_implementation_autoset",
        "_name_or_path",
        "architectures",
        "chunk_size_feed_forward",
        "dtype",
        "id2label",
        "initializer_range",
        "is_encoder_decoder",
        "label2id",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "problem_type",
        "return_dict",
        "spatial_patch_size",
        "tokens_per_second",
        "torch_dtype",
        "transformers_version",
    }
)


class VisionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A vision tower: blocks over patches, and mergers of squares of patches into tokens."""

    depth: _Size
    hidden_size: _Size
    num_heads: _Size = 16
    intermediate_size: _Size
    patch_size: _Size  # pixels each way
    temporal_patch_size: _Size = 2  # frames
    spatial_merge_size: _Size = 2  # patches of a token each way
    out_hidden_size: _Size  # channels of a token
    window_size: _Size | None = None  # pixels each way of a window; None: there are none
    fullatt_block_indexes: _Blocks = ()  # blocks without windows, where there are any
    num_position_embeddings: int = 0  # places of a square; 0: patches only turn
    deepstack_visual_indexes: _Blocks = ()  # blocks whose features the first layers see

    @property
    def head(self) -> int:
        """Channels of a head."""
        return self.hidden_size // self.num_heads

    @property
    def places(self) -> int:
        """Places with an embedding each way."""
        return math.isqrt(self.num_position_embeddings)

    @property
    def window(self) -> int:
        """Tokens of a window each way; 0 without windows."""
        return (self.window_size or 0) // (self.patch_size * self.spatial_merge_size)

    @property
    def parts(self) -> Mapping[str, int]:
        """Numbers of blocks and further mergers, by the names of their lists."""
        mergers = len(self.deepstack_visual_indexes)
        return {"blocks": self.depth} | ({"deepstack_merger_list": mergers} if mergers else {})

    @property
    def channels(self) -> int:
        """Numbers of a patch."""
        return _COLORS * self.temporal_patch_size * self.patch_size**2

    @property
    def sizes(self) -> Mapping[Size, int]:
        """The lengths that the shapes of its tensors are made of."""
        return {
            "vision_hidden": self.hidden_size,
            "vision_qkv": 3 * self.hidden_size,
            "vision_inner": self.intermediate_size,
            "vision_square": self.hidden_size * self.spatial_merge_size**2,
            "vision_places": self.num_position_embeddings,
            "colors": _COLORS,
            "frames": self.temporal_patch_size,
            "patch": self.patch_size,
        }


def vision_config(found: object, tower: Tower, hidden_size: object) -> VisionConfig | str:
    """Return the shape of a tower, or what is wrong with a vision_config.

    Args:
        found: vision_config of config.json.
        tower: Tower of the family.
        hidden_size: Channels of the language model.
    """
    if not isinstance(found, dict):
        return f"vision_config must have the keys of a vision tower, got {found!r}"
    usual = {**tower.fixed, "rope_parameters": _ROTARY, "in_channels": _COLORS, "in_chans": _COLORS}
    for key, expected in usual.items():
        if (got := found.get(key)) is not None and got != expected:
            return f"{key} of vision_config must be {expected!r}, got {got!r}"
    known = VisionConfig.__struct_fields__
    kept = {key: value for key, value in found.items() if value is not None}
    unknown = kept.keys() - usual.keys() - _IGNORED - {*known}
    foreign = {"window_size", "fullatt_block_indexes", "num_position_embeddings"} - {*tower.config}
    foreign |= {"deepstack_visual_indexes"} - {*tower.config}
    if others := sorted(unknown | (kept.keys() & foreign)):
        return (
            f"{others[0]} = {found[others[0]]!r} is not a key that this vision_config is known by: "
            "delete it if it changes nothing that the tower computes"
        )
    given = {key: value for key, value in kept.items() if key in known}
    try:
        config = msgspec.convert({**tower.config, **given}, VisionConfig)
    except msgspec.ValidationError as error:
        return f"vision_config: {error}"
    return _trouble(config, hidden_size) or config


def _trouble(config: VisionConfig, hidden_size: object) -> str:
    """Return why a tower cannot have such a shape."""
    if config.out_hidden_size != hidden_size:
        return (
            f"out_hidden_size of vision_config must be hidden_size = {hidden_size}, got "
            f"{config.out_hidden_size}"
        )
    if config.hidden_size % config.num_heads or config.head % 4:
        return (
            "heads of vision_config must have a multiple of 4 channels, got hidden_size = "
            f"{config.hidden_size} and num_heads = {config.num_heads}"
        )
    if config.places**2 != config.num_position_embeddings:
        return (
            "num_position_embeddings of vision_config must be a square, got "
            f"{config.num_position_embeddings}"
        )
    if config.window_size is not None and not config.window:
        return f"window_size of vision_config has no whole token, got {config.window_size}"
    blocks = (*config.fullatt_block_indexes, *config.deepstack_visual_indexes)
    if any(block >= config.depth for block in blocks):
        return f"vision_config names block {max(blocks)} of {config.depth}"
    if list(config.deepstack_visual_indexes) != sorted(set(config.deepstack_visual_indexes)):
        return f"deepstack_visual_indexes must rise, got {list(config.deepstack_visual_indexes)}"
    return ""
