"""All families, and the place of each of their tensors in SGLang."""

import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from slipstream.wire.models.families.deepseek_v2 import DEEPSEEK_V2
from slipstream.wire.models.families.deepseek_v3 import DEEPSEEK_V3
from slipstream.wire.models.families.glm4 import GLM4
from slipstream.wire.models.families.glm4_moe import GLM4_MOE
from slipstream.wire.models.families.gpt_oss import GPT_OSS
from slipstream.wire.models.families.latent import FUSED_BY_ENGINE, FUSED_NAME
from slipstream.wire.models.families.llama import LLAMA
from slipstream.wire.models.families.mixtral import MIXTRAL
from slipstream.wire.models.families.qwen2 import QWEN2
from slipstream.wire.models.families.qwen2_5_vl import QWEN2_5_VL
from slipstream.wire.models.families.qwen2_moe import QWEN2_MOE
from slipstream.wire.models.families.qwen3 import QWEN3
from slipstream.wire.models.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from slipstream.wire.models.families.qwen3_moe import QWEN3_MOE
from slipstream.wire.models.families.qwen3_next import QWEN3_NEXT
from slipstream.wire.models.families.qwen3_vl import QWEN3_VL
from slipstream.wire.models.families.tables import (
    EMBEDDING,
    HF_TOWER,
    Family,
    Split,
    Table,
    Tower,
    without_expert,
)

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        LLAMA,
        QWEN2,
        QWEN3,
        QWEN2_MOE,
        QWEN3_MOE,
        QWEN3_NEXT,
        QWEN3_5,
        QWEN3_5_MOE,
        MIXTRAL,
        DEEPSEEK_V2,
        DEEPSEEK_V3,
        GLM4,
        GLM4_MOE,
        GPT_OSS,
        QWEN2_5_VL,
        QWEN3_VL,
    )
}
SCALE_SUFFIX = "_scale_inv"  # suffix of the scales of a quantized tensor's blocks
_LAYER_NUMBER = re.compile(r"model\.layers\.(\d+)\.")
_OF_LISTS = f"{HF_TOWER}*."  # beginning of the keys of tensors in a tower's lists
_IN_TOWER = re.compile(r"(visual\.\w+\.\d+\.)(.+)")
_HF_LAYER = re.compile(r"(model\.layers\.\d+\.)(.+)")


@dataclass(frozen=True, slots=True)
class EngineTensor:
    """Place of a Hugging Face tensor in SGLang."""

    name: str
    position: int = 0  # among the tensors fused under this name
    row_multiple: int = 1
    column_multiple: int = 1
    split: Split = "whole"  # share of each rank of an engine of several
    of_attention: bool = False  # split over the ranks of one attention group
    of_expert: int = 0  # tensors of each expert under this name, which has those of all of them
    stacked: int = 1  # matrices in it, each split by itself
    has_experts: bool = False  # matrices of all experts of a layer in one tensor of ours, too
    is_transposed: bool = False  # rows there are columns here
    partners: tuple[str, ...] = ()  # fused only if all of them are there
    dtype: Literal["model", "float32"] = "model"  # dtype in which it is published and kept
    # Tensor with as many columns as the last of its matrices has rows; else all have as many.
    last_like: str = ""

    def alone(self, name: str) -> "EngineTensor":
        """Return the place of a tensor of this name that is not fused."""
        return replace(self, name=name, position=0, partners=())


def engine_tensors(families: Mapping[str, Family]) -> dict[str, EngineTensor]:
    """Return the engine's place of every tensor of some families; in layers, without their prefix.

    Raises:
        ValueError: two families keep a tensor of the same name in different places; the relay knows
            names and no family.
    """
    places: dict[str, EngineTensor] = {}
    for family in families.values():
        for name, place in _places(family):
            known = places.get(name)
            if known is None or known.alone(name) == place:  # and fused in a model with partners
                places[name] = known or place
            elif place.alone(name) == known:
                places[name] = place
            elif known != place:
                raise ValueError(f"{family.model_type} keeps {name} elsewhere than another family")
    return places


def _tower_places(tower: Tower) -> Iterator[tuple[str, EngineTensor]]:
    """Yield the places of a tower's tensors; those of lists by what follows their number."""
    for table in tower.lists.values():
        for name, place in _places_alone(table):
            yield _OF_LISTS + name, place
    for name, place in _places_alone(tower.ends):
        yield HF_TOWER + name, replace(place, name=HF_TOWER + place.name)


def _places_alone(table: Table) -> Iterator[tuple[str, EngineTensor]]:
    """Yield the places of tensors that are parameters of their own, fused or not."""
    tensors = [parameter.tensors[0] for parameter in table.values()]
    for tensor, parameter in zip(tensors, table.values(), strict=True):
        fused = tuple(t.name for t in tensors if t.engine_name == tensor.engine_name)
        place = EngineTensor(
            tensor.engine_name,
            fused.index(tensor.name),
            tensor.row_multiple,
            tensor.column_multiple,
            split=parameter.split,
            stacked=3 if ".qkv." in tensor.name else 1,
            partners=fused if len(fused) > 1 else (),
        )
        yield tensor.name, place


def _places(family: Family) -> Iterator[tuple[str, EngineTensor]]:
    if family.tower is not None:
        yield from _tower_places(family.tower)
    for parameter in (parameter for table in family.tables() for parameter in table.values()):
        for position, tensor in enumerate(parameter.tensors):
            has_experts = tensor.expert is not None
            of_expert = len(parameter.tensors) if "*" in tensor.name or has_experts else 0
            name = tensor.engine_name or parameter.engine_name or tensor.name
            partners = tuple(
                t.name for t in parameter.tensors if t.engine_name == tensor.engine_name
            )
            if not (tensor.engine_name or parameter.engine_name):
                partners = (tensor.name,)
            if tensor.name in FUSED_BY_ENGINE:
                name, partners = FUSED_NAME, FUSED_BY_ENGINE
            if len(partners) == 1 or of_expert:
                partners = ()
            yield (
                tensor.name,
                EngineTensor(
                    name,
                    partners.index(tensor.name) if partners else position * bool(of_expert),
                    tensor.row_multiple,
                    tensor.column_multiple,
                    parameter.split,
                    tensor.name == EMBEDDING or tensor.name.startswith("self_attn."),
                    of_expert,
                    1 if tensor.is_interleaved else 1 + len(tensor.below),
                    has_experts,
                    tensor.is_transposed,
                    partners,
                    tensor.dtype,
                    tensor.last_like,
                ),
            )


def layer_of(name: str) -> int:
    """Return the number of the layer that a Hugging Face tensor is of; -1 if it is of none."""
    found = _LAYER_NUMBER.match(name)
    return int(found[1]) if found is not None else -1


def engine_tensor(name: str, beside: Container[str] = ()) -> EngineTensor:
    """Return the place of any family's tensor in SGLang; an unknown one is unchanged.

    Other tensors of the model decide whether it is fused.
    """
    if name.endswith(SCALE_SUFFIX):
        return _of_scales(engine_tensor(name.removesuffix(SCALE_SUFFIX), beside))
    found = _HF_LAYER.fullmatch(name) or _IN_TOWER.fullmatch(name)
    prefix, inner = (found[1], found[2]) if found is not None else ("", name)
    inner = _OF_LISTS + inner if prefix.startswith(HF_TOWER) else inner
    inner, expert = without_expert(inner)
    place = _ENGINE_TENSORS.get(inner)
    if place is None:
        return EngineTensor(name)
    if not all(prefix + partner in beside for partner in place.partners):
        return place.alone(name)
    position = place.position + int(expert or 0) * place.of_expert
    last_like = prefix + place.last_like if place.last_like else ""
    return replace(place, name=prefix + place.name, position=position, last_like=last_like)


def _of_scales(place: EngineTensor) -> EngineTensor:
    """Return the place of a matrix' scales: they are fused and split as it is, and not padded."""
    name = place.name + SCALE_SUFFIX
    return replace(place, name=name, row_multiple=1, column_multiple=1, dtype="float32")


def checksum_name(engine_name: str, rank: int) -> str:
    """Return the name under which the checksum of a rank's share of a tensor is reported."""
    return f"{engine_name} of rank {rank}" if rank else engine_name


_ENGINE_TENSORS = engine_tensors(FAMILIES)
