"""The architecture of a model, read from the config.json of its Hugging Face folder."""

from pathlib import Path
from typing import Literal, get_args

import msgspec

from slipstream.wire.errors import ConfigError
from slipstream.wire.files.tokenizer_hash import numbered_tokens, tokenizer_hash

ModelType = Literal["llama", "qwen2", "qwen3"]
SUPPORTED: tuple[str, ...] = get_args(ModelType)
DEFAULT_ROPE_THETA = 10_000.0


class RopeParameters(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding, as newer files nest it; older ones use ``rope_scaling`` for its type."""

    rope_theta: float | None = None
    rope_type: str | None = None
    type: str | None = None

    @property
    def scaling(self) -> str:
        """Return the name of the scaling rule."""
        return self.rope_type or self.type or "default"


class HfConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the learner needs of config.json; keys it does not know are ignored."""

    model_type: ModelType
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
    rope_theta: float | None = None
    rope_parameters: RopeParameters | None = None
    rope_scaling: RopeParameters | None = None

    @property
    def kv_channels(self) -> int:
        """Return the size of one attention head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def num_query_groups(self) -> int:
        """Return the number of key and value heads."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def rotary_base(self) -> float:
        """Return the base of the rotary embedding's frequencies."""
        nested = self.rope_parameters.rope_theta if self.rope_parameters is not None else None
        return nested or self.rope_theta or DEFAULT_ROPE_THETA

    @property
    def has_qkv_bias(self) -> bool:
        """Return whether the query, key and value projections have a bias."""
        return self.model_type == "qwen2"

    @property
    def has_qk_norm(self) -> bool:
        """Return whether queries and keys are normalized per head."""
        return self.model_type == "qwen3"


class _Family(msgspec.Struct, frozen=True):
    model_type: str


def load_hf_config(folder: Path, setting: str = "run.model") -> HfConfig:
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
        family = msgspec.json.decode(data, type=_Family).model_type
        if family not in SUPPORTED:
            raise ConfigError(
                f"{path} has model_type {family!r}; supported are {', '.join(SUPPORTED)} "
                f"({setting})"
            )
        config = msgspec.json.decode(data, type=HfConfig)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {error} ({setting})") from error
    _refuse_unsupported(config, path, setting)
    return config


def refuse_other_tokens(frozen: Path, model: Path, setting: str, *, whole: bool) -> None:
    """Refuse a frozen policy whose tokens are not those of the policy.

    Models of one family may pad the same vocabulary to different sizes: that does not matter where
    only tokens that were chosen are looked at, and their tokenizers say so. Models of two families
    may have as many tokens as each other.

    Args:
        frozen: Hugging Face folder.
        model: that of the policy.
        setting: that names the frozen one.
        whole: whether whole distributions are compared, row by row.

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


def _refuse_unsupported(config: HfConfig, path: Path, setting: str) -> None:
    """Refuse what would otherwise load and silently compute something else."""
    ropes = [rope for rope in (config.rope_parameters, config.rope_scaling) if rope is not None]
    expectations: list[tuple[str, object, object]] = [
        ("hidden_act", config.hidden_act, "silu"),
        ("mlp_bias", config.mlp_bias, False),
        ("use_sliding_window", config.use_sliding_window, False),
        *(("rope_type", rope.scaling, "default") for rope in ropes),
    ]
    if config.model_type != "qwen2":  # qwen2 always has its bias and does not read this key
        expectations.append(("attention_bias", config.attention_bias, False))
    for key, got, expected in expectations:
        if got != expected:
            raise ConfigError(f"{path}: {key} must be {expected!r}, got {got!r} ({setting})")
    if config.num_attention_heads % config.num_query_groups:
        raise ConfigError(
            f"{path}: num_attention_heads must be a multiple of num_key_value_heads, got "
            f"{config.num_attention_heads} and {config.num_query_groups} ({setting})"
        )
