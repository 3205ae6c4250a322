"""What Megatron-Core does where megatron_repairs.py and hybrid_repairs.py have something else.

Usage: unrepaired
Prints one line of JSON: by defect, whether it is still there.
"""

import inspect
import json
import sys
from collections.abc import Callable
from types import SimpleNamespace

import torch

from slipstream.learner.model import device


def fails(call: Callable[[], object], kind: type[Exception]) -> bool:
    """Return whether a call raises an error of this kind."""
    try:
        call()
    except kind:
        return True
    return False


def updated_on_a_cpu() -> None:
    """Do one update of Megatron's hybrid optimizer."""
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    HybridDeviceOptimizer(
        [weight],
        cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=torch.optim.AdamW,
        param_update_in_fp32=True,
        lr=0.1,
    ).step()


def main() -> None:
    device.prepare()
    from megatron.core.optimizer import optimizer_config
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    main_weight, loaded = torch.nn.Parameter(torch.zeros(2)), torch.ones(2)
    state = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(2)}
    optimizer = SimpleNamespace(
        model_param_group_index_map={"weight": (0, 0)},
        config=SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=False),
        optimizer=SimpleNamespace(
            param_groups=[{"params": [main_weight]}], state={main_weight: state}
        ),
    )
    missing = ""
    try:
        with torch.no_grad():
            DistributedOptimizer._set_main_param_and_optimizer_states(
                optimizer, "weight", {"param": loaded, "exp_avg": loaded}
            )
    except KeyError as error:
        missing = error.args[0]
    experts = inspect.getsource(ColumnParallelLinear.__init__)
    found = {
        "the router's import": "te_general_gemm" not in vars(moe_utils),
        "Transformer Engine in latent attention": (
            multi_latent_attention.HAVE_TE and not isinstance(multi_latent_attention.TELinear, type)
        ),
        "experts that are marked with expert parallelism alone": (
            "self.expert_parallel = config.expert_model_parallel_size > 1" in experts
        ),
        "the count of updates of torch's Adam": missing == "step",
        "places with the padding of buckets in a state without it": (
            "offset_in_world_tensors += gbuf_world_numel_unpadded"
            in inspect.getsource(DistributedOptimizer.get_parameter_state_dp_zero)
            and "in buffer.param_index_map.items()"
            in inspect.getsource(DistributedOptimizer.sharded_param_state_fully_reshardable)
        ),
        "the version of Transformer Engine": fails(
            lambda: optimizer_config.is_te_min_version("2.1.0"), TypeError
        ),
        "a hybrid optimizer without CUDA": fails(updated_on_a_cpu, KeyError),
        "where a hybrid optimizer's loaded state is": (
            'isinstance(optimizer, self.defaults["cpu_optimizer_cls"])'
            in inspect.getsource(HybridDeviceOptimizer._move_new_state_to_right_device)
        ),
    }
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
