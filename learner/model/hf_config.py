"""The architecture of a model, read from the config.json of its Hugging Face folder."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from slipstream.wire.errors import ConfigError
from slipstream.wire.files.model_families import FAMILIES, Family, Parameter, Sizes
from slipstream.wire.files.tokenizer_hash import numbered_tokens, tokenizer_hash
from slipstream.wire.unreadable import UNREADABLE

DEFAULT_ROPE_THETA = 10_000.0
ROPE_RULES = ("default", "llama3", "yarn")


class RopeParameters(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding, as newer files nest it; older ones use ``rope_scaling`` for its type."""

    rope_theta: float | None = None
    rope_type: str | None = None
    type: str | None = None
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0  # of llama3
    high_freq_factor: float = 4.0
    beta_fast: float | None = None  # of yarn
    beta_slow: float | None = None
    truncate: bool = True
    attention_factor: float | None = None
    attn_factor: float = 1.0
    extrapolation_factor: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None

    @property
    def yarn_scale(self) -> float:
        """YaRN's factor on queries and keys: 0.1 ln(factor) + 1."""
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1.0 else 1.0

    @property
    def scaling(self) -> str:
        """The name of the scaling rule."""
        return self.rope_type or self.type or "default"


class HfConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of config.json that the learner needs; unknown keys are ignored."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    num_experts: int | None = None
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] = msgspec.field(default_factory=list)
    rope_theta: float | None = None
    rope_parameters: RopeParameters | None = None
    rope_scaling: RopeParameters | None = None

    @property
    def kv_channels(self) -> int:
        """The size of one attention head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def num_query_groups(self) -> int:
        """The number of key and value heads."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def num_routed_experts(self) -> int:
        """The number of experts that tokens are routed to, in each layer; 0 in a dense model."""
        return self.num_experts or 0

    @property
    def rotary_base(self) -> float:
        """The base of the rotary embedding's frequencies."""
        nested = self.rope_parameters.rope_theta if self.rope_parameters is not None else None
        return nested or self.rope_theta or DEFAULT_ROPE_THETA

    @property
    def rope(self) -> RopeParameters:
        """The rotary embedding's rule and its numbers."""
        found = [rope for rope in (self.rope_parameters, self.rope_scaling) if rope is not None]
        scaled = [rope for rope in found if rope.scaling != "default"]
        return (scaled or found or [RopeParameters()])[0]

    @property
    def trained_positions(self) -> int:
        """The context that a scaled rotary embedding was first trained on."""
        return self.rope.original_max_position_embeddings or self.max_position_embeddings

    @property
    def family(self) -> Family:
        """The family's table."""
        return FAMILIES[self.model_type]

    @property
    def sizes(self) -> Sizes:
        """The lengths that the shapes of its tensors are made of."""
        return {
            "queries": self.num_attention_heads * self.kv_channels,
            "keys": self.num_query_groups * self.kv_channels,
            "head": self.kv_channels,
            "inner": self.intermediate_size,
            "experts": self.num_routed_experts,
            "expert_inner": self.moe_intermediate_size,
            "hidden": self.hidden_size,
            "vocabulary": self.vocab_size,
        }

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield Megatron's name of each parameter and the tensors that it holds."""
        return self.family.parameters(
            num_layers=self.num_hidden_layers,
            num_experts=self.num_routed_experts,
            tied_embeddings=self.tie_word_embeddings,
        )

    @property
    def num_parameters(self) -> int:
        """The number of the model's parameters; tied embeddings count once."""
        return self.family.num_parameters(
            self.sizes, num_layers=self.num_hidden_layers, tied_embeddings=self.tie_word_embeddings
        )

    @property
    def num_attention_parameters(self) -> int:
        """Number of parameters of the attention's projections and the embedding."""
        projections = 2 * (self.sizes["queries"] + self.sizes["keys"]) * self.hidden_size
        return self.num_hidden_layers * projections + self.vocab_size * self.hidden_size


class _ModelType(msgspec.Struct, frozen=True):
    model_type: str


def load_hf_config(
    folder: Path, setting: str = "run.model", families: Mapping[str, Family] = FAMILIES
) -> HfConfig:
    """Return the architecture of the model in ``folder``, which a setting names.

    Raises:
        ConfigError: there is no readable config.json, or the learner cannot train such a model.
    """
    path = folder / "config.json"
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror} ({setting})") from error
    try:
        model_type = msgspec.json.decode(data, type=_ModelType).model_type
        if model_type not in families:
            raise ConfigError(
                f"{path} has model_type {model_type!r}; supported are {', '.join(families)} "
                f"({setting})"
            )
        config = msgspec.json.decode(data, type=HfConfig)
    except UNREADABLE as error:
        raise ConfigError(f"{path}: {error} ({setting})") from error
    # Settings that would otherwise load and silently compute something else.
    for key, expected in families[model_type].config.items():
        if (got := getattr(config, key)) != expected:
            raise ConfigError(f"{path}: {key} must be {expected!r}, got {got!r} ({setting})")
    if families[model_type].has_experts:
        for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"):
            if not getattr(config, key):
                raise ConfigError(f"{path}: {key} must be at least 1 ({setting})")
        if config.num_experts_per_tok > (config.num_experts or 0):
            raise ConfigError(
                f"{path}: num_experts_per_tok = {config.num_experts_per_tok} is above num_experts "
                f"= {config.num_experts} ({setting})"
            )
    if trouble := _rope_trouble(config):
        raise ConfigError(f"{path}: {trouble} ({setting})")
    if config.num_attention_heads % config.num_query_groups:
        raise ConfigError(
            f"{path}: num_attention_heads must be a multiple of num_key_value_heads, got "
            f"{config.num_attention_heads} and {config.num_query_groups} ({setting})"
        )
    return config


def _rope_trouble(config: HfConfig) -> str:
    """Return why a rotary embedding would be computed otherwise than by the engine."""
    rope = config.rope
    if rope.scaling not in ROPE_RULES:
        return f"rope_type must be one of {', '.join(ROPE_RULES)}, got {rope.scaling!r}"
    if rope.scaling == "default":
        return ""
    if rope.factor < 1.0:
        return f"factor of rope_type {rope.scaling!r} must be at least 1, got {rope.factor}"
    if rope.scaling == "llama3" and rope.low_freq_factor >= rope.high_freq_factor:
        return (
            f"low_freq_factor must be below high_freq_factor, got {rope.low_freq_factor} and "
            f"{rope.high_freq_factor}"
        )
    usual = rope.yarn_scale
    others = {
        "attention_factor": rope.attention_factor is None
        or math.isclose(rope.attention_factor, usual, rel_tol=1e-6),
        "attn_factor": rope.attn_factor == 1.0,
        "extrapolation_factor": rope.extrapolation_factor == 1.0,
        "mscale": rope.mscale is None,
        "mscale_all_dim": rope.mscale_all_dim is None,
    }
    if unlike := [name for name, is_usual in others.items() if not is_usual]:
        return (
            f"{unlike[0]} is read in one way by the engine and in another by the learner: only "
            f"the usual one is taken (attention_factor {usual:g}, no other scale)"
        )
    return ""


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
