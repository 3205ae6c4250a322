"""Pure: whether parallel sizes divide a model, before any rank is started."""

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
    "pipeline_model_parallel_layout",
)


def refuse_layout(hf: HfConfig, learner: LearnerSection) -> None:
    """Refuse settings of [learner] that do not divide the policy.

    Raises:
        ConfigError: naming both numbers and the setting.
    """
    refuse_undivided(hf, learner.sizes)
    if learner.pipeline_parallel > 1 and not any(n in learner.megatron for n in MEGATRON_STAGES):
        learner.sizes.layers_of_stages(hf.num_hidden_layers, learner.layers_per_stage)


def refuse_undivided(hf: HfConfig, sizes: ParallelSizes) -> None:
    """Refuse a model whose heads, channels or experts the ranks do not divide.

    Raises:
        ConfigError: naming both numbers and the setting.
    """
    if not hf.num_routed_experts and sizes.expert * sizes.expert_tensor > 1:
        name = "expert_parallel" if sizes.expert > 1 else "expert_tensor_parallel"
        size = sizes.expert if sizes.expert > 1 else sizes.expert_tensor
        raise ConfigError(
            f"learner.{name} = {size}, and run.model ({hf.model_type}) has no experts"
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
    for name, size, setting, ranks in divided:
        if size % ranks:
            raise ConfigError(
                f"{name} of run.model must be a multiple of learner.{setting}, got {size} and "
                f"{ranks}"
            )
