"""Corrections of gpt-oss in SGLang 0.5.23: its sinks, and how its experts are loaded.

The sinks have the weights' type, an engine of several ranks loads its share of the experts, and on
a CPU ``torch_native`` attention takes sinks (cpu.py computes them). Remove what a release has.
"""

from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

from slipstream.generators.sglang.replacing import replace

if TYPE_CHECKING:
    from torch import Tensor

MODEL = "sglang.srt.models.gpt_oss"
ARGUMENTS = "sglang.srt.arg_groups.model_hook"
_NATIVE = "torch_native"
_TAKEN = "triton"  # a backend that gpt-oss may have


def take_native_attention(module: ModuleType) -> None:
    """Let gpt-oss have ``torch_native`` attention, which model_hook.py:536 refuses."""
    backends_of = module.attention_backends_of

    def attention_backends_of(cfg: Any) -> tuple[Any, ...]:  # noqa: ANN401
        return tuple(_TAKEN if name == _NATIVE else name for name in backends_of(cfg))

    replace(module, "attention_backends_of", attention_backends_of)


def correct(module: ModuleType) -> None:
    """Correct the model, right after its import."""
    _keep_type_of_sinks(module)
    _load_share(module)


def _keep_type_of_sinks(module: ModuleType) -> None:
    """Keep sinks in the weights' type: it has bfloat16, or float32 for TensorRT-LLM's kernels.

    Those get float32 when they are called (gpt_oss.py:429).
    """
    attention = module.GptOssAttention
    make = attention.__init__

    def __init__(self: Any, *args: Any, **named: Any) -> None:  # noqa: ANN401, N807
        import torch  # in the process that computes, not in the agent's

        make(self, *args, **named)
        was, kept = self.sinks.dtype, self.qkv_proj.weight.dtype
        if was == kept:
            return
        empty = torch.empty_like(self.sinks, dtype=kept)
        self.sinks = torch.nn.Parameter(empty, requires_grad=False)
        if was != torch.float32:
            return

        def widened(_layer: object, args: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:  # noqa: ANN401
            return args, named | {"sinks": named["sinks"].float()}

        self.attn.register_forward_pre_hook(widened, with_kwargs=True)

    replace(attention, "__init__", __init__)


def _load_share(module: ModuleType) -> None:
    """Load those experts that a rank has, and leave what is loaded as it is.

    Its loader takes the tensors of all experts for a rank's (layer.py:1559), and sets the bias of a
    rank that is not the first to zero where it lies (gpt_oss.py:1334).
    """
    model = module.GptOssForCausalLM
    load = model._load_normal_weights

    def shares(
        self: Any,  # noqa: ANN401
        weights: "Iterable[tuple[str, Tensor]]",
    ) -> "Iterator[tuple[str, Tensor]]":
        for name, weight in weights:
            if ".mlp.experts." not in name:
                yield name, weight
                continue
            experts = self.get_submodule(name.rsplit(".", 1)[0])
            count = experts.num_local_experts
            share = weight[experts.moe_ep_rank * count :][:count]
            is_zeroed = name.endswith("down_proj_bias") and experts.moe_tp_rank > 0
            yield name, share.clone() if is_zeroed else share

    def _load_normal_weights(
        self: Any,  # noqa: ANN401
        weights: "Iterable[tuple[str, Tensor]]",
        is_nextn: bool,
        weight_name_mapping: dict[str, str],
        other_loaded_param_names: Any = (),  # noqa: ANN401
    ) -> None:
        load(self, shares(self, weights), is_nextn, weight_name_mapping, other_loaded_param_names)

    replace(model, "_load_normal_weights", _load_normal_weights)
