"""Pure: weights in fp8, in blocks that each have a scale: which tensors, and their shapes.

A block is 128 rows and 128 columns of a matrix in e4m3 (Micikevicius et al., arXiv:2209.05433); its
scale, float32, multiplies them (DeepSeek-AI, arXiv:2412.19437, section 3.3.2). Scales have the name
of their matrix with a suffix, as in folders of Hugging Face.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from slipstream.wire.messages.manifest import TensorSpec
from slipstream.wire.models.families.registry import SCALE_SUFFIX
from slipstream.wire.models.hf_config import HfConfig

BLOCK = 128
LARGEST = 448.0  # number of e4m3
TYPE = "float8_e4m3fn"
_WIDE_BYTES = 2  # size of a number in bfloat16
_PROJECTION = re.compile(r"model\.layers\.\d+\..*(?:_proj|experts\.\d+\.w[123])\.weight")


def is_quantized(name: str) -> bool:
    """Return True for the matrices of layers: not norms, routers, biases, embedding and output."""
    return _PROJECTION.fullmatch(name) is not None


def scale_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the scales of a matrix."""
    return tuple(-(-size // BLOCK) for size in shape)


def quantized(specs: Iterable[TensorSpec]) -> Iterator[TensorSpec]:
    """Yield a version's tensors, its matrices in fp8, each followed by its scales."""
    for spec in specs:
        if not is_quantized(spec.name):
            yield spec
            continue
        yield TensorSpec(spec.name, TYPE, spec.shape)
        yield TensorSpec(spec.name + SCALE_SUFFIX, "float32", scale_shape(spec.shape))


def bytes_per_parameter(hf: HfConfig, *, is_fp8: bool) -> float:
    """Return the mean size of a parameter of a version of a model that trains in bfloat16."""
    if not is_fp8:
        return _WIDE_BYTES

    def copies(name: str) -> int:
        return hf.num_routed_experts if "*" in name else 1

    matrices = sum(
        count * copies(tensor.name) * math.prod(tensor.shape_of_one(hf.sizes))
        for layer, count in hf.family.layers_of(hf, range(hf.num_hidden_layers))
        for parameter in layer.values()
        for tensor in parameter.tensors
        if is_quantized("model.layers.0." + tensor.name.replace("*", "0"))
    )
    saved = _WIDE_BYTES - 1 - 4 / BLOCK**2
    return _WIDE_BYTES - saved * matrices / hf.num_parameters


def quantization_config() -> dict[str, Any]:
    """Return ``quantization_config`` of the config.json of such a model."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        # Names within a layer: routers stay as they are.
        "modules_to_not_convert": ["gate", "shared_expert_gate"],
    }


def quantization_trouble(
    hf: HfConfig, *, attention: tuple[str, int], inner: tuple[str, int], experts: tuple[str, int]
) -> str:
    """Return why a model cannot be published in fp8; empty if it can.

    Args:
        hf: The model.
        attention: Setting and number of ranks that split its heads.
        inner: The same of MLPs and shared experts.
        experts: The same of each routed expert.
    """
    where = 'weightbus.precision = "fp8"'
    if hf.family.is_latent:
        return (
            f'{where} for {hf.family.model_type}: expected "trained", as the engine multiplies '
            "parts of the matrix that expands its keys and values"
        )
    if hf.linear_num_key_heads:
        return (
            f'{where} for {hf.family.model_type}: expected "trained", as gates of linear attention '
            f"have fewer rows than a block of fp8, {2 * hf.linear_num_value_heads}"
        )
    if hf.family.stacks_experts:
        return (
            f'{where} for {hf.family.model_type}: expected "trained", as the experts of a layer '
            "are one tensor, of another order than blocks of fp8 have"
        )
    if hf.vision is not None:
        return (
            f'{where} for {hf.family.model_type}: expected "trained", as an engine would begin '
            "with a made-up vision tower"
        )
    sizes, has_experts = hf.sizes, bool(hf.num_routed_experts)
    is_dense = hf.num_sparse_layers < hf.num_hidden_layers
    divided = [
        ("hidden_size", sizes["hidden"], (inner[0], 1)),
        ("num_attention_heads x head_dim", sizes["queries"], attention),
        ("num_key_value_heads x head_dim", sizes["keys"], attention),
        ("intermediate_size", sizes["inner"] * is_dense, inner),
        ("moe_intermediate_size", sizes["expert_inner"] * has_experts, experts),
        ("the inner size of shared experts", sizes["shared_inner"], inner),
    ]
    for name, size, (setting, ranks) in divided:
        if size % (ranks * BLOCK):
            with_ranks = f" with {setting} = {ranks}" if ranks > 1 else ""
            return (
                f"{where} needs whole blocks of {BLOCK} on every rank: {name} of run.model must be "
                f"a multiple of {ranks * BLOCK}{with_ranks}, got {size}"
            )
    return ""
