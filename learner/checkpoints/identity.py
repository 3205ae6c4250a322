"""Identity of the model in a checkpoint."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.learner.parallel import ParallelSizes
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.checkpoints import CheckpointInfo
from slipstream.wire.models.adapters import AdapterFacts
from slipstream.wire.models.hf_config import HfConfig

if TYPE_CHECKING:
    from slipstream.learner.model.rank_model import RankModel


def architecture_of(hf: HfConfig) -> dict[str, int | float | bool | str]:
    """Return the facts that give parameters their meaning, in whatever form config.json has."""
    facts: dict[str, int | float | bool | str] = {
        "model_type": hf.model_type,
        "vocab_size": hf.vocab_size,
        "hidden_size": hf.hidden_size,
        "intermediate_size": hf.intermediate_size,
        "num_hidden_layers": hf.num_hidden_layers,
        "num_attention_heads": hf.num_attention_heads,
        "num_key_value_heads": hf.num_query_groups,
        "head_dim": hf.kv_channels,
        "rms_norm_eps": hf.rms_norm_eps,
        "rope_theta": hf.rotary_base,
        "tie_word_embeddings": hf.tie_word_embeddings,
    }
    if hf.vision is not None:
        facts["vision_hidden_size"] = hf.vision.hidden_size
        facts["vision_depth"] = hf.vision.depth
        facts["trains_vision"] = hf.trains_vision
    if hf.num_routed_experts:
        facts["num_experts"] = hf.num_routed_experts
        facts["num_experts_per_tok"] = hf.experts_per_token
        facts["moe_intermediate_size"] = hf.expert_inner
    if hf.family.is_latent or hf.num_router_groups > 1 or hf.first_k_dense_replace:
        facts |= {
            "kv_lora_rank": hf.kv_lora_rank,
            "qk_rope_head_dim": hf.qk_rope_head_dim,
            "first_k_dense_replace": hf.first_k_dense_replace,
            "n_group": hf.num_router_groups,
            "routed_scaling_factor": hf.routed_scaling_factor,
        }
    if len(hf.family.kinds) > 1:
        facts |= {
            "layer_types": ",".join(map(hf.kind_of, range(hf.num_hidden_layers))),
            "sliding_window": hf.sliding_window or 0,
            "rotary_channels": hf.rotary_channels,
            "linear_num_key_heads": hf.linear_num_key_heads,
            "linear_num_value_heads": hf.linear_num_value_heads,
        }
    if hf.swiglu_limit is not None:
        facts["swiglu_limit"] = hf.swiglu_limit
    return facts


def parameters_hash(model: "RankModel") -> str:
    """Return a hash of the names and whole shapes of all parameters, equal in any layout."""
    lines = [
        f"{name} {list(shape)}\n" for name, shape in sorted(model.hf_config.tensor_shapes.items())
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def is_of_layout(info: CheckpointInfo, ranks: int, sizes: ParallelSizes) -> bool:
    """Return True if a checkpoint was written by equally many ranks, divided alike."""
    ours = (ranks, sizes.tensor, sizes.others())
    return (info.ranks, info.tensor_parallel, info.parallel) == ours


def dtype_name(model: "RankModel") -> str:
    """Return the type of the parameters, e.g. ``bfloat16``."""
    return str(model.config.params_dtype).removeprefix("torch.")


def _other_adapters(model: "RankModel", there: AdapterFacts | None) -> str:
    """Return how the adapters of a checkpoint differ from a model's; empty if they are equal."""
    if model.adapters is None:
        if there is None:
            return ""
        return (
            f"it holds adapters of rank {there.rank} and no weights, and lora.rank is not set "
            f"here: set lora.rank = {there.rank}, or export it with --merged and start from that "
            "(run.model)"
        )
    here = model.adapters.facts
    if there is None:
        return (
            f"it holds weights and no adapters, and lora.rank is {here.rank} here: export it and "
            "start from that (run.model), or leave lora.rank out"
        )
    if difference := there.difference(here):
        return difference
    if there.base != here.base:
        return "its adapters belong to other weights than those in run.model now"
    return ""


def refuse_other_model(model: "RankModel", folder: Path, info: CheckpointInfo) -> None:
    """Refuse a checkpoint that does not fit the model to fill.

    Raises:
        ConfigError: they differ; the message names the differences.
    """
    ours = architecture_of(model.hf_config)
    differing = [
        f"{name} is {info.architecture.get(name)!r} there and {value!r} here"
        for name, value in ours.items()
        if info.architecture.get(name) != value
    ]
    if not differing and info.parameters != parameters_hash(model):
        differing = ["the names or shapes of its parameters differ"]
    dtype = dtype_name(model)
    if not differing and info.dtype != dtype:
        differing = [f"its parameters are {info.dtype} there and {dtype} here (learner.dtype)"]
    if not differing and (other := _other_adapters(model, info.adapters)):
        raise ConfigError(f"{folder} cannot be resumed from: {other} (run.resume_from)")
    if differing:
        raise ConfigError(
            f"{folder} is a checkpoint of another model than run.model: {'; '.join(differing)} "
            "(run.resume_from)"
        )
