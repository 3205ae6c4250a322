"""The architecture of a model, read from the config.json of its Hugging Face folder."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from slipstream.wire.errors import ConfigError
from slipstream.wire.models.config_keys import FIXED_KEYS, IGNORED_KEYS, KEYS_OF_ALL
from slipstream.wire.models.families.registry import FAMILIES, SCALE_SUFFIX, layer_of
from slipstream.wire.models.families.tables import (
    FULL_ATTENTION,
    HF_TOWER,
    Family,
    LayerKind,
    Parameter,
    Sizes,
    Table,
)
from slipstream.wire.models.model_files import refuse_no_model
from slipstream.wire.models.tokenizer_hash import numbered_tokens, tokenizer_hash
from slipstream.wire.models.vision_config import VisionConfig, vision_config
from slipstream.wire.unreadable import UNREADABLE

_WITHIN = "model.language_model."  # beginning of names of a language model within another
_TOWER_WITHIN = "model.visual."  # the same of the tower's
DEFAULT_ROPE_THETA = 10_000.0
# Keys of a rotary embedding that its rule reads, besides those of all rules.
_SCALED = frozenset({"factor", "original_max_position_embeddings"})
ROPE_RULES: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "llama3": _SCALED | {"low_freq_factor", "high_freq_factor"},
    "yarn": _SCALED
    | {"beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim"}
    | {"attention_factor", "attn_factor", "extrapolation_factor"},
}
_OF_EVERY_RULE = frozenset(
    {
        "rope_theta",
        "rope_type",
        "type",
        "partial_rotary_factor",
        "mrope_section",
        "mrope_interleaved",
    }
)


class RopeParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rotary embedding, as newer files nest it; older ones use ``rope_scaling`` for its type."""

    rope_theta: float | None = None
    rope_type: str | None = None
    type: str | None = None
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0  # used by llama3
    high_freq_factor: float = 4.0
    beta_fast: float | None = None  # used by yarn
    beta_slow: float | None = None
    truncate: bool = True
    attention_factor: float | None = None
    attn_factor: float = 1.0
    extrapolation_factor: float = 1.0
    mscale: float | None = None  # used by latent attention
    mscale_all_dim: float | None = None
    partial_rotary_factor: float | None = None
    mrope_section: tuple[int, ...] | None = None  # channels by axis of a picture; a text has one
    mrope_interleaved: bool = False

    def yarn_scale(self, share: float = 1.0) -> float:
        """Return YaRN's factor on queries and keys: 0.1 share ln(factor) + 1."""
        return 0.1 * share * math.log(self.factor) + 1.0 if self.factor > 1.0 else 1.0

    @property
    def rotary_scale(self) -> float:
        """YaRN's factor of cosine and sine; of latent attention the rest is on the scores."""
        if self.mscale and self.mscale_all_dim:
            return self.yarn_scale(self.mscale) / self.yarn_scale(self.mscale_all_dim)
        return self.yarn_scale()

    @property
    def scaling(self) -> str:
        """The name of the scaling rule; the one of several axes scales nothing."""
        name = self.rope_type or self.type or "default"
        return "default" if name == "mrope" else name


class Quantization(msgspec.Struct, frozen=True, kw_only=True):
    """How the weights in a folder are quantized."""

    quant_method: str
    weight_block_size: tuple[int, int] | None = None
    fmt: str | None = None


class HfConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of config.json that the learner needs, under one name for all families."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int = 0  # inner size of the MLPs without experts
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    use_qk_norm: bool = False
    partial_rotary_factor: float | None = None
    rope_theta: float | None = None
    rope_parameters: RopeParameters | None = None
    rope_scaling: RopeParameters | None = None
    # Kinds of layers.
    layer_types: tuple[str, ...] | None = None
    full_attention_interval: int = 1  # every so many layers one has full attention
    sliding_window: int | None = None
    # Linear attention.
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_conv_kernel_dim: int = 0
    # Experts.
    num_experts: int | None = None
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: int = 0
    n_shared_experts: int | None = None
    shared_expert_intermediate_size: int | None = None
    n_group: int | None = None
    topk_group: int | None = None
    topk_method: str | None = None
    num_nextn_predict_layers: int = 0
    swiglu_limit: float | None = None
    # Latent attention.
    q_lora_rank: int | None = None
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    quantization_config: Quantization | None = None
    # True of a language model that is one part of a folder's model, next to an encoder of pictures.
    is_wrapped: bool = False
    vision: VisionConfig | None = None  # the tower by which it sees images
    image_token: int | None = None  # id of the tokens in the place of an image
    trains_vision: bool = False  # True if the tower is trained and published, too

    @property
    def kv_channels(self) -> int:
        """The size of one query's or key's head."""
        if self.family.is_latent:
            return self.qk_nope_head_dim + self.qk_rope_head_dim
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def value_channels(self) -> int:
        """The size of one value's head."""
        return self.v_head_dim if self.family.is_latent else self.kv_channels

    @property
    def rotary_channels(self) -> int:
        """The number of a head's channels that turn with the position."""
        if self.family.is_latent:
            return self.qk_rope_head_dim
        return int(self.kv_channels * self.rotary_share)

    @property
    def rotary_share(self) -> float:
        """The share of a head's channels that turn, of other than latent attention."""
        nested = self.rope.partial_rotary_factor
        share = nested if nested is not None else self.partial_rotary_factor
        return share if share is not None else 1.0

    @property
    def rotary_axes(self) -> tuple[int, ...]:
        """Axis by which each pair of channels turns: 0, 1 or 2; none where all have one position.

        A token of an image has three positions: of its frame, its row and its column (Wang et al.
        2024, arXiv:2409.12191, 2.1).
        """
        tower = self.family.tower
        if tower is None or self.vision is None:
            return ()
        sections = self.rope.mrope_section or tower.axes
        if not tower.interleaves_axes:
            return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
        axes = [0] * (self.rotary_channels // 2)
        for axis in (1, 2):
            places = range(axis, 3 * sections[axis], 3)
            axes[axis : 3 * sections[axis] : 3] = [axis] * len(places)
        return tuple(axes)

    @property
    def tower_parts(self) -> Mapping[str, int]:
        """Numbers of the parts of a tower that is trained; none of another's."""
        return self.vision.parts if self.vision is not None and self.trains_vision else {}

    @property
    def tower_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor of the vision tower, trained or not, by its name alone."""
        tower = self.family.tower
        if tower is None or self.vision is None:
            return {}
        return {
            tensor.name: tensor.whole_shape(self.sizes)
            for _, parameter in tower.parameters(self.vision.parts)
            for tensor in parameter.tensors
        }

    @property
    def num_query_groups(self) -> int:
        """The number of key and value heads."""
        if self.family.is_latent:  # every query head has its own, expanded
            return self.num_attention_heads
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def num_routed_experts(self) -> int:
        """The number of experts that tokens are routed to; 0 in a dense model."""
        return (self.num_experts or 0) if self.family.has_experts else 0

    @property
    def experts_per_token(self) -> int:
        """The number of them that each token is routed to."""
        return self.num_experts_per_tok or 0

    @property
    def expert_inner(self) -> int:
        """The inner size of a routed expert."""
        return (self.moe_intermediate_size or self.intermediate_size) if self.num_experts else 0

    @property
    def shared_inner(self) -> int:
        """The inner size of the experts that every token passes, together; 0 without any."""
        if not self.num_routed_experts:
            return 0
        return self.shared_expert_intermediate_size or self.expert_inner * (
            self.n_shared_experts or 0
        )

    def is_sparse(self, layer: int) -> bool:
        """True if a layer's MLP are experts."""
        return self.num_routed_experts > 0 and layer >= self.first_k_dense_replace

    def kind_of(self, layer: int) -> str:
        """Return the kind of a layer's attention, by its name in ``layer_types``."""
        return _kind_of(self, self.family, layer)

    def layer_kind(self, layer: int) -> LayerKind:
        """Return what layers of a layer's kind have."""
        return self.family.kinds[self.kind_of(layer)]

    def window_of(self, layer: int) -> int | None:
        """Return how many tokens a token of a layer attends to at most; None without a bound."""
        return self.sliding_window if self.layer_kind(layer).has_window else None

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The numbers of the layers whose attention has keys and values."""
        layers = range(self.num_hidden_layers)
        return tuple(number for number in layers if not self.layer_kind(number).is_linear)

    def keeps(self, name: str) -> bool:
        """True of a tensor that a policy does not have, but leaves as it is.

        Those are of an encoder of pictures, and of layers that predict further tokens; scales of
        their blocks are no tensors of their own.
        """
        further, first = self.family.further, self.num_hidden_layers
        if name.endswith(SCALE_SUFFIX):
            return False
        if self.is_wrapped and name.startswith((HF_TOWER, _TOWER_WITHIN)):
            return True
        if further:  # a layer after the last one is another model's, not one of these
            return name.startswith(further)
        return first <= layer_of(name) < first + self.num_nextn_predict_layers

    @property
    def may_keep(self) -> bool:
        """True if a folder of it may have tensors that it ``keeps``."""
        is_wrapped = self.is_wrapped and not self.trains_vision
        return is_wrapped or bool(self.family.further or self.num_nextn_predict_layers)

    @property
    def state_size(self) -> int:
        """The numbers in a sequence's state in one layer of linear attention."""
        return self.linear_num_value_heads * self.linear_key_head_dim * self.linear_value_head_dim

    @property
    def _attention(self) -> Table:
        """Parameters of a layer whose attention has keys and values."""
        return self.family.layer_of(self, (*self.attention_layers, 0)[0])

    @property
    def num_sparse_layers(self) -> int:
        """The number of layers with experts."""
        return sum(map(self.is_sparse, range(self.num_hidden_layers)))

    @property
    def num_router_groups(self) -> int:
        """The number of groups that experts are chosen by; 1 where any may be chosen."""
        return 1 if self.topk_method == "greedy" else self.n_group or 1

    @property
    def rope(self) -> RopeParameters:
        """The rotary embedding's rule and its numbers: where both are there, ``rope_scaling``."""
        usual = RopeParameters()
        has_scaling = self.rope_scaling not in (None, usual)
        return (self.rope_scaling if has_scaling else self.rope_parameters) or usual

    @property
    def rotary_base(self) -> float:
        """The base of the rotary embedding's frequencies."""
        return self.rope.rope_theta or self.rope_theta or DEFAULT_ROPE_THETA

    @property
    def trained_positions(self) -> int:
        """The context that a scaled rotary embedding was first trained on."""
        return self.rope.original_max_position_embeddings or self.max_position_embeddings

    @property
    def attention_scale(self) -> float:
        """The factor of attention's scores."""
        share = self.rope.mscale_all_dim if self.rope.scaling == "yarn" else None
        more = self.rope.yarn_scale(share) ** 2 if share and self.family.is_latent else 1.0
        return more / math.sqrt(self.kv_channels)

    @property
    def family(self) -> Family:
        """The family's table."""
        return FAMILIES[self.model_type]

    @property
    def has_qkv_bias(self) -> bool:
        """True if the query, key and value projections have a bias."""
        return "self_attention.linear_qkv.bias" in self._attention

    @property
    def has_biases(self) -> bool:
        """True if attention's output projection, routers and experts have biases, too."""
        return "self_attention.linear_proj.bias" in self._attention

    @property
    def has_sinks(self) -> bool:
        """True if each query head has a sink, a score that takes a share of its softmax."""
        return "self_attention.core_attention.softmax_offset" in self._attention

    @property
    def has_qk_norm(self) -> bool:
        """True if queries and keys are normalized per head."""
        return "self_attention.k_layernorm.weight" in self._attention

    @property
    def sizes(self) -> Sizes:
        """The lengths that the shapes of its tensors are made of."""
        heads = self.num_attention_heads
        return {
            "queries": heads * self.kv_channels,
            "queries_and_gates": 2 * heads * self.kv_channels,
            "keys": self.num_query_groups * self.kv_channels,
            "head": self.kv_channels,
            "heads": heads,
            "outputs": heads * self.value_channels,
            "inner": self.intermediate_size,
            "experts": self.num_routed_experts,
            "expert_inner": self.expert_inner,
            "shared_inner": self.shared_inner,
            "hidden": self.hidden_size,
            "vocabulary": self.vocab_size,
            "one": 1,
            "query_rank": self.q_lora_rank or 0,
            "key_rank": self.kv_lora_rank,
            "key_rank_and_rotary": self.kv_lora_rank + self.qk_rope_head_dim,
            "keys_and_values": heads * (self.qk_nope_head_dim + self.v_head_dim),
            "linear_keys": self.linear_num_key_heads * self.linear_key_head_dim,
            "linear_values": self.linear_num_value_heads * self.linear_value_head_dim,
            "linear_projections": 2
            * (
                self.linear_num_key_heads * self.linear_key_head_dim
                + self.linear_num_value_heads * self.linear_value_head_dim
            ),
            "linear_heads": self.linear_num_value_heads,
            "linear_gates": 2 * self.linear_num_value_heads,
            "linear_head": self.linear_value_head_dim,
            "taps": self.linear_conv_kernel_dim,
            **(self.vision.sizes if self.vision is not None else {}),
        }

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield Megatron's name of each parameter and the tensors that it holds."""
        return self.family.parameters(self)

    @property
    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """The whole shape of every tensor of the model, by its Hugging Face name."""
        sizes = self.sizes
        return {
            tensor.name: tensor.whole_shape(sizes)
            for _, mapping in self.parameters()
            for tensor in mapping.tensors
        }

    @property
    def num_parameters(self) -> int:
        """The number of the model's parameters; tied embeddings count once."""
        return self.family.num_parameters(self, self.sizes)

    @property
    def num_tower_parameters(self) -> int:
        """The number of the vision tower's parameters that are not trained, and not among those."""
        return 0 if self.tower_parts else sum(map(math.prod, self.tower_shapes.values()))

    @property
    def num_attention_parameters(self) -> int:
        """Number of parameters of the attention's projections and the embedding."""
        projections = sum(
            count * math.prod(tensor.whole_shape(self.sizes))
            for layer, count in self.family.layers_of(self, range(self.num_hidden_layers))
            for name, parameter in layer.items()
            if name.startswith("self_attention.linear_") and name.endswith(".weight")
            for tensor in parameter.tensors
        )
        return projections + self.vocab_size * self.hidden_size


def name_alone(name: str) -> str:
    """Return the name that a tensor of a language model within another would have alone.

    Those of a vision tower have the one that they were first published under.
    """
    if name.startswith(_TOWER_WITHIN):
        return name.removeprefix("model.")
    within = _WITHIN if name.startswith(_WITHIN) else ""
    return ("model." if within else "") + name.removeprefix(within)


def _kind_of(config: HfConfig, family: Family, layer: int) -> str:
    if config.layer_types is not None:
        return config.layer_types[layer]
    others = (kind for kind in family.kinds if kind != FULL_ATTENTION)
    is_full = (layer + 1) % config.full_attention_interval == 0
    return FULL_ATTENTION if is_full else next(others)


MXFP4_BLOCK = 32  # numbers with a scale
_MOST = 2**31 - 1
_MOST_LAYERS, _MOST_EXPERTS = 1024, 4096
# Least and most of a number of config.json, where it is given.
_BOUNDS: Mapping[str, tuple[float, float]] = {
    "vocab_size": (1, _MOST),
    "hidden_size": (1, _MOST),
    "intermediate_size": (0, _MOST),
    "num_hidden_layers": (1, _MOST_LAYERS),
    "num_attention_heads": (1, _MOST),
    "num_key_value_heads": (1, _MOST),
    "head_dim": (1, _MOST),
    "max_position_embeddings": (1, _MOST),
    "rms_norm_eps": (0.0, 1.0),
    "num_experts": (1, _MOST_EXPERTS),
    "num_experts_per_tok": (1, _MOST_EXPERTS),
    "moe_intermediate_size": (1, _MOST),
    "n_shared_experts": (1, _MOST_EXPERTS),
    "shared_expert_intermediate_size": (1, _MOST),
    "n_group": (1, _MOST_EXPERTS),
    "topk_group": (1, _MOST_EXPERTS),
    "num_nextn_predict_layers": (0, _MOST_LAYERS),
    "q_lora_rank": (1, _MOST),
    "kv_lora_rank": (1, _MOST),
    "qk_nope_head_dim": (1, _MOST),
    "qk_rope_head_dim": (2, _MOST),
    "v_head_dim": (1, _MOST),
    "full_attention_interval": (1, _MOST_LAYERS),
    "sliding_window": (1, _MOST),
    "linear_num_key_heads": (1, _MOST),
    "linear_num_value_heads": (1, _MOST),
    "linear_key_head_dim": (1, _MOST),
    "linear_value_head_dim": (1, _MOST),
    "linear_conv_kernel_dim": (2, 64),
}


def load_hf_config(
    folder: Path, setting: str = "run.model", families: Mapping[str, Family] = FAMILIES
) -> HfConfig:
    """Return the architecture of the model in ``folder``, which a setting names.

    Raises:
        ConfigError: there is no readable config.json, it has a key that is not read here, or the
            learner cannot train such a model.
    """
    refuse_no_model(folder, setting)
    path = folder / "config.json"
    try:
        found = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        family = family_of(found, families)
        if isinstance(family, str):
            raise ConfigError(f"{path} {family} ({setting})")
        is_wrapped, whole = found.get("model_type") != family.model_type, found
        if is_wrapped:
            of_text = text_keys(found, family)
            if isinstance(of_text, str):
                raise ConfigError(f"{path}: {of_text} ({setting})")
            found = of_text
        if trouble := _key_trouble(found, family):
            raise ConfigError(f"{path}: {trouble} ({setting})")
        named = {family.renamed.get(key, key): value for key, value in found.items()}
        given = {key: value for key, value in named.items() if value is not None}
        given |= {"model_type": family.model_type, "is_wrapped": is_wrapped}
        if family.tower is not None:
            vision = vision_config(
                whole.get("vision_config"), family.tower, given.get("hidden_size")
            )
            if isinstance(vision, str):
                raise ConfigError(f"{path}: {vision} ({setting})")
            given |= {"vision": vision, "image_token": whole.get("image_token_id")}
        config = msgspec.convert({**family.defaults, **given}, HfConfig, str_keys=True, strict=True)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror} ({setting})") from error
    except UNREADABLE as error:
        raise ConfigError(f"{path}: {error} ({setting})") from error
    trouble = _size_trouble(config, family) or _kind_trouble(config, family)
    trouble = trouble or _head_trouble(config, family)
    trouble = trouble or _expert_trouble(config, family) or _rope_trouble(config, family)
    if trouble or (trouble := _quantization_trouble(config, family)):
        raise ConfigError(f"{path}: {trouble} ({setting})")
    return config


def family_of(found: Mapping[str, Any], families: Mapping[str, Family]) -> Family | str:
    """Return the family of a config.json, or which model_type it has that none is of."""
    model_type = found.get("model_type")
    for family in families.values():
        if model_type in {family.model_type, family.wrapped_by} and isinstance(model_type, str):
            return family
    known = (
        name for family in families.values() for name in (family.model_type, family.wrapped_by)
    )
    return f"has model_type {model_type!r}; supported are {', '.join(filter(None, known))}"


# Keys around text_config that concern the language model; the others are of pictures.
_AROUND_TEXT = ("tie_word_embeddings", "quantization_config")
# Keys of pictures among those of the language model, as Qwen2.5-VL was published.
_AMONG_TEXT = frozenset(
    {
        "image_token_id",
        "video_token_id",
        "vision_config",
        "vision_end_token_id",
        "vision_start_token_id",
        "vision_token_id",
    }
)


def text_keys(found: Mapping[str, Any], family: Family) -> dict[str, Any] | str:
    """Return the keys of a language model in text_config, or what is wrong with them."""
    text = found.get("text_config")
    if text is None and family.tower is not None:
        return {key: value for key, value in found.items() if key not in _AMONG_TEXT}
    if not isinstance(text, dict) or text.get("model_type") not in {None, family.model_type}:
        got = text.get("model_type") if isinstance(text, dict) else text
        return f"text_config must have model_type {family.model_type!r}, got {got!r}"
    around = {key: found[key] for key in _AROUND_TEXT if found.get(key) is not None}
    for key, value in around.items():
        if text.get(key) not in (None, value):
            return f"{key} = {value!r} must be as in text_config, which has {text[key]!r}"
    return {**text, **around}


def _key_trouble(found: Mapping[str, Any], family: Family) -> str:
    """Return which key of config.json asks for what is not computed here, or is unknown."""
    for key, expected in {**FIXED_KEYS, **family.config}.items():
        if (got := found.get(key)) is not None and got != expected:
            return f"{key} must be {expected!r}, got {got!r}"
    kinds = found.get("layer_types") or []
    if not isinstance(kinds, list):
        return f"layer_types must be a list, got {kinds!r}"
    if others := [kind for kind in kinds if kind not in list(family.kinds)]:
        allowed = " or ".join(map(repr, family.kinds))
        return (
            f"layer_types of a {family.model_type} model must all be {allowed}, got {others[0]!r}"
        )
    known = IGNORED_KEYS | KEYS_OF_ALL | FIXED_KEYS.keys() | family.config.keys()
    known |= family.keys | family.renamed.keys() | family.ignored
    for key, value in found.items():
        if key not in known and value is not None:
            return (
                f"{key} = {value!r} is not a key that a {family.model_type} model is known by: "
                "delete it if it changes nothing that the model computes"
            )
    return ""


def _size_trouble(config: HfConfig, family: Family) -> str:
    """Return which number is outside of its bounds."""
    keys = {new: old for old, new in family.renamed.items()}
    read = (KEYS_OF_ALL | family.keys | keys.keys()) & _BOUNDS.keys()
    for name, (least, highest) in _BOUNDS.items():
        value = getattr(config, name)
        if name in read and value is not None and not least <= value <= highest:
            return f"{keys.get(name, name)} must be from {least:g} to {highest:.10g}, got {value}"
    return ""


def _kind_trouble(config: HfConfig, family: Family) -> str:
    """Return why layers cannot be of the kinds that are named."""
    layers = range(config.num_hidden_layers)
    if config.layer_types is not None and len(config.layer_types) != len(layers):
        return (
            f"layer_types must name num_hidden_layers = {len(layers)} layers, got "
            f"{len(config.layer_types)}"
        )
    kinds = [family.kinds[_kind_of(config, family, layer)] for layer in layers]
    if all(kind.is_linear for kind in kinds):
        return f"layer_types must have a layer of {FULL_ATTENTION!r}, and has none"
    if any(kind.has_window for kind in kinds) and config.sliding_window is None:
        return "sliding_window must be set where layer_types has layers with a window"
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    if any(kind.is_linear for kind in kinds) and (not keys or values % keys):
        return (
            f"linear_num_value_heads must be a multiple of linear_num_key_heads, got {values} and "
            f"{keys}"
        )
    return ""


def _head_trouble(config: HfConfig, family: Family) -> str:
    """Return why attention cannot be divided into heads, or their channels cannot turn."""
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    if not family.is_latent and heads % (groups or heads):
        return (
            f"num_attention_heads must be a multiple of num_key_value_heads, got {heads} and "
            f"{groups}"
        )
    if not family.is_latent and config.head_dim is None and config.hidden_size % heads:
        return (
            "hidden_size must be a multiple of num_attention_heads where head_dim is not set, got "
            f"{config.hidden_size} and {heads}"
        )
    if family.is_latent:
        turning = config.qk_rope_head_dim
        channels = config.qk_nope_head_dim + turning
    else:
        channels = config.head_dim or config.hidden_size // heads
        turning = int(channels * config.rotary_share)
    if not 2 <= turning <= channels or turning % 2:
        return (
            f"an even number of a head's {channels} channels must turn with the position, 2 or "
            f"more, got {turning} (partial_rotary_factor, head_dim or qk_rope_head_dim)"
        )
    return ""


def _expert_trouble(config: HfConfig, family: Family) -> str:
    """Return what is wrong with the numbers of experts, or with the MLPs of layers without."""
    if not config.intermediate_size and not (family.has_experts and config.moe_intermediate_size):
        return "intermediate_size must be at least 1, and is not set"
    if not family.has_experts:
        return ""
    count, chosen = config.num_experts or 0, config.experts_per_token
    key = "num_experts"
    if key not in family.keys:
        key = next(old for old, new in family.renamed.items() if new == key)
    numbers = {key: count, "num_experts_per_tok": chosen}
    if "moe_intermediate_size" in family.keys:
        numbers["moe_intermediate_size"] = config.moe_intermediate_size or 0
    if "shared_expert_intermediate_size" in family.keys:
        numbers["shared_expert_intermediate_size"] = config.shared_expert_intermediate_size or 0
    if missing := [name for name, number in numbers.items() if number < 1]:
        return f"{missing[0]} must be at least 1, and is not set"
    if chosen > count:
        return f"num_experts_per_tok = {chosen} is above {key} = {count}"
    if not 0 <= config.first_k_dense_replace < config.num_hidden_layers:
        return (
            f"first_k_dense_replace must be from 0 to below num_hidden_layers = "
            f"{config.num_hidden_layers}, got {config.first_k_dense_replace}: no layer would have "
            "experts"
        )
    if family.activation.is_limited and not 0 < (config.swiglu_limit or 0) < math.inf:
        return f"swiglu_limit must be above 0, got {config.swiglu_limit}"
    if config.routed_scaling_factor <= 0:
        return f"routed_scaling_factor must be above 0, got {config.routed_scaling_factor:g}"
    method = config.topk_method
    if "topk_method" in family.keys and method not in {"greedy", "group_limited_greedy"}:
        return f"topk_method must be greedy or group_limited_greedy, got {method!r}"
    groups, taken = config.n_group or 1, config.topk_group or 1
    if count % groups or taken > groups or chosen > taken * (count // groups):
        return (
            f"n_group = {groups} must divide {key} = {count}, and topk_group = {taken} of them "
            f"must hold num_experts_per_tok = {chosen} experts"
        )
    return ""


def _quantization_trouble(config: HfConfig, family: Family) -> str:
    """Return why quantized weights cannot be read."""
    found = config.quantization_config
    if found is None or (
        found.quant_method == "fp8"
        and found.weight_block_size
        and min(found.weight_block_size) >= 1
        and found.fmt in {None, "e4m3"}
    ):
        return ""
    if found.quant_method == "mxfp4" and family.stacks_experts:
        inner = {"hidden_size": config.hidden_size, "intermediate_size": config.expert_inner}
        odd = [f"{name} = {size}" for name, size in inner.items() if size % MXFP4_BLOCK]
        return f"mxfp4 has blocks of {MXFP4_BLOCK} numbers, got {odd[0]}" if odd else ""
    return (
        f"quantization_config has quant_method {found.quant_method!r}, weight_block_size "
        f"{found.weight_block_size}, fmt {found.fmt!r}; only fp8 (e4m3) in blocks can be read, and "
        "mxfp4 where the experts of a layer are one tensor"
    )


def _rope_trouble(config: HfConfig, family: Family) -> str:
    """Return why a rotary embedding would be computed otherwise than by the engine."""
    rope = config.rope
    if trouble := _rule_trouble(config, family):
        return trouble
    if rope.scaling == "default":
        return ""
    if rope.factor < 1.0:
        return f"factor of rope_type {rope.scaling!r} must be at least 1, got {rope.factor}"
    if rope.scaling == "llama3" and rope.low_freq_factor >= rope.high_freq_factor:
        return (
            f"low_freq_factor must be below high_freq_factor, got {rope.low_freq_factor} and "
            f"{rope.high_freq_factor}"
        )
    positive = {
        "original_max_position_embeddings": rope.original_max_position_embeddings,
        "low_freq_factor": rope.low_freq_factor,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "mscale": rope.mscale,
        "mscale_all_dim": rope.mscale_all_dim,
    }
    for name, value in positive.items():
        if value is not None and value <= 0:
            return f"{name} of rope_type {rope.scaling!r} must be above 0, got {value:g}"
    usual = rope.yarn_scale()
    if family.is_latent:
        if bool(rope.mscale) is not bool(rope.mscale_all_dim):
            return (
                f"mscale and mscale_all_dim must both be set or neither, got {rope.mscale} and "
                f"{rope.mscale_all_dim}"
            )
        if rope.scaling != "yarn":
            return f"rope_type {rope.scaling!r} is not known of latent attention, only 'yarn'"
    others = {
        "attention_factor": rope.attention_factor is None
        or (not family.is_latent and math.isclose(rope.attention_factor, usual, rel_tol=1e-6)),
        "attn_factor": rope.attn_factor == 1.0,
        "extrapolation_factor": rope.extrapolation_factor == 1.0,
        "mscale": rope.mscale is None or family.is_latent,
        "mscale_all_dim": rope.mscale_all_dim is None or family.is_latent,
    }
    if unlike := [name for name, is_usual in others.items() if not is_usual]:
        return (
            f"{unlike[0]} is read in one way by the engine and in another by the learner: only "
            f"the usual one is taken (attention_factor {usual:g}, no other scale)"
        )
    return ""


def _rule_trouble(config: HfConfig, family: Family) -> str:
    """Return why the rule of a rotary embedding, scaled or not, cannot be followed."""
    rope = config.rope
    bases = (config.rope_theta, rope.rope_theta)
    if small := [base for base in bases if base is not None and base <= 1.0]:
        return f"rope_theta must be above 1, got {small[0]:g}"
    if rope.scaling not in ROPE_RULES:
        return f"rope_type must be one of {', '.join(ROPE_RULES)}, got {rope.scaling!r}"
    if foreign := _foreign_keys(rope):
        return (
            f"{foreign[0]} = {getattr(rope, foreign[0])!r} is not read by rope_type "
            f"{rope.scaling!r}: delete it if it changes nothing that the model computes"
        )
    if "partial_rotary_factor" not in family.keys and rope.partial_rotary_factor not in {None, 1.0}:
        return (
            f"partial_rotary_factor = {rope.partial_rotary_factor} of rope_parameters is not known "
            f"of a {family.model_type} model, whose heads turn as a whole"
        )
    if "mrope_section" not in family.keys and (rope.mrope_section or rope.mrope_interleaved):
        return f"mrope_section is not known of a {family.model_type} model, which reads texts alone"
    return _axes_trouble(config, family)


def _axes_trouble(config: HfConfig, family: Family) -> str:
    """Return why channels cannot turn by three axes."""
    tower, rope = family.tower, config.rope
    if tower is None:
        return ""
    sections, pairs = rope.mrope_section or tower.axes, config.rotary_channels // 2
    if len(sections) != len(tower.axes) or sum(sections) != pairs or min(sections) < 0:
        return f"mrope_section must have three numbers with the sum {pairs}, got {list(sections)}"
    if tower.interleaves_axes and max(3 * sections[axis] + axis - 3 for axis in (1, 2)) >= pairs:
        return f"mrope_section has more channels in turn than there are, got {list(sections)}"
    if rope.mrope_interleaved and not tower.interleaves_axes:
        return "mrope_interleaved must be false"
    if not rope.mrope_interleaved and tower.interleaves_axes:
        return "mrope_interleaved must be true: engines read it, and transformers turns so always"
    return ""


def _foreign_keys(rope: RopeParameters) -> list[str]:
    """Return the keys of a rotary embedding that are set, and that its rule does not read."""
    usual = RopeParameters()
    known = ROPE_RULES[rope.scaling] | _OF_EVERY_RULE
    names = (name for name in rope.__struct_fields__ if name not in known)
    return [name for name in names if getattr(rope, name) != getattr(usual, name)]


def refuse_other_tokens(frozen: Path, model: Path, setting: str, *, whole: bool) -> None:
    """Refuse a frozen policy whose tokens are not those of the policy; both are folders.

    Models of one family may pad the same vocabulary to different sizes: that does not matter where
    only chosen tokens are compared, and equal tokenizers show it. With ``whole``, distributions are
    compared row by row. Models of two families may have as many tokens as each other.

    Raises:
        ConfigError: the same number is not, or may not be, the same token.
    """
    theirs, ours = load_hf_config(frozen, setting).vocab_size, load_hf_config(model).vocab_size
    tokens, own_tokens = numbered_tokens(frozen), numbered_tokens(model)
    if tokens and own_tokens and tokens != own_tokens:
        raise ConfigError(
            f"{frozen} ({setting}) numbers other tokens than run.model (tokenizer.json): the same "
            "number must be the same token"
        )
    if theirs == ours or (not whole and _tokenizer(frozen) == _tokenizer(model) != ""):
        return
    raise ConfigError(
        f"{frozen} ({setting}) has {theirs} tokens and run.model {ours}: the same number must be "
        "the same token"
    )


def _tokenizer(folder: Path) -> str:
    try:
        return tokenizer_hash(folder)
    except ConfigError:
        return ""
