"""Low-rank adapters as PEFT names and describes them; a folder of its has two files.

``adapter_config.json`` has the rank, alpha and targets; ``adapter_model.safetensors`` has A and B
of every layer.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from slipstream.wire.errors import ConfigError
from slipstream.wire.models.hf_config import HfConfig
from slipstream.wire.unreadable import UNREADABLE

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
_WEIGHT = ".weight"
_MOST_ALPHA = 1e6
_STACKED = 3  # dimensions of a tensor that has the matrices of all experts of a layer
_OF_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.(lora_[AB])\.weight")
_STACKS = ("gate_up_proj", "down_proj")  # such tensors of a module, in the order of its parameters
# Names of Mixtral's projections that SGLang gives the names of other families.
ENGINE_TARGETS: Mapping[str, str] = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_PREFIX = "base_model.model."  # prefix of the model inside of PEFT's
# What a folder may hold instead of plain adapters, with the value that means none.
_PLAIN: Mapping[str, object] = {
    "use_rslora": False,
    "use_dora": False,
    "fan_in_fan_out": False,
    "use_qalora": False,
    "lora_bias": False,
    "bias": "none",
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": None,
    "layers_to_transform": None,
    "layer_replication": None,
    "exclude_modules": None,
    "alora_invocation_tokens": None,
    "arrow_config": None,
    "trainable_token_indices": None,
}


class AdapterFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What gives adapters their meaning."""

    rank: int
    alpha: float
    targets: tuple[str, ...]  # sorted
    base: str = ""  # hash of the weights that they are added to

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return self.alpha / self.rank

    @property
    def of_engine(self) -> "AdapterFacts":
        """The same by the names that SGLang gives the targets."""
        named = (ENGINE_TARGETS.get(target, target) for target in self.targets)
        return msgspec.structs.replace(self, targets=tuple(sorted(named)))

    def difference(self, here: "AdapterFacts") -> str:
        """Return the first setting that is not as here, with both values; empty if none."""
        pairs = {
            "rank": (self.rank, here.rank),
            "alpha": (self.alpha, here.alpha),
            "targets": (list(self.targets), list(here.targets)),
        }
        for name, (theirs, ours) in pairs.items():
            if theirs != ours:
                return f"lora.{name} is {theirs} there and {ours} here"
        return ""


def module_of(tensor: str) -> str:
    """Return the module of a weight by its Hugging Face name."""
    return tensor.removesuffix(_WEIGHT)


def is_target(tensor: str, targets: Collection[str]) -> bool:
    """True if a tensor is the weight of a target, by the end of its module's name, as in PEFT."""
    module = "." + module_of(tensor)
    return any(module.endswith(f".{target}") for target in targets)


def peft_names(tensor: str) -> tuple[str, str]:
    """Return PEFT's names of A and B of a weight, by its Hugging Face name."""
    module = _PREFIX + module_of(tensor)
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def peft_names_of(tensor: str, facts: AdapterFacts) -> tuple[str, str]:
    """Return PEFT's names of A and B of a weight, or of a tensor with those of all experts."""
    is_stack = not tensor.endswith(_WEIGHT)
    return peft_names(_stack_module(tensor, facts.targets) if is_stack else tensor)


def adapter_shapes(
    weights: Mapping[str, tuple[int, ...]], facts: AdapterFacts
) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of all A [r, I] and B [O, r], from those of a model's weights.

    For a tensor with the matrices of E experts they are [E r, I] and [O, r E].
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in weights.items():
        if not is_target(name, facts.targets):
            continue
        *experts, columns, rows = shape if len(shape) == _STACKED else reversed(shape)
        rank = facts.rank * (experts[0] if experts else 1)
        a, b = peft_names_of(name, facts)
        shapes[a], shapes[b] = (rank, columns), (rows, rank)
    return shapes


def _stack_module(tensor: str, targets: Collection[str]) -> str:
    """Return the module under whose name PEFT keeps adapters of a tensor of all experts.

    Of two tensors of a module the adapters of the second are around those of the first.
    """
    module, _, name = tensor.rpartition(".")
    is_within = name == _STACKS[0] and is_target(f"{module}.{_STACKS[1]}", targets)
    return f"{module}.base_layer" if is_within else module


def target_layers(hf: HfConfig) -> set[str]:
    """Return the names of all weights that can have an adapter, by what follows a layer's number.

    They are those of all linear layers but routers, gates of shared experts and the output layer;
    ``*`` is the number of an expert.
    """
    tables = (table for table, _ in hf.family.layers_of(hf, range(hf.num_hidden_layers)))
    return {
        tensor.name
        for table in tables
        for name, parameter in table.items()
        if name.endswith(_WEIGHT) and ".router." not in name
        for tensor in parameter.tensors
        if len(tensor.shape) == 2
    }


def check_targets(hf: HfConfig, targets: Collection[str]) -> None:
    """Refuse targets without a layer that can have an adapter.

    Raises:
        ConfigError: naming them and those there are.
    """
    layers = target_layers(hf)
    allowed = ", ".join(sorted({module_of(layer).rpartition(".")[2] for layer in layers}))
    for target in targets:
        if not any(is_target(layer, (target,)) for layer in layers):
            raise ConfigError(
                f"lora.targets names {target}, and {hf.family.model_type} has no such linear layer "
                f"that can have an adapter: expected some of {allowed}"
            )


def stacked_targets(hf: HfConfig) -> list[str]:
    """Return the ends of the names of tensors that have the weights of all experts of a layer."""
    return sorted(layer for layer in target_layers(hf) if not layer.endswith(_WEIGHT))


def adapter_config(facts: AdapterFacts, base_model: str, stacks: Collection[str] = ()) -> bytes:
    """Return the content of adapter_config.json; ``stacks`` are those of ``stacked_targets``."""
    parameters = [stack for stack in stacks if is_target(stack, facts.targets)]
    modules = [
        target
        for target in facts.targets
        if not any(is_target(stack, (target,)) for stack in parameters)
    ]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": facts.rank,
        "lora_alpha": facts.alpha,
        "lora_dropout": 0.0,
        "target_modules": modules,
        **({"target_parameters": parameters} if parameters else {}),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }
    return msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n"


def refuse_other_adapter(folder: Path, here: AdapterFacts) -> None:
    """Compare the PEFT folder that a run starts from (lora.adapter) with the run's settings.

    Raises:
        ConfigError: it is no such folder, or holds adapters of another rank, scale or place, or of
            another kind.
    """
    path = folder / CONFIG
    config = _read(path)
    for name, plain in _PLAIN.items():
        if config.get(name, plain) not in (plain, None):
            raise ConfigError(
                f"{path} has {name} = {config[name]!r}: only plain adapters can be trained on "
                "(lora.adapter)"
            )
    if difference := _facts(path, config, here.targets).difference(here):
        raise ConfigError(
            f"{folder} (lora.adapter) holds another adapter than the settings ask for: {difference}"
        )


def _facts(path: Path, config: Mapping[str, Any], here: Collection[str]) -> AdapterFacts:
    targets, stacks = config.get("target_modules"), config.get("target_parameters") or []
    is_plain = config.get("peft_type") == "LORA" and isinstance(stacks, list)
    if not is_plain or not isinstance(targets, list):
        raise ConfigError(
            f"{path} must have peft_type = LORA and a list of target_modules, got "
            f"{config.get('peft_type')!r} and {targets!r} (lora.adapter)"
        )
    of_stacks = {str(name).rpartition(".")[2] for name in stacks}
    if _STACKS[0] in of_stacks - {*here}:  # experts here have gate and up apart
        of_stacks = of_stacks - {_STACKS[0]} | {"gate_proj", "up_proj"}
    rank, alpha = config.get("r"), config.get("lora_alpha")
    is_whole = isinstance(rank, int) and not isinstance(rank, bool)
    is_number = isinstance(alpha, int | float) and abs(alpha) <= _MOST_ALPHA
    if not (is_whole and is_number):
        raise ConfigError(
            f"{path} must have a whole r, and a lora_alpha of at most {_MOST_ALPHA:g}, got "
            f"{rank!r} and {alpha!r} (lora.adapter)"
        )
    return AdapterFacts(
        rank=config["r"],
        alpha=float(config["lora_alpha"]),
        targets=tuple(sorted({*map(str, targets), *of_stacks})),
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise ConfigError(f"cannot read {path} (lora.adapter): {error.strerror}") from error
    except UNREADABLE as error:
        raise ConfigError(f"{path} is no such file of PEFT's (lora.adapter): {error}") from error


class AdapterSource(msgspec.Struct, frozen=True):
    """Place of a tensor of adapters in a PEFT folder."""

    name: str
    expert: int | None = None  # expert of the matrix, if the tensor has those of all of a layer
    half: int | None = None  # half of its rows, if they are of gate and up

    def shape(self, stored: tuple[int, ...], rank: int) -> tuple[int, ...]:
        """Return the shape of the matrix in a tensor of this shape; empty if it is not there."""
        if self.expert is None:
            return stored
        is_a = "lora_A" in self.name
        rows, columns = stored if len(stored) == 2 else (0, 0)
        if self.expert * rank >= (rows if is_a else columns):
            return ()
        return (rank, columns) if is_a else (rows // (1 if self.half is None else 2), rank)


def adapter_sources(
    found: Collection[str], expected: Collection[str], targets: Collection[str]
) -> dict[str, AdapterSource]:
    """Return the places of tensors in a PEFT folder that has these names.

    Its adapters of experts may be of tensors that have all experts of a layer, of gate and up
    together: A of both is the same then. Names that nothing is expected of come by themselves.
    """
    sources = {name: AdapterSource(name) for name in found}
    used = set[str]()
    for name in expected:
        part = _OF_EXPERT.fullmatch(name)
        if name in sources or part is None:
            continue
        module, expert, projection, matrix = part.groups()
        is_within = projection != "down" and is_target(f"{module}.{_STACKS[1]}", targets)
        stored = f"{module}{'.base_layer' * is_within}.{matrix}.weight"
        if stored in found:
            half = ("gate", "up").index(projection) if projection != "down" else None
            sources[name] = AdapterSource(stored, int(expert), half)
            used.add(stored)
    return {name: source for name, source in sources.items() if name not in used}


def refuse_other_tensors(
    found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], folder: Path
) -> None:
    """Compare the tensors of a PEFT folder with those of the adapters to fill.

    Raises:
        ConfigError: one is missing, surplus or has another shape.
    """
    for name, shape in expected.items():
        if name not in found:
            raise ConfigError(f"{folder} holds no tensor {name} (lora.adapter)")
        if found[name] != shape:
            raise ConfigError(
                f"{folder}: tensor {name} must have shape {list(shape)}, got {list(found[name])} "
                "(lora.adapter)"
            )
    if left := _first(found.keys() - expected.keys()):
        raise ConfigError(f"{folder} holds {left}, which run.model has no layer for (lora.adapter)")


def _first(names: Iterable[str]) -> str:
    return min(names, default="")
