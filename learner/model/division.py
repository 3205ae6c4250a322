"""Pure: whether parallel sizes divide a model, before any rank is started."""

import msgspec

from slipstream.learner.config import LearnerSection
from slipstream.learner.model.hf_config import HfConfig
from slipstream.learner.parallel import ParallelSizes
from slipstream.wire.errors import ConfigError

# Megatron's own ways to divide layers over stages, in [learner.megatron].
MEGATRON_STAGES = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
POLICY = "run.model"


def section_for(hf: HfConfig, learner: LearnerSection) -> LearnerSection:
    """Return the settings for a model, whose layers divide evenly if they are not the policy's."""
    if sum(learner.layers_per_stage) == hf.num_hidden_layers:
        return learner
    return msgspec.structs.replace(learner, layers_per_stage=())


def refuse_layout(hf: HfConfig, learner: LearnerSection, setting: str = POLICY) -> None:
    """Refuse settings of [learner] that do not divide the model that ``setting`` names.

    Raises:
        ConfigError: naming both numbers and the setting.
    """
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
    if learner.pipeline_parallel > 1 and not named:
        learner.sizes.layers_of_stages(hf.num_hidden_layers, learner.layers_per_stage, setting)
    other = "mlp" if hf.num_routed_experts else "moe"
    recomputes = setting == POLICY and learner.recompute == "selective"
    if recomputes and other in learner.recompute_modules:
        raise ConfigError(
            f"learner.recompute_modules has {other!r}, and a {hf.model_type} model has none"
        )


def refuse_undivided(hf: HfConfig, sizes: ParallelSizes, setting: str = POLICY) -> None:
    """Refuse a model whose heads, channels or experts the ranks do not divide.

    A model without experts beside the policy is not divided by their sizes.

    Raises:
        ConfigError: naming both numbers and the setting.
    """
    if setting == POLICY and not hf.num_routed_experts and sizes.expert * sizes.expert_tensor > 1:
        name = "expert_parallel" if sizes.expert > 1 else "expert_tensor_parallel"
        size = sizes.expert if sizes.expert > 1 else sizes.expert_tensor
        raise ConfigError(
            f"learner.{name} = {size}, and {setting} ({hf.model_type}) has no experts"
        )
    divided = [
        ("num_attention_heads", hf.num_attention_heads, "tensor_parallel", sizes.tensor),
        ("num_key_value_heads", hf.num_query_groups, "tensor_parallel", sizes.tensor),
    ]
    if hf.num_routed_experts:
        width, parts = hf.moe_intermediate_size, sizes.expert_tensor
        divided.append(("num_experts", hf.num_routed_experts, "expert_parallel", sizes.expert))
        divided.append(("moe_intermediate_size", width, "expert_tensor_parallel", parts))
    else:
        width = hf.intermediate_size
        divided.append(("intermediate_size", width, "tensor_parallel", sizes.tensor))
    for name, size, size_setting, ranks in divided:
        if size % ranks:
            raise ConfigError(
                f"{name} of {setting} must be a multiple of learner.{size_setting}, got {size} and "
                f"{ranks}"
            )
