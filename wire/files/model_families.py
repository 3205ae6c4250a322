"""Model families: all that one family of Hugging Face models differs in from another.

One table per family: the required content of its config.json, its tensors, how
Megatron-Core fuses them into parameters, and how SGLang keeps them. The learner, the relay's checks
of engines and the memory estimate read it; a new dense family is a new entry in ``FAMILIES``.

Sizes have names: ``queries``, ``keys`` (channels of all query heads, of all key heads), ``head``
(channels of one head), ``inner`` (of the MLP), ``experts`` (number of routed experts),
``expert_inner`` (of each), ``hidden``, ``vocabulary``. In names ``*`` is the number of an expert.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

FusionKind = Literal["copy", "qkv", "gate_up", "vocab"]
Size = Literal[
    "queries", "keys", "head", "inner", "experts", "expert_inner", "hidden", "vocabulary"
]
Sizes = Mapping[Size, int]
# Every rank holds all, or its share of rows or of columns. Rows of the vocabulary are padded as a
# whole, other sizes so that every rank's share is a multiple.
Split = Literal["whole", "rows", "columns", "vocabulary"]

EMBEDDING = "model.embed_tokens.weight"
OUTPUT_LAYER = "lm_head.weight"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_HF_LAYER = re.compile(r"(model\.layers\.\d+\.)(.+)")
_EXPERT = re.compile(r"(?<=experts\.)(\d+)(?=\.)")


@dataclass(frozen=True, slots=True)
class HfTensor:
    """One tensor of a Hugging Face folder, and how SGLang pads it with zeros."""

    name: str
    shape: tuple[Size, ...]
    row_multiple: int = 1  # rows are padded to a multiple of it
    column_multiple: int = 1

    def whole_shape(self, sizes: Sizes) -> tuple[int, ...]:
        """Return its shape in a model of these sizes."""
        return tuple(sizes[size] for size in self.shape)


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of Megatron-Core's GPT model and the Hugging Face tensors that it holds.

    ``copy`` is one tensor as it is; ``vocab`` is one tensor whose rows were padded; ``qkv`` and
    ``gate_up`` are several tensors fused along the first dimension. SGLang keeps fused tensors one
    after the other, under the name ``engine_name``.
    """

    kind: FusionKind
    tensors: tuple[HfTensor, ...]
    engine_name: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its tensors."""
        return tuple(tensor.name for tensor in self.tensors)

    @property
    def split(self) -> Split:
        """Split of its tensors under tensor parallelism: readers of the hidden state, by rows."""
        match self.kind:
            case "vocab":
                return "vocabulary"
            case "qkv" | "gate_up":
                return "rows"
            case _:
                is_whole = len(self.tensors[0].shape) == 1 or "experts" in self.tensors[0].shape
                return "whole" if is_whole else "columns"

    def in_layer(self, prefix: str, expert: str = "") -> "Parameter":
        """Return the parameter of one layer, whose tensors begin with ``prefix``, of an expert."""
        tensors = tuple(
            replace(tensor, name=prefix + tensor.name.replace("*", expert))
            for tensor in self.tensors
        )
        engine_name = prefix + self.engine_name if self.engine_name else ""
        return replace(self, tensors=tensors, engine_name=engine_name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A decoder with grouped-query attention, rotary embeddings and a gated MLP."""

    model_type: str  # of config.json
    config: Mapping[str, object]  # keys of config.json that must have these values, or be absent
    layer: Mapping[str, Parameter]  # of one layer, by Megatron's name within it
    ends: Mapping[str, Parameter]  # before and after the layers, by Megatron's name
    megatron: Mapping[str, object] = field(
        default_factory=dict
    )  # of its TransformerConfig, besides
    has_dp_attention: bool = False  # SGLang can split its attention over fewer ranks than its MLP

    @property
    def has_qkv_bias(self) -> bool:
        """True if the query, key and value projections have a bias."""
        return "self_attention.linear_qkv.bias" in self.layer

    @property
    def has_qk_norm(self) -> bool:
        """True if queries and keys are normalized per head."""
        return "self_attention.q_layernorm.weight" in self.layer

    @property
    def has_experts(self) -> bool:
        """True if its MLPs are experts, of which each token has some."""
        return "mlp.router.weight" in self.layer

    def parameter(self, megatron_name: str, *, tied_embeddings: bool) -> Parameter:
        """Return the contents of the named parameter of Megatron's model.

        Raises:
            KeyError: the family has no such parameter.
        """
        if tied_embeddings and megatron_name == "output_layer.weight":
            return self.ends["embedding.word_embeddings.weight"]
        if megatron_name in self.ends:
            return self.ends[megatron_name]
        found = _LAYER.fullmatch(megatron_name)
        name, expert = _without_expert(found[2]) if found is not None else ("", "")
        if found is None or name not in self.layer:
            raise KeyError(megatron_name)
        return self.layer[name].in_layer(f"model.layers.{found[1]}.", expert)

    def parameters(
        self, *, num_layers: int, num_experts: int, tied_embeddings: bool
    ) -> Iterator[tuple[str, Parameter]]:
        """Yield Megatron's name and the contents of every parameter of a whole model."""
        for name, parameter in self.ends.items():
            if not (tied_embeddings and name == "output_layer.weight"):
                yield name, parameter
        for layer in range(num_layers):
            for name, parameter in self.layer.items():
                for number in range(num_experts if "*" in name else 1):
                    whole = f"decoder.layers.{layer}.{name.replace('*', str(number))}"
                    yield whole, parameter.in_layer(f"model.layers.{layer}.", str(number))

    def num_parameters(self, sizes: Sizes, *, num_layers: int, tied_embeddings: bool) -> int:
        """Return the elements of all tensors of a model of these sizes."""

        def elements(parameters: Mapping[str, Parameter]) -> int:
            return sum(
                math.prod(tensor.whole_shape(sizes)) * (sizes["experts"] if "*" in name else 1)
                for name, parameter in parameters.items()
                if not (tied_embeddings and name == "output_layer.weight")
                for tensor in parameter.tensors
            )

        return num_layers * elements(self.layer) + elements(self.ends)


def _without_expert(name: str) -> tuple[str, str]:
    """Return a name with ``*`` for the number of its expert, and that number."""
    found = _EXPERT.search(name)
    return (_EXPERT.sub("*", name), found[1]) if found is not None else (name, "")


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


def engine_tensors(families: Mapping[str, Family]) -> dict[str, EngineTensor]:
    """Return the engine's place of every tensor of some families; in layers, without their prefix.

    Raises:
        ValueError: two families keep a tensor of the same name in different places; the relay knows
            names and no family.
    """
    places: dict[str, EngineTensor] = {}
    for family in families.values():
        for name, place in _places(family):
            if places.setdefault(name, place) != place:
                raise ValueError(f"{family.model_type} keeps {name} elsewhere than another family")
    return places


def _places(family: Family) -> Iterator[tuple[str, EngineTensor]]:
    for parameter in (*family.ends.values(), *family.layer.values()):
        for position, tensor in enumerate(parameter.tensors):
            yield (
                tensor.name,
                EngineTensor(
                    parameter.engine_name or tensor.name,
                    position,
                    tensor.row_multiple,
                    tensor.column_multiple,
                    parameter.split,
                    tensor.name == EMBEDDING or tensor.name.startswith("self_attn."),
                    len(parameter.tensors) if "*" in tensor.name else 0,
                ),
            )


def engine_tensor(name: str) -> EngineTensor:
    """Return the place of any family's tensor in SGLang; an unknown one is unchanged."""
    found = _HF_LAYER.fullmatch(name)
    prefix, inner = (found[1], found[2]) if found is not None else ("", name)
    inner, expert = _without_expert(inner)
    place = _ENGINE_TENSORS.get(inner)
    if place is None:
        return EngineTensor(name)
    position = place.position + int(expert or 0) * place.of_expert
    return replace(place, name=prefix + place.name, position=position)


def checksum_name(engine_name: str, rank: int) -> str:
    """Return the name under which the checksum of a rank's share of a tensor is reported."""
    return f"{engine_name} of rank {rank}" if rank else engine_name


# ---- the families -------------------------------------------------------------

# SGLang pads the vocabulary to a multiple of 64, and on a CPU the MLP's inner size to one of 32.
_VOCABULARY_MULTIPLE = 64
_INNER_MULTIPLE = 32


def _copy(name: str, *shape: Size) -> Parameter:
    return Parameter("copy", (HfTensor(name, shape),))


def _vocabulary(name: str) -> Parameter:
    tensor = HfTensor(name, ("vocabulary", "hidden"), row_multiple=_VOCABULARY_MULTIPLE)
    return Parameter("vocab", (tensor,))


def _qkv(kind: Literal["weight", "bias"], *rest: Size) -> Parameter:
    tensors = (
        HfTensor(f"self_attn.q_proj.{kind}", ("queries", *rest)),
        HfTensor(f"self_attn.k_proj.{kind}", ("keys", *rest)),
        HfTensor(f"self_attn.v_proj.{kind}", ("keys", *rest)),
    )
    return Parameter("qkv", tensors, f"self_attn.qkv_proj.{kind}")


def _gate_up(gate: str, up: str, engine_name: str) -> Parameter:
    shape: tuple[Size, ...] = ("inner", "hidden")
    tensors = tuple(HfTensor(name, shape, row_multiple=_INNER_MULTIPLE) for name in (gate, up))
    return Parameter("gate_up", tensors, engine_name)


_ENDS: dict[str, Parameter] = {
    "embedding.word_embeddings.weight": _vocabulary(EMBEDDING),
    "output_layer.weight": _vocabulary(OUTPUT_LAYER),
    "decoder.final_layernorm.weight": _copy("model.norm.weight", "hidden"),
}
_LLAMA_LAYER: dict[str, Parameter] = {
    "input_layernorm.weight": _copy("input_layernorm.weight", "hidden"),
    "self_attention.linear_qkv.weight": _qkv("weight", "hidden"),
    "self_attention.linear_proj.weight": _copy("self_attn.o_proj.weight", "hidden", "queries"),
    "pre_mlp_layernorm.weight": _copy("post_attention_layernorm.weight", "hidden"),
    "mlp.linear_fc1.weight": _gate_up(
        "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.gate_up_proj.weight"
    ),
    "mlp.linear_fc2.weight": Parameter(
        "copy",
        (HfTensor("mlp.down_proj.weight", ("hidden", "inner"), column_multiple=_INNER_MULTIPLE),),
    ),
}
_QKV_BIAS = {"self_attention.linear_qkv.bias": _qkv("bias")}
_QK_NORM = {
    "self_attention.q_layernorm.weight": _copy("self_attn.q_norm.weight", "head"),
    "self_attention.k_layernorm.weight": _copy("self_attn.k_norm.weight", "head"),
}
_EXPERTS: dict[str, Parameter] = {
    "mlp.router.weight": _copy("mlp.gate.weight", "experts", "hidden"),
    "mlp.experts.local_experts.*.linear_fc1.weight": Parameter(
        "gate_up",
        tuple(
            HfTensor(
                f"mlp.experts.*.{name}.weight",
                ("expert_inner", "hidden"),
                row_multiple=_INNER_MULTIPLE,
            )
            for name in ("gate_proj", "up_proj")
        ),
        "mlp.experts.w13_weight",
    ),
    "mlp.experts.local_experts.*.linear_fc2.weight": Parameter(
        "copy",
        (
            HfTensor(
                "mlp.experts.*.down_proj.weight",
                ("hidden", "expert_inner"),
                column_multiple=_INNER_MULTIPLE,
            ),
        ),
        "mlp.experts.w2_weight",
    ),
}
_MOE_LAYER = {
    name: parameter for name, parameter in _LLAMA_LAYER.items() if not name.startswith("mlp.")
} | _EXPERTS
_PLAIN = {"hidden_act": "silu", "mlp_bias": False, "use_sliding_window": False}
_DENSE = {**_PLAIN, "num_experts": None}

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family(
            model_type="llama",
            config={**_DENSE, "attention_bias": False},
            layer=_LLAMA_LAYER,
            ends=_ENDS,
        ),
        Family(  # always has its bias and does not read attention_bias
            model_type="qwen2", config=_DENSE, layer=_LLAMA_LAYER | _QKV_BIAS, ends=_ENDS
        ),
        Family(
            model_type="qwen3",
            config={**_DENSE, "attention_bias": False},
            layer=_LLAMA_LAYER | _QK_NORM,
            ends=_ENDS,
            has_dp_attention=True,
        ),
        Family(
            model_type="qwen3_moe",
            config={
                **_PLAIN,
                "attention_bias": False,
                "tie_word_embeddings": False,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
                "norm_topk_prob": True,
            },
            layer=_MOE_LAYER | _QK_NORM,
            ends=_ENDS,
        ),
    )
}
_ENGINE_TENSORS = engine_tensors(FAMILIES)
