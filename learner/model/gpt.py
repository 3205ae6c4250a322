"""A policy as a Megatron-Core model, and its forward pass over packed sequences.

The output layer keeps its weights, its place in checkpoints and its gradients, but passes its input
on: log-probabilities are computed for a part of the vocabulary at a time
(algos/logprobs/linear_logprobs.py).

Shapes: T tokens of B sequences laid end to end, T' with padding, divided over c ranks of context
parallelism; H hidden size, V the vocabulary padded to a multiple of tp.
"""

import dataclasses
import difflib
import types
from collections.abc import Iterable, Mapping, MutableMapping, Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor

from slipstream.learner.config import LearnerSection
from slipstream.learner.model import device, fused_gradients, megatron_repairs
from slipstream.learner.model.attention import PackedLayout
from slipstream.learner.model.context import TokenSplit
from slipstream.learner.model.division import (
    MEGATRON_STAGES,
    POLICY,
    refuse_few_layers,
    refuse_undivided,
)
from slipstream.learner.model.experts.expert_choices import ExpertChoices, choices_of_rank
from slipstream.learner.model.experts.grouped_experts import activation_of, compute_in_groups
from slipstream.learner.model.experts.routing import hand_on_choices
from slipstream.learner.model.latent_attention import latent_config
from slipstream.learner.model.layers import install_swiglu, layer_specs
from slipstream.learner.model.rank_model import RankModel, is_expert
from slipstream.learner.model.rotary import Rotary
from slipstream.learner.model.shared_prompts import SharedPrompts
from slipstream.learner.model.vision.images import PackedImages
from slipstream.learner.model.vision.seeing_model import SeeingModel
from slipstream.learner.model.vision.tower import VisionTower
from slipstream.learner.parallel import HeadShares, ParallelSizes
from slipstream.wire.errors import ConfigError
from slipstream.wire.models.hf_config import HfConfig

megatron_repairs.install()
install_swiglu()
fused_gradients.install()
# Settings of [learner] in place of Megatron's names.
_OWN_SETTINGS = {
    "sequence_parallel": "sequence_parallel",
    "pipeline_model_parallel_layout": "layers_per_stage",
    "recompute_granularity": "recompute",
    "recompute_num_layers": "recompute_layers",
    "recompute_modules": "recompute_modules",
}
# Fusions, which [learner.megatron] can switch: an operator of this project computes SwiGLU, and the
# others need Transformer Engine, Apex or a GPU.
_FUSIONS: dict[str, object] = {
    "masked_softmax_fusion": False,
    "bias_activation_fusion": True,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
    "gradient_accumulation_fusion": True,
    "cross_entropy_loss_fusion": False,
}
# Settings with which an MLP computes other than plain SwiGLU; a fusion would refuse or ignore them.
_OTHER_ACTIVATIONS = {"activation_func_clamp_value", "glu_linear_offset", "use_te_activation_func"}
# Settings of Megatron's experts and its dispatcher, which experts in groups would ignore.
_OF_SINGLE_EXPERTS = _OTHER_ACTIVATIONS | {
    "activation_func_fp8_input_store",
    "moe_apply_probs_on_input",
    "moe_expert_rank_capacity_factor",
    "moe_latent_size",
    "moe_mlp_glu_interleave_size",
    "moe_permute_fusion",
    "moe_router_padding_for_fp8",
    "moe_router_padding_for_quantization",
    "moe_shared_expert_overlap",
    "overlap_moe_expert_parallel_comm",
}


def build_model(
    hf: HfConfig,
    *,
    dtype: torch.dtype,
    extra: Mapping[str, object],
    learner: LearnerSection | None = None,
    setting: str = POLICY,
) -> RankModel:
    """Return this rank's part of the model, with random weights; the topology must be up.

    The table [learner.megatron], ``extra``, reaches Megatron's TransformerConfig unchanged.
    ``learner`` has the settings that divide and recompute layers; None is their defaults.
    ``setting`` names the model: the policy or another one.

    Raises:
        ConfigError: a key in ``extra`` is unknown, or the ranks cannot split the model.
    """
    config = transformer_config(
        hf, dtype, extra, learner or LearnerSection(), setting, on_cpu=device.device().type == "cpu"
    )
    config.rotary, config.attention_scale = Rotary.of(hf, device.device()), hf.attention_scale
    config.expert_activation = activation_of(hf)
    numbers = range(num_chunks(config))
    chunks = [_build_chunk(hf, config, number) for number in numbers]
    if hf.vision is not None and chunks[0].pre_process:
        refuse_few_layers(hf, len(chunks[0].decoder.layers), setting)
        tower = VisionTower(hf.vision, dtype, recomputes=config.recompute_granularity == "full")
        chunks[0].see_by(tower.to(device.device()), is_trained=hf.trains_vision)
        _mark_whole(chunks[0].named_parameters())
    return RankModel(chunks, hf)


def num_chunks(config: TransformerConfig) -> int:
    """Return the number of chunks of layers on each rank."""
    return config.virtual_pipeline_model_parallel_size or 1


def _build_chunk(hf: HfConfig, config: TransformerConfig, number: int) -> GPTModel:
    stage = number if num_chunks(config) > 1 else None
    is_first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
    kind = SeeingModel if is_first and hf.vision is not None else GPTModel
    model = kind(
        config,
        layer_specs(hf, config, stage),
        vocab_size=padded_vocab_size(hf.vocab_size),
        max_sequence_length=hf.max_position_embeddings,
        pre_process=is_first,
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        parallel_output=True,
        share_embeddings_and_output_weights=hf.tie_word_embeddings,
        position_embedding_type="none",  # attention turns queries and keys by position id
        vp_stage=stage,
    )
    if model.pre_process and config.gradient_accumulation_fusion:
        words = model.embedding.word_embeddings
        words.forward = types.MethodType(fused_gradients.embedded, words)
    if model.post_process:
        model.output_layer.forward = types.MethodType(_handed_on, model.output_layer)
    for layer in model.decoder.layers:
        compute_in_groups(layer)
        hand_on_choices(layer)
    model.to(device.device())
    _mark_whole(model.named_parameters())
    return model


def _mark_whole(named: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
    """Mark parameters as whole on every rank, unless they are marked as divided."""
    for name, parameter in named:
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        if is_expert(name):
            megatron_repairs.mark_expert(parameter)


@dataclasses.dataclass(frozen=True, slots=True)
class ModelInput:
    """A packed microbatch in the form that this rank's chunks take."""

    token_ids: Tensor  # [T'/c] of this rank, padded
    position_ids: Tensor  # [T'/c], or [3, T'/c] where images have rows and columns
    layout: PackedLayout
    split: TokenSplit
    shared: SharedPrompts | None

    @classmethod
    def of(
        cls,
        config: TransformerConfig,
        token_ids: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor,
        lengths: Sequence[int],
        shared: SharedPrompts | None = None,
        images: PackedImages | None = None,
    ) -> "ModelInput":
        """Divide a microbatch over ranks.

        Sequence parallelism divides tokens evenly: if it does not divide the number, a sequence of
        padding follows the others. A microbatch without tokens is only padding.

        Args:
            config: the model's configuration.
            token_ids: [T] int64.
            position_ids: [T] int64, from 0 in each sequence.
            cu_seqlens: [B + 1] int32; sequence i holds tokens cu_seqlens[i] to cu_seqlens[i + 1].
            lengths: B tokens of each sequence, on the host.
            shared: prompts that are computed once; not under context parallelism.
            images: images of the sequences; their positions take the place of others.
        """
        source: Tensor | None = None
        if images is not None:
            position_ids, source = images.position_ids, images.source
        if shared is not None:
            token_ids, position_ids = token_ids[shared.computed], position_ids[..., shared.computed]
            source = None if source is None else source[shared.computed.cpu()]
        split = token_split(config, len(token_ids))
        missing, padded = split.padded - split.count, shared
        if missing:
            where = position_ids.device
            token_ids = F.pad(token_ids, (0, missing))
            of_padding = torch.arange(missing, device=where).expand(*position_ids.shape[:-1], -1)
            position_ids = torch.cat([position_ids, of_padding], dim=-1)
            source = None if source is None else F.pad(source, (0, missing), value=-1)
            cu_seqlens = torch.cat([cu_seqlens, cu_seqlens[-1:] + missing])
            lengths = [*lengths, missing]
            padded = None if shared is None else shared.padded(missing)
        whole = dataclasses.replace(split, count=split.padded)
        positions = whole.mine(position_ids.movedim(-1, 0)).movedim(0, -1)
        layout = PackedLayout(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens if padded is None else padded.cu_queries,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=max(lengths, default=0) if padded is None else padded.max_queries,
            max_seqlen_kv=max(lengths, default=0),
            lengths=tuple(lengths),
            rotation=config.rotary.at(positions),
            split=split,
            shared=padded,
        )
        if images is not None and source is not None:
            layout.images = images.of_rank(_of_tensor_rank(whole.mine(source), config))
        return cls(whole.mine(token_ids), positions, layout, split, shared)

    def recording(self, record: MutableMapping[int, Tensor]) -> "ModelInput":
        """Return the microbatch; its routers record their choices, by layer with experts."""
        return self._choosing(ExpertChoices(record=record))

    def repeating(self, given: Mapping[int, Tensor]) -> "ModelInput":
        """Return the microbatch; its routers repeat choices recorded on this rank."""
        return self._choosing(ExpertChoices(given=given))

    def choosing(self, experts: Tensor, config: TransformerConfig) -> "ModelInput":
        """Return the microbatch; its routers choose these for all its tokens, [T, L, k]."""
        ranks, rank = _sequence_ranks(config)
        return self.repeating(choices_of_rank(experts, self.split, ranks=ranks, rank=rank))

    def _choosing(self, choices: ExpertChoices) -> "ModelInput":
        return dataclasses.replace(self, layout=dataclasses.replace(self.layout, choices=choices))

    def through(self, chunk: torch.nn.Module) -> Tensor:
        """Run a chunk, or a wrapper around one; pass the last chunk's output to ``hidden``."""
        output: Tensor = chunk(
            self.token_ids.unsqueeze(0),
            self.position_ids.unsqueeze(0),
            None,
            packed_seq_params=self.layout,
        )
        return output

    def hidden(self, output: Tensor) -> Tensor:
        """Return the last chunk's output for this rank's tokens: [T'/c, H]; [T, H] if it has all.

        Padding remains only if tokens are divided.
        """
        hidden = output.squeeze(0)
        if self.split.group is not None:
            return hidden
        hidden = hidden[: self.split.count]
        return hidden if self.shared is None else self.shared.of_all(hidden)


def _sequence_ranks(config: TransformerConfig) -> tuple[int, int]:
    """Return over how many ranks sequence parallelism divides tokens, and this rank among them."""
    if not config.sequence_parallel:
        return 1, 0
    ranks: int = parallel_state.get_tensor_model_parallel_world_size()
    rank: int = parallel_state.get_tensor_model_parallel_rank()
    return ranks, rank


def _of_tensor_rank(values: Tensor, config: TransformerConfig) -> Tensor:
    """Return the values of the tokens that sequence parallelism leaves to this rank."""
    ranks, rank = _sequence_ranks(config)
    return values.chunk(ranks)[rank]


def token_split(config: TransformerConfig, count: int) -> TokenSplit:
    """Return how ranks divide a microbatch of ``count`` tokens, which context parallelism takes."""
    ranks, tensor_ranks = config.context_parallel_size, config.tensor_model_parallel_size
    unit = tensor_ranks if config.sequence_parallel else 1
    if ranks == 1:
        return TokenSplit.of(count, unit=unit)
    return TokenSplit.of(
        count,
        unit=unit,
        rank=parallel_state.get_context_parallel_rank(),
        shares=HeadShares.of(
            ranks=ranks,
            heads=config.num_attention_heads // tensor_ranks,
            groups=config.num_query_groups // tensor_ranks,
        ),
        group=parallel_state.get_context_parallel_group(),
    )


def output_weight(model: RankModel) -> Tensor:
    """Return this rank's rows [V/tp, H] of the output layer, tied to the embedding or not.

    Raises:
        ValueError: another pipeline stage has the layer.
    """
    chunk = model.last
    if chunk is None:
        raise ValueError("the output layer is on another pipeline stage")
    weight: Tensor = (
        chunk.shared_embedding_or_output_weight()
        if chunk.share_embeddings_and_output_weights
        else chunk.output_layer.weight
    )
    return weight


def _handed_on(
    layer: ColumnParallelLinear,
    hidden: Tensor,
    weight: Tensor | None = None,  # noqa: ARG001 Megatron passes it on
    runtime_gather_output: bool | None = None,  # noqa: ARG001
) -> tuple[Tensor, None]:
    """Replace the layer's forward: return its input, whole on every rank.

    The backward pass sums the ranks' shares of the gradient, as the layer would.
    """
    if layer.sequence_parallel:
        return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True), None
    return copy_to_tensor_model_parallel_region(hidden), None


def padded_vocab_size(vocab_size: int) -> int:
    """Return the embedding's rows over all ranks: a multiple of the tensor-parallel size."""
    ranks: int = parallel_state.get_tensor_model_parallel_world_size()
    return -(-vocab_size // ranks) * ranks


def transformer_config(
    hf: HfConfig,
    dtype: torch.dtype,
    extra: Mapping[str, object],
    learner: LearnerSection,
    setting: str,
    *,
    on_cpu: bool,
) -> TransformerConfig:
    """Return Megatron's description of the model, with its schedule; the topology must be up.

    ``on_cpu`` decides where weights are made, and nothing else.

    Raises:
        ConfigError: a key in ``extra`` is unknown, or the ranks cannot split the model.
    """
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    refuse_undivided(hf, _sizes(), setting)
    fixed: dict[str, object] = {
        "num_layers": hf.num_hidden_layers,
        "hidden_size": hf.hidden_size,
        "ffn_hidden_size": hf.intermediate_size or hf.expert_inner,
        "num_attention_heads": hf.num_attention_heads,
        "num_query_groups": hf.num_query_groups,
        "kv_channels": hf.kv_channels,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": hf.has_biases,
        "add_qkv_bias": hf.has_qkv_bias,
        "qk_layernorm": hf.has_qk_norm or hf.family.is_latent,
        "attention_output_gate": hf.family.gates_attention,
        # Layers of unlike kinds are apart in a checkpoint.
        "hetereogenous_dist_checkpoint": any(kind.layer for kind in hf.family.kinds.values()),
        **hf.family.megatron,
        **_expert_config(hf),
        **latent_config(hf),
        **_pipeline_config(hf, extra, learner.layers_per_stage, setting),
        **_recompute_config(learner),
        "params_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        "tensor_model_parallel_size": ranks,
        "sequence_parallel": learner.sequence_parallel and ranks > 1,
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "calculate_per_token_loss": True,
        "moe_token_dispatcher_type": "alltoall",  # lengths that vary need it, experts or not
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    fixed["pipeline_dtype"] = dtype
    _refuse_fixed(extra, fixed)
    refuse_unknown_keys(hf, extra)
    if ignored := sorted(_OF_SINGLE_EXPERTS & extra.keys()) if hf.num_routed_experts else []:
        raise ConfigError(
            f"learner.megatron.{ignored[0]} = {extra[ignored[0]]!r} acts on Megatron's experts, "
            f"and those of {setting} ({hf.model_type}) are computed in groups: remove it"
        )
    defaults = {**_FUSIONS, "use_cpu_initialization": on_cpu}
    if not _OTHER_ACTIVATIONS.isdisjoint(extra):
        defaults["bias_activation_fusion"] = False
    try:
        return _config_class(hf)(**fixed, **{**defaults, **extra})
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"Megatron refuses {setting} as [learner] divides it: {error} ([learner.megatron] = "
            f"{dict(extra)})"
        ) from error


def _sizes() -> ParallelSizes:
    """Return the parallel sizes that Megatron was started with."""
    return ParallelSizes(
        tensor=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline=parallel_state.get_pipeline_model_parallel_world_size(),
        context=parallel_state.get_context_parallel_world_size(),
        expert=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor=parallel_state.get_expert_tensor_parallel_world_size(),
        chunks=parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
    )


def _expert_config(hf: HfConfig) -> dict[str, object]:
    """Return the part of Megatron's configuration for experts."""
    if not hf.num_routed_experts:
        return {"expert_model_parallel_size": 1, "expert_tensor_parallel_size": 1}
    return {
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
        "num_moe_experts": hf.num_routed_experts,
        "moe_layer_freq": [int(hf.is_sparse(layer)) for layer in range(hf.num_hidden_layers)],
        "moe_router_topk": hf.experts_per_token,
        "moe_ffn_hidden_size": hf.expert_inner,
        "moe_shared_expert_intermediate_size": hf.shared_inner or None,
        "moe_shared_expert_gate": "mlp.shared_experts.gate_weight" in hf.family.sparse,
        "moe_router_dtype": "fp32",
        # PolicyRouter chooses as the family does.
        "moe_router_pre_softmax": True,
        "moe_router_score_function": "softmax",
        "moe_router_topk_scaling_factor": None,
        "moe_router_num_groups": None,
        "moe_router_group_topk": None,
        "moe_router_enable_expert_bias": False,
        "moe_expert_capacity_factor": None,  # a capacity would leave tokens out
        # Experts are trained as the policy chose them: no loss balances their loads.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": False,
    }


def _pipeline_config(
    hf: HfConfig, extra: Mapping[str, object], layers_per_stage: tuple[int, ...], setting: str
) -> dict[str, object]:
    """Return the part of Megatron's configuration for pipeline stages."""
    sizes = _sizes()
    stages, chunks = sizes.pipeline, sizes.chunks
    values: dict[str, object] = {
        "pipeline_model_parallel_size": stages,
        "pipeline_model_parallel_layout": None,
        "variable_seq_lengths": True,  # PlannedStages knows them
        # A batch is waited for with the whole device, and ties directions together that differ.
        "batch_p2p_comm": False,
        "overlap_p2p_comm": chunks > 1,
    }
    if stages == 1:
        return values
    if any(name in extra for name in MEGATRON_STAGES):
        return values | {"virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None}
    layers = sizes.layers_of_stages(hf.num_hidden_layers, layers_per_stage, setting)
    layout = [["decoder"] * count for count in layers]
    layout[0].insert(0, "embedding")
    layout[-1].append("loss")
    return values | {"pipeline_model_parallel_layout": layout}


def _recompute_config(learner: LearnerSection) -> dict[str, object]:
    """Return the part of Megatron's configuration for activations."""
    match learner.recompute:
        case "none":
            return {}
        case "selective":
            modules = list(learner.recompute_modules)
            return {"recompute_granularity": "selective", "recompute_modules": modules}
        case "full":
            layers = learner.recompute_layers
            return {
                "recompute_granularity": "full",
                "recompute_method": "block" if layers else "uniform",
                "recompute_num_layers": layers or 1,
            }


def _config_class(hf: HfConfig) -> type[TransformerConfig]:
    kind: type[TransformerConfig] = (
        MLATransformerConfig if hf.family.is_latent else TransformerConfig
    )
    return kind


def _refuse_fixed(extra: Mapping[str, object], fixed: Mapping[str, object]) -> None:
    for name in extra:
        if name in fixed:
            instead = _OWN_SETTINGS.get(name, "")
            raise ConfigError(
                f"learner.megatron.{name} follows from the model and the learner's settings "
                f"({fixed[name]!r}) and cannot be set{instead and f': set learner.{instead}'}"
            )


def refuse_unknown_keys(hf: HfConfig, extra: Mapping[str, object]) -> None:
    """Refuse keys that Megatron's TransformerConfig does not know.

    Raises:
        ConfigError: a key is unknown; the message has the nearest name.
    """
    known = [field.name for field in dataclasses.fields(_config_class(hf)) if field.init]
    for name in extra:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise ConfigError(
                f"unknown setting learner.megatron.{name}; did you mean {', '.join(close)}?"
            )
