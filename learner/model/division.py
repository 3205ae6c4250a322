"""Pure: whether parallel sizes divide a model, before any rank is started."""

from collections.abc import Collection
from itertools import accumulate, pairwise

import msgspec

from slipstream.learner.config import LearnerSection, LearnerSettings
from slipstream.learner.parallel import HeadShares, ParallelSizes
from slipstream.wire.errors import ConfigError
from slipstream.wire.models.adapters import check_targets, is_target
from slipstream.wire.models.fp8 import quantization_trouble
from slipstream.wire.models.hf_config import HfConfig

# Megatron's own settings that divide layers over stages, in [learner.megatron].
_OF_ENDS = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
_ENDS_COUNT = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
MEGATRON_STAGES = (*_OF_ENDS, *_ENDS_COUNT)
POLICY = "run.model"


def section_for(hf: HfConfig, learner: LearnerSection) -> LearnerSection:
    """Return the settings for a model; layers are divided evenly if the policy's do not fit."""
    try:
        stage_layers(hf, learner)
    except ConfigError:
        others = {k: value for k, value in learner.megatron.items() if k not in MEGATRON_STAGES}
        return msgspec.structs.replace(learner, layers_per_stage=(), megatron=others)
    return learner


def stage_layers(hf: HfConfig, learner: LearnerSection, setting: str = POLICY) -> tuple[int, ...]:
    """Return the layers of each stage in order, chunk by chunk if they are interleaved.

    Raises:
        ConfigError: the stages do not divide the layers; the message names both numbers and the
            setting.
    """
    if any(name in learner.megatron for name in MEGATRON_STAGES):
        return _megatron_layers(hf.num_hidden_layers, learner, setting)
    return learner.sizes.layers_of_stages(hf.num_hidden_layers, learner.layers_per_stage, setting)


def _megatron_layers(num_layers: int, learner: LearnerSection, setting: str) -> tuple[int, ...]:
    """Divide layers by Megatron's own settings: layers of the end stages, or ends counted as one.

    Layers between the ends are divided evenly, as are a rank's layers over its chunks.
    """
    sizes, extra = learner.sizes, learner.megatron
    given = {name: extra[name] for name in _OF_ENDS if name in extra}
    counting = [bool(extra.get(name)) for name in _ENDS_COUNT]
    names = " and ".join(f"learner.megatron.{name}" for name in MEGATRON_STAGES if name in extra)
    if given and any(counting):
        raise ConfigError(f"{names} divide the layers in two ways: set those of one")
    for name, count in given.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ConfigError(f"learner.megatron.{name} must be a number of layers, got {count!r}")
    ends = [int(count) for count in given.values()]
    between, ranks = num_layers + sum(counting) - sum(ends), sizes.pipeline - len(ends)
    if ranks < 0 or between < ranks or (between % ranks if ranks else between):
        raise ConfigError(
            f"{names}: {between} layers of the {num_layers} of {setting} remain for {ranks} ranks "
            f"of learner.pipeline_parallel = {sizes.pipeline}, which must divide them"
        )
    per_rank = [between // ranks] * ranks if ranks else []
    if _OF_ENDS[0] in given:
        per_rank.insert(0, ends[0])
    if _OF_ENDS[1] in given:
        per_rank.append(ends[-1])
    if any(count % sizes.chunks for count in per_rank):
        raise ConfigError(
            f"{names}: ranks have {per_rank} layers, and learner.interleaved_chunks = "
            f"{sizes.chunks} does not divide each"
        )
    stages = [count // sizes.chunks for count in per_rank] * sizes.chunks
    stages[0] -= counting[0]
    stages[-1] -= counting[1]
    return tuple(stages)


def with_vision(hf: HfConfig, learner: LearnerSection, setting: str = POLICY) -> HfConfig:
    """Return a model's architecture, with its vision tower trained or not.

    Raises:
        ConfigError: the policy's tower is to be trained, and it has none.
    """
    if learner.vision == "frozen":
        return hf
    if hf.vision is None and setting == POLICY:
        raise ConfigError(
            f'learner.vision = "trained", and {setting} ({hf.model_type}) has no vision tower'
        )
    return msgspec.structs.replace(hf, trains_vision=hf.vision is not None)


def refuse_policy(hf: HfConfig, settings: LearnerSettings) -> None:
    """Refuse settings with which the policy cannot be divided, or published as they say.

    Raises:
        ConfigError: the message names both numbers and the setting.
    """
    learner = settings.learner
    with_vision(hf, learner)
    refuse_layout(hf, learner, targets=settings.lora.used_targets)
    if settings.weightbus.is_fp8:
        ranks = "learner.tensor_parallel", learner.tensor_parallel
        of_experts = "learner.expert_tensor_parallel", learner.expert_tensor_parallel
        if trouble := quantization_trouble(hf, attention=ranks, inner=ranks, experts=of_experts):
            raise ConfigError(trouble)


def refuse_layout(
    hf: HfConfig, learner: LearnerSection, setting: str = POLICY, *, targets: Collection[str] = ()
) -> None:
    """Refuse settings of [learner] that do not divide the model that ``setting`` names.

    ``targets`` are the layers to get adapters.

    Raises:
        ConfigError: the message names both numbers and the setting, or a target that the model has
            no layer for.
    """
    check_targets(hf, targets)
    refuse_undivided(hf, learner.sizes, setting)
    if hf.num_routed_experts and learner.tensor_parallel > 1 and not learner.sequence_parallel:
        raise ConfigError(
            f"learner.sequence_parallel = false with learner.tensor_parallel = "
            f"{learner.tensor_parallel}: a mixture of experts ({setting}) needs it"
        )
    named = next((name for name in MEGATRON_STAGES if name in learner.megatron), "")
    if learner.layers_per_stage and learner.pipeline_parallel == 1:
        raise ConfigError("learner.layers_per_stage needs learner.pipeline_parallel > 1, got 1")
    if learner.layers_per_stage and named:
        raise ConfigError(
            f"learner.layers_per_stage and learner.megatron.{named} both divide the layers: set "
            "one of them"
        )
    if learner.pipeline_parallel > 1 or named:
        refuse_few_layers(hf, stage_layers(hf, learner, setting)[0], setting)
    if targets:
        _refuse_idle_stage(hf, learner, targets)
    other = "mlp" if hf.num_routed_experts else "moe"
    recomputes = setting == POLICY and learner.recompute == "selective"
    if recomputes and other in learner.recompute_modules:
        raise ConfigError(
            f"learner.recompute_modules has {other!r}, and a {hf.model_type} model has none"
        )


def _refuse_idle_stage(hf: HfConfig, learner: LearnerSection, targets: Collection[str]) -> None:
    """Refuse a pipeline stage that would train nothing: its optimizer could not be resumed."""
    ends = [0, *accumulate(stage_layers(hf, learner))]
    stages = learner.sizes.pipeline
    for stage in range(stages):
        chunks = list(pairwise(ends))[stage::stages]
        layers = (number for first, end in chunks for number in range(first, end))
        tensors = (
            tensor.name
            for number in layers
            for parameter in hf.family.layer_of(hf, number).values()
            for tensor in parameter.tensors
        )
        if not any(is_target(tensor, targets) for tensor in tensors):
            raise ConfigError(
                f"lora.targets names {', '.join(targets)}, and no layer of pipeline stage {stage} "
                f"has one: name more, or set learner.pipeline_parallel below {stages}"
            )


def refuse_few_layers(hf: HfConfig, layers: int, setting: str) -> None:
    """Refuse a first stage that lacks layers which see features of images.

    Raises:
        ConfigError: the message names both numbers and the setting.
    """
    seeing = 0 if hf.vision is None else len(hf.vision.deepstack_visual_indexes)
    if layers < seeing:
        raise ConfigError(
            f"the first {seeing} layers of {setting} ({hf.model_type}) see features of images, and "
            f"the first stage has {layers}: give it more by learner.layers_per_stage, or set "
            "learner.pipeline_parallel or learner.interleaved_chunks lower"
        )


def refuse_undivided(hf: HfConfig, sizes: ParallelSizes, setting: str = POLICY) -> None:
    """Refuse a model whose heads, channels or experts the ranks do not divide.

    Sizes of experts do not divide a model without experts that is not the policy.

    Raises:
        ConfigError: the message names both numbers and the setting.
    """
    if setting == POLICY and not hf.num_routed_experts and sizes.expert * sizes.expert_tensor > 1:
        name = "expert_parallel" if sizes.expert > 1 else "expert_tensor_parallel"
        size = sizes.expert if sizes.expert > 1 else sizes.expert_tensor
        raise ConfigError(
            f"learner.{name} = {size}, and {setting} ({hf.model_type}) has no experts"
        )
    if hf.has_biases and sizes.expert_tensor > 1:
        raise ConfigError(
            f"learner.expert_tensor_parallel = {sizes.expert_tensor}, and the experts of {setting} "
            f"({hf.model_type}) have biases, with which they are not divided: set it to 1"
        )
    divided = [
        ("num_attention_heads", hf.num_attention_heads, "tensor_parallel", sizes.tensor),
        ("num_key_value_heads", hf.num_query_groups, "tensor_parallel", sizes.tensor),
    ]
    if hf.linear_num_key_heads:
        heads = ("linear_num_key_heads", hf.linear_num_key_heads)
        divided.append((*heads, "tensor_parallel", sizes.tensor))
        of_rank = ("the linear_num_key_heads of a rank", hf.linear_num_key_heads // sizes.tensor)
        divided.append((*of_rank, "context_parallel", sizes.context))
    if hf.num_routed_experts:
        width, parts = hf.expert_inner, sizes.expert_tensor
        divided.append(("num_experts", hf.num_routed_experts, "expert_parallel", sizes.expert))
        divided.append(("moe_intermediate_size", width, "expert_tensor_parallel", parts))
        shared = ("the inner size of shared experts", hf.shared_inner)
        divided.append((*shared, "tensor_parallel", sizes.tensor))
    if hf.num_sparse_layers < hf.num_hidden_layers:
        width = hf.intermediate_size
        divided.append(("intermediate_size", width, "tensor_parallel", sizes.tensor))
    for name, size, size_setting, ranks in divided:
        if size % ranks:
            raise ConfigError(
                f"{name} of {setting} must be a multiple of learner.{size_setting}, got {size} and "
                f"{ranks}"
            )
    has_windows = any(map(hf.window_of, range(hf.num_hidden_layers)))
    if has_windows or hf.has_sinks:
        heads_of_rank = hf.num_attention_heads // sizes.tensor
        groups = hf.num_query_groups // sizes.tensor
        shares = HeadShares.of(ranks=sizes.context, heads=heads_of_rank, groups=groups)
        if shares.rings > 1:
            what = f"windows of {hf.sliding_window} tokens" if has_windows else "sinks"
            raise ConfigError(
                f"learner.context_parallel = {sizes.context} makes {shares.rings} rings of the "
                f"{heads_of_rank} query heads of a rank, and layers of {setting} have {what}, "
                "which rings do not compute: set it to a number that divides the heads"
            )
