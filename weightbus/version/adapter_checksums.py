"""The answer of an engine's weights checker if it holds exactly our adapters.

SGLang fuses A of q, k and v into one tensor, and B likewise; the same holds for gate and up, those
of experts too, and for what latent attention compresses by. Zeros take the place of a missing
adapter of k or of up. A of gate and up in one tensor is kept twice. SGLang keeps all on the host
and whole on every rank: the checksum is that of a CPU (generators/sglang/patches.py).
"""

import re
from collections.abc import Iterable, Mapping

import numpy as np

from slipstream.weightbus.version.engine_checksums import (
    EngineLayout,
    expected_checksums,
    host_checksum,
)
from slipstream.weightbus.version.tensor_bits import Bits, Tensors, bits_of
from slipstream.wire.models.adapters import ENGINE_TARGETS
from slipstream.wire.models.families.registry import checksum_name

_NAME = re.compile(r"(.+\.)(\w+)(\.lora_[AB]\.weight)")
# The engine's name of a fused layer, its parts in order, and the part with the shape of the zeros
# for a part without an adapter.
_FUSED = (
    ("qkv_proj", ("q_proj", "k_proj", "v_proj"), "v_proj"),
    ("gate_up_proj", ("gate_proj", "up_proj"), "gate_proj"),
    ("fused_qkv_a_proj_with_mqa", ("q_a_proj", "kv_a_proj_with_mqa"), "q_a_proj"),
)
_FUSED_ALREADY = "gate_up_proj"
_OF = {part: fused for fused in _FUSED for part in fused[1]}


def are_adapters(names: Iterable[str]) -> bool:
    """True if these are names of adapters' tensors."""
    return all(_NAME.fullmatch(name) for name in names)


def expected_of_version(tensors: Tensors, of: EngineLayout | None = None) -> dict[str, str]:
    """Return the checksum of every tensor of an engine with a version of weights or of adapters."""
    compute = expected_adapter_checksums if are_adapters(tensors) else expected_checksums
    return compute(tensors, of)


def expected_adapter_checksums(tensors: Tensors, of: EngineLayout | None = None) -> dict[str, str]:
    """Return the checksum of every tensor of an engine, by ``checksum_name``.

    ``tensors`` are A and B by PEFT's names, not copied. Without a layout the engine is one rank.
    """
    of = of or EngineLayout()
    expected: dict[str, str] = {}
    bits = {name: bits_of(tensor) for name, tensor in tensors.items()}
    for name, parts in _kept(bits).items():
        checksum = host_checksum(parts)
        for rank in range(of.num_ranks):
            expected[checksum_name(name, rank)] = checksum
    return expected


def _kept(tensors: Mapping[str, Bits]) -> dict[str, list[Bits]]:
    """Return the engine's tensor under each name, in parts."""
    kept: dict[str, list[Bits]] = {}
    tensors = {_named(name): tensor for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        found = _NAME.fullmatch(name)
        if found is not None and found[2] == _FUSED_ALREADY and "lora_A" in found[3]:
            kept[name] = [tensor, tensor]
            continue
        fused = _OF.get(found[2]) if found is not None else None
        if found is None or fused is None:
            kept[name] = [tensor]
            continue
        engine_name, parts, like = fused
        of_layer = [tensors.get(f"{found[1]}{part}{found[3]}") for part in parts]
        shaped = tensors[f"{found[1]}{like}{found[3]}"]
        kept[f"{found[1]}{engine_name}{found[3]}"] = [
            np.zeros_like(shaped) if part is None else part for part in of_layer
        ]
    return kept


def _named(name: str) -> str:
    """Return a tensor's name with the engine's name of its projection."""
    found = _NAME.fullmatch(name)
    if found is None:
        return name
    return f"{found[1]}{ENGINE_TARGETS.get(found[2], found[2])}{found[3]}"
