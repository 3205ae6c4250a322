"""What a model family is made of: tables of tensors, and the traits of attention and router.

Sizes have names: ``queries``, ``keys`` (channels of all query heads, of all key heads), ``head``
(channels of one head), ``outputs`` (channels of all heads' values, which the output projection
reads), ``inner`` (of the MLP), ``experts`` (number of routed experts), ``expert_inner`` (of each),
``shared_inner`` (of the experts that every token passes), ``hidden``, ``vocabulary``, ``one``. Of
latent attention (MLA, DeepSeek-AI 2024, arXiv:2405.04434, section 2.1) ``query_rank`` and
``key_rank`` are its compressed queries and keys, ``key_rank_and_rotary`` those with the channels
that turn, ``keys_and_values`` what keys and values are expanded to. Of linear attention (gated
delta networks, Yang et al. 2024, arXiv:2412.06464) ``linear_keys`` and ``linear_values`` are the
channels of all its heads, ``linear_projections`` those of queries, keys, values and gates,
``linear_heads`` the number of heads of values, ``linear_gates`` twice that, ``linear_head`` the
channels of one, ``taps`` the tokens that its convolution sees. ``heads`` is the number of query
heads. Of a vision tower ``vision_hidden`` are its channels, ``vision_qkv`` three times as many,
``vision_inner`` those of its MLPs, ``vision_square`` those of all patches that become a token,
``vision_places`` the places of patches that have an embedding; a patch has ``colors``, ``frames``
and ``patch`` pixels each way. In names ``*`` is the number of an expert.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

# SGLang never ties the output layer of these families: without a tensor it would stay unset.
UNTIED: Mapping[str, object] = {"tie_word_embeddings": False}
FusionKind = Literal["copy", "qkv", "delta", "gate_up", "vocab"]
FULL_ATTENTION = "full_attention"
Size = Literal[
    "queries",
    "queries_and_gates",
    "keys",
    "head",
    "heads",
    "outputs",
    "inner",
    "experts",
    "expert_inner",
    "shared_inner",
    "hidden",
    "vocabulary",
    "one",
    "query_rank",
    "key_rank",
    "key_rank_and_rotary",
    "keys_and_values",
    "linear_keys",
    "linear_values",
    "linear_projections",
    "linear_heads",
    "linear_gates",
    "linear_head",
    "taps",
    "vision_hidden",
    "vision_qkv",
    "vision_inner",
    "vision_square",
    "vision_places",
    "colors",
    "frames",
    "patch",
]
Sizes = Mapping[Size, int]
# Every rank holds all, or its share of rows or of columns. Rows of the vocabulary are padded as a
# whole, other sizes so that every rank's share is a multiple. A bias that ranks of the engine sum
# with their shares of a product is whole on the first one, and zeros on the others.
Split = Literal["whole", "rows", "columns", "vocabulary", "first"]

EMBEDDING = "model.embed_tokens.weight"
TOWER = "vision."  # beginning of our names of a vision tower's parameters
HF_TOWER = "visual."  # the same of its tensors' names
OUTPUT_LAYER = "lm_head.weight"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_OF_TOWER = re.compile(r"vision\.(?:(\w+)\.(\d+)\.)?(.+)")
_EXPERT = re.compile(r"(?<=experts\.)(\d+)(?=\.)")


class Architecture(Protocol):
    """What a family's tables need to know of one model of it."""

    @property
    def num_hidden_layers(self) -> int:
        """The number of layers."""

    @property
    def num_routed_experts(self) -> int:
        """The number of experts that tokens are routed to, in each layer that has any."""

    @property
    def tie_word_embeddings(self) -> bool:
        """True if the output layer is the embedding."""

    @property
    def tower_parts(self) -> Mapping[str, int]:
        """Numbers of the blocks and further mergers of a vision tower that is trained; else none.

        They come by the name of their list.
        """

    def is_sparse(self, layer: int) -> bool:
        """True if a layer's MLP are experts."""

    def kind_of(self, layer: int) -> str:
        """Kind of a layer's attention, by its name in config.json's ``layer_types``."""


@dataclass(frozen=True, slots=True)
class HfTensor:
    """One tensor of a Hugging Face folder, and how SGLang pads it with zeros."""

    name: str
    shape: tuple[Size, ...]
    row_multiple: int = 1  # rows are padded to a multiple of it
    column_multiple: int = 1
    # Rows of further matrices below the first one's, each split and padded by itself.
    below: tuple[Size, ...] = ()
    is_interleaved: bool = False  # rows of its matrices follow each other in turn
    # Tensor with as many columns as the last of them has rows; else all have as many.
    last_like: str = ""
    engine_name: str = ""  # name in the engine, if not all tensors of the parameter have one
    dtype: Literal["model", "float32"] = "model"  # dtype in which it is kept and published
    expert: int | None = None  # expert of the matrix, if the tensor has those of all of a layer
    is_transposed: bool = False  # stored as columns and rows

    def shape_of_one(self, sizes: Sizes) -> tuple[int, ...]:
        """Return its shape in a model of these sizes, of one expert."""
        return (sum(self.blocks(sizes)), *(sizes[size] for size in self.shape[1:]))

    def whole_shape(self, sizes: Sizes) -> tuple[int, ...]:
        """Return its shape in a folder, of all experts that it has."""
        shape = self.shape_of_one(sizes)
        shape = shape[::-1] if self.is_transposed else shape
        return shape if self.expert is None else (sizes["experts"], *shape)

    def blocks(self, sizes: Sizes) -> tuple[int, ...]:
        """Return the rows of its matrices, from the first to the last."""
        return tuple(sizes[size] for size in (self.shape[0], *self.below))


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of Megatron-Core's GPT model and the Hugging Face tensors that it holds.

    ``copy`` is one tensor as it is; ``vocab`` is one tensor whose rows were padded; the others are
    several tensors (or one of several matrices) fused along the first dimension: ``gate_up`` one
    after the other, ``qkv`` and ``delta`` by the heads of keys, each with its rows of every matrix.
    SGLang keeps fused tensors one after the other, under the name ``engine_name``.
    """

    kind: FusionKind
    tensors: tuple[HfTensor, ...]
    engine_name: str = ""
    # Split of its tensors under tensor parallelism; None is the kind's usual one: readers of the
    # hidden state by rows, writers of it by columns.
    divided: Split | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its tensors."""
        return tuple(tensor.name for tensor in self.tensors)

    @property
    def split(self) -> Split:
        """Split of its tensors under tensor parallelism."""
        if self.divided is not None:
            return self.divided
        match self.kind:
            case "vocab":
                return "vocabulary"
            case "qkv" | "delta" | "gate_up":
                return "rows"
            case _:
                is_whole = len(self.tensors[0].shape) == 1 or "experts" in self.tensors[0].shape
                return "whole" if is_whole else "columns"

    def in_layer(self, prefix: str, expert: str = "") -> "Parameter":
        """Return the parameter of one layer, whose tensors begin with ``prefix``, of an expert."""
        tensors = tuple(
            replace(
                tensor,
                name=prefix + tensor.name.replace("*", expert),
                expert=None if tensor.expert is None else int(expert),
            )
            for tensor in self.tensors
        )
        engine_name = prefix + self.engine_name if self.engine_name else ""
        return replace(self, tensors=tensors, engine_name=engine_name)


Table = Mapping[str, Parameter]


@dataclass(frozen=True, slots=True)
class OptionalTable:
    """Parameters of every layer of a model whose config.json sets a key, or does not."""

    key: str
    is_set: bool
    layer: Table

    def holds(self, architecture: object) -> bool:
        """True of a model with these parameters."""
        return bool(getattr(architecture, self.key)) is self.is_set


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What layers of a kind have, by the kind's name in config.json's ``layer_types``."""

    layer: Table = field(default_factory=dict)  # parameters besides those of every layer
    has_window: bool = False  # a token attends to the last ``sliding_window`` tokens alone
    is_linear: bool = False  # gated delta network in the place of attention


@dataclass(frozen=True, slots=True)
class Activation:
    """Gated activation: gate * sigmoid(slope * gate) * (up + offset)."""

    slope: float = 1.0
    offset: float = 0.0
    is_limited: bool = False  # gates to ``swiglu_limit`` at most, ups to it either way


@dataclass(frozen=True, slots=True)
class RouterTraits:
    """How the family chooses a token's experts and weighs them."""

    score: Literal["softmax", "sigmoid"] = "softmax"
    has_bias: bool = False  # bias that is added to scores for the choice alone
    # What the experts of a group are worth, where only experts of the best groups are chosen.
    group_score: Literal["best", "two best"] = "two best"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """A vision tower: blocks over the patches of an image, and mergers of patches into tokens.

    Its tensors are whole on every rank that has it.
    """

    ends: Table  # before and after the blocks, by the names of Hugging Face within the tower
    lists: Mapping[str, Table]  # parameters of the blocks and of other lists, by the list's name
    config: Mapping[str, object]  # values of absent keys of config.json's vision_config
    fixed: Mapping[str, object]  # keys there that must have these values, or be absent
    # Channels that turn by rows and columns of an image follow in sections, or in turn.
    interleaves_axes: bool
    axes: tuple[int, int, int]  # usual number of channels that turn by frame, row and column

    def parameter(self, name: str) -> Parameter:
        """Return the contents of a parameter, by its name in the whole model.

        Raises:
            KeyError: the tower has no such parameter.
        """
        found = _OF_TOWER.fullmatch(name)
        if found is None:
            raise KeyError(name)
        part, number, inner = found.groups()
        if part in self.lists:
            return self.lists[part][inner].in_layer(f"{HF_TOWER}{part}.{number}.")
        return self.ends[name.removeprefix(TOWER)].in_layer(HF_TOWER)

    def parameters(self, parts: Mapping[str, int]) -> Iterator[tuple[str, Parameter]]:
        """Yield the name and the contents of every parameter of a tower with so many parts."""
        for name in self.ends:
            yield TOWER + name, self.parameter(TOWER + name)
        for part, count in parts.items():
            for number in range(count):
                for inner in self.lists[part]:
                    name = f"{TOWER}{part}.{number}.{inner}"
                    yield name, self.parameter(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A decoder with rotary embeddings and a gated MLP or experts."""

    model_type: str  # model_type in config.json
    models: str  # names of models, for people
    # Keys of config.json that must have these values, or be absent.
    config: Mapping[str, object] = field(default_factory=dict)
    layer: Table  # parameters of every layer, by Megatron's name within it
    mlp: Table  # parameters of a layer without experts
    sparse: Table = field(default_factory=dict)  # parameters of a layer with experts
    kinds: Mapping[str, LayerKind] = field(default_factory=lambda: {FULL_ATTENTION: LayerKind()})
    options: tuple[OptionalTable, ...] = ()
    ends: Table  # before and after the layers, by Megatron's name
    keys: frozenset[str] = frozenset()  # further keys of config.json that it reads
    renamed: Mapping[str, str] = field(default_factory=dict)  # keys of config.json to those of all
    defaults: Mapping[str, object] = field(default_factory=dict)  # values of absent keys
    # model_type of a config.json with pictures, whose text_config is a model of this family.
    wrapped_by: str = ""
    tower: Tower | None = None  # vision tower; without one pictures are not seen
    further: str = ""  # beginning of the names of layers that predict further tokens
    # Keys that change nothing that is computed here: of training, of other heads, of kernels.
    ignored: frozenset[str] = frozenset()
    megatron: Mapping[str, object] = field(default_factory=dict)  # more of TransformerConfig
    router: RouterTraits = RouterTraits()
    activation: Activation = Activation()  # activation of experts
    is_latent: bool = False  # attention's keys and values are compressed (MLA)
    gates_attention: bool = False  # attention's output passes a gate, computed with the queries
    centres_norms: bool = False  # norms multiply by 1 + weight, but for those of a gated output
    turns_pairs: bool = False  # rotary embeddings turn neighbors, not a channel of each half
    has_dp_attention: bool = False  # SGLang can split its attention over fewer ranks than its MLP

    @property
    def has_experts(self) -> bool:
        """True if some of its MLPs are experts, each token with its own."""
        return bool(self.sparse)

    @property
    def stacks_experts(self) -> bool:
        """True if the matrices of all experts of a layer are one tensor in a folder."""
        tensors = (tensor for each in self.sparse.values() for tensor in each.tensors)
        return any(tensor.expert is not None for tensor in tensors)

    def layer_of(self, architecture: Architecture, number: int) -> dict[str, Parameter]:
        """Return the parameters of one layer of a model, by Megatron's name within it."""
        table = dict(self.layer)
        for option in self.options:
            if option.holds(architecture):
                table |= option.layer
        table |= self.kinds[architecture.kind_of(number)].layer
        return table | dict(self.sparse if architecture.is_sparse(number) else self.mlp)

    def layers_of(
        self, architecture: Architecture, numbers: Iterable[int]
    ) -> Iterator[tuple[dict[str, Parameter], int]]:
        """Yield the parameters of each kind of layer among these, and how many there are of it."""
        alike: defaultdict[tuple[str, bool], list[int]] = defaultdict(list)
        for number in numbers:
            alike[architecture.kind_of(number), architecture.is_sparse(number)].append(number)
        for same in alike.values():
            yield self.layer_of(architecture, same[0]), len(same)

    def tables(self) -> Iterator[Table]:
        """Yield all its tables: what any of its models may hold."""
        yield from (self.ends, self.layer, self.mlp, self.sparse)
        yield from (option.layer for option in self.options)
        yield from (kind.layer for kind in self.kinds.values())

    def parameter(self, megatron_name: str, *, tied_embeddings: bool) -> Parameter:
        """Return the contents of the named parameter of Megatron's model.

        Raises:
            KeyError: the family has no such parameter.
        """
        if tied_embeddings and megatron_name == "output_layer.weight":
            return self.ends["embedding.word_embeddings.weight"]
        if self.tower is not None and megatron_name.startswith(TOWER):
            return self.tower.parameter(megatron_name)
        if megatron_name in self.ends:
            return self.ends[megatron_name]
        found = _LAYER.fullmatch(megatron_name)
        name, expert = without_expert(found[2]) if found is not None else ("", "")
        for table in self.tables():
            if found is not None and name in table and table is not self.ends:
                return table[name].in_layer(f"model.layers.{found[1]}.", expert)
        raise KeyError(megatron_name)

    def parameters(self, architecture: Architecture) -> Iterator[tuple[str, Parameter]]:
        """Yield Megatron's name and the contents of every parameter of a whole model."""
        for name, parameter in self.ends.items():
            if not (architecture.tie_word_embeddings and name == "output_layer.weight"):
                yield name, parameter
        if self.tower is not None and architecture.tower_parts:
            yield from self.tower.parameters(architecture.tower_parts)
        for layer in range(architecture.num_hidden_layers):
            for name, parameter in self.layer_of(architecture, layer).items():
                for number in range(architecture.num_routed_experts if "*" in name else 1):
                    whole = f"decoder.layers.{layer}.{name.replace('*', str(number))}"
                    yield whole, parameter.in_layer(f"model.layers.{layer}.", str(number))

    def num_parameters(self, architecture: Architecture, sizes: Sizes) -> int:
        """Return the elements of all tensors of a model of these sizes."""

        def elements(parameters: Table) -> int:
            return sum(
                math.prod(tensor.shape_of_one(sizes)) * (sizes["experts"] if "*" in name else 1)
                for name, parameter in parameters.items()
                if not (architecture.tie_word_embeddings and name == "output_layer.weight")
                for tensor in parameter.tensors
            )

        layers = self.layers_of(architecture, range(architecture.num_hidden_layers))
        total = sum(count * elements(layer) for layer, count in layers) + elements(self.ends)
        if self.tower is not None and architecture.tower_parts:
            total += elements(dict(self.tower.parameters(architecture.tower_parts)))
        return total


def without_expert(name: str) -> tuple[str, str]:
    """Return a name with ``*`` for the number of its expert, and that number."""
    found = _EXPERT.search(name)
    return (_EXPERT.sub("*", name), found[1]) if found is not None else (name, "")


# ---- pieces of tables ---------------------------------------------------------

# SGLang pads the vocabulary to a multiple of 64, and on a CPU the MLP's inner size to one of 32.
_VOCABULARY_MULTIPLE = 64
INNER_MULTIPLE = 32


def copy(name: str, *shape: Size, divided: Split | None = None) -> Parameter:
    """Return a parameter that is one tensor."""
    return Parameter("copy", (HfTensor(name, shape),), divided=divided)


def _vocabulary(name: str) -> Parameter:
    tensor = HfTensor(name, ("vocabulary", "hidden"), row_multiple=_VOCABULARY_MULTIPLE)
    return Parameter("vocab", (tensor,))


def tower_table(shapes: Mapping[str, tuple[Size, ...]]) -> Table:
    """Return parameters of a vision tower, by the names of their tensors.

    They are whole on ranks of the learner, and divided over those of an engine.
    """
    return {name: _of_tower(name, *shape) for name, shape in shapes.items()}


# Tensors that an engine divides by rows, or by columns, and one whose rows it pads.
_BY_ROWS = ("attn.qkv", "gate_proj", "up_proj", "linear_fc1", "merger.mlp.0")
_BY_COLUMNS = ("attn.proj", "down_proj", "linear_fc2", "merger.mlp.2")
_PLACES = "pos_embed"


def _of_tower(name: str, *shape: Size) -> Parameter:
    owner, _, kind = name.rpartition(".")
    split: Split = "whole"
    if owner.endswith(_BY_ROWS):
        split = "rows"
    elif owner.endswith(_BY_COLUMNS) and kind == "weight":
        split = "columns"
    elif owner == _PLACES:
        split = "vocabulary"
    engine_name = name.replace("attn.qkv.", "attn.qkv_proj.")
    for part in ("gate_proj", "up_proj"):
        engine_name = engine_name.replace(f"mlp.{part}.", "mlp.gate_up_proj.")
    rows = INNER_MULTIPLE if shape[0] == "vision_inner" else 1
    columns = INNER_MULTIPLE if shape[-1] == "vision_inner" and len(shape) > 1 else 1
    tensor = HfTensor(
        name,
        shape,
        row_multiple=_VOCABULARY_MULTIPLE if owner == _PLACES else rows,
        column_multiple=columns,
        engine_name=engine_name,
    )
    return Parameter("copy", (tensor,), divided=split)


def _qkv(kind: Literal["weight", "bias"], *rest: Size) -> Parameter:
    tensors = (
        HfTensor(f"self_attn.q_proj.{kind}", ("queries", *rest)),
        HfTensor(f"self_attn.k_proj.{kind}", ("keys", *rest)),
        HfTensor(f"self_attn.v_proj.{kind}", ("keys", *rest)),
    )
    return Parameter("qkv", tensors, f"self_attn.qkv_proj.{kind}")


def gate_up(gate: str, up: str, engine_name: str, inner: Size = "inner") -> Parameter:
    """Return the two projections that a gated MLP reads its input with."""
    shape: tuple[Size, ...] = (inner, "hidden")
    tensors = tuple(HfTensor(name, shape, row_multiple=INNER_MULTIPLE) for name in (gate, up))
    return Parameter("gate_up", tensors, engine_name)


def stacked(
    name: str,
    engine_name: str,
    rows: Size,
    *columns: Size,
    below: tuple[Size, ...] = (),
    divided: Split | None = None,
) -> Parameter:
    """Return an expert's part of a tensor that has all experts of a layer.

    Matrices are stored as columns and rows. Two matrices below each other are a gate and its up,
    whose rows are stored in turn.
    """
    tensor = HfTensor(
        name,
        (rows, *columns),
        row_multiple=2 * INNER_MULTIPLE if below else 1,
        column_multiple=INNER_MULTIPLE if "expert_inner" in columns else 1,
        below=below,
        is_interleaved=bool(below),
        expert=0,
        is_transposed=bool(columns),
    )
    return Parameter("gate_up" if below else "copy", (tensor,), engine_name, divided)


def down(name: str, engine_name: str = "", inner: Size = "inner") -> Parameter:
    """Return the projection that an MLP writes its output with."""
    tensor = HfTensor(name, ("hidden", inner), column_multiple=INNER_MULTIPLE)
    return Parameter("copy", (tensor,), engine_name)


def mlp(prefix: str, megatron: str, inner: Size = "inner") -> dict[str, Parameter]:
    """Return a gated MLP under the usual names."""
    return {
        f"{megatron}.linear_fc1.weight": gate_up(
            f"{prefix}.gate_proj.weight",
            f"{prefix}.up_proj.weight",
            f"{prefix}.gate_up_proj.weight",
            inner,
        ),
        f"{megatron}.linear_fc2.weight": down(f"{prefix}.down_proj.weight", inner=inner),
    }


def experts(
    prefix: str, gate: str = "gate_proj", up: str = "up_proj", output: str = "down_proj"
) -> dict[str, Parameter]:
    """Return a router and its experts, whose tensors begin with ``prefix``."""
    each = f"{prefix}.experts.*"
    return {
        "mlp.router.weight": copy(f"{prefix}.gate.weight", "experts", "hidden"),
        "mlp.experts.local_experts.*.linear_fc1.weight": gate_up(
            f"{each}.{gate}.weight",
            f"{each}.{up}.weight",
            f"{prefix}.experts.w13_weight",
            "expert_inner",
        ),
        "mlp.experts.local_experts.*.linear_fc2.weight": down(
            f"{each}.{output}.weight", f"{prefix}.experts.w2_weight", "expert_inner"
        ),
    }


ENDS: Table = {
    "embedding.word_embeddings.weight": _vocabulary(EMBEDDING),
    "output_layer.weight": _vocabulary(OUTPUT_LAYER),
    "decoder.final_layernorm.weight": copy("model.norm.weight", "hidden"),
}
NORMS: Table = {
    "input_layernorm.weight": copy("input_layernorm.weight", "hidden"),
    "pre_mlp_layernorm.weight": copy("post_attention_layernorm.weight", "hidden"),
}
GROUPED_ATTENTION: Table = {
    **NORMS,
    "self_attention.linear_qkv.weight": _qkv("weight", "hidden"),
    "self_attention.linear_proj.weight": copy("self_attn.o_proj.weight", "hidden", "outputs"),
}
QKV_BIAS: Table = {"self_attention.linear_qkv.bias": _qkv("bias")}
QK_NORM: Table = {
    "self_attention.q_layernorm.weight": copy("self_attn.q_norm.weight", "head"),
    "self_attention.k_layernorm.weight": copy("self_attn.k_norm.weight", "head"),
}
MLP: Table = mlp("mlp", "mlp")
EXPERTS: Table = experts("mlp")
ROUTER_BIAS: Table = {
    "mlp.router.correction_bias": Parameter(
        "copy", (HfTensor("mlp.gate.e_score_correction_bias", ("experts",), dtype="float32"),)
    )
}
SHARED_EXPERTS: Table = mlp("mlp.shared_experts", "mlp.shared_experts", "shared_inner")
