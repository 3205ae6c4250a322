"""Low-rank adapters as PEFT names and describes them; a folder of its has two files.

``adapter_config.json`` has the rank, alpha and targets; ``adapter_model.safetensors`` has A and B
of every layer.
"""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from slipstream.wire.errors import ConfigError
from slipstream.wire.models.families.tables import Family
from slipstream.wire.unreadable import UNREADABLE

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
_WEIGHT = ".weight"
_MOST_ALPHA = 1e6
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
    "target_parameters": None,
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


def layer_of(tensor: str) -> str:
    """Return the last part of the name of a weight's module, such as q_proj."""
    return module_of(tensor).rpartition(".")[2]


def peft_names(tensor: str) -> tuple[str, str]:
    """Return PEFT's names of A and B of a weight, by its Hugging Face name."""
    module = _PREFIX + module_of(tensor)
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def adapter_shapes(
    weights: Mapping[str, tuple[int, ...]], facts: AdapterFacts
) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of all A [r, I] and B [O, r], from those of a model's weights."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in weights.items():
        if name.endswith(_WEIGHT) and layer_of(name) in facts.targets and len(shape) == 2:
            a, b = peft_names(name)
            shapes[a], shapes[b] = (facts.rank, shape[1]), (shape[0], facts.rank)
    return shapes


def check_targets(family: Family, targets: Collection[str]) -> None:
    """Refuse targets without a layer that can have an adapter.

    That is one which tensor parallelism splits, and which is one tensor in Hugging Face's model: no
    expert, and nothing of latent attention.

    Raises:
        ConfigError: naming them and those there are.
    """
    if targets and family.is_latent:
        raise ConfigError(
            f"lora.rank cannot be set for {family.model_type}: latent attention has no adapters"
        )
    layers, others = set[str](), set[str]()
    for name, parameter in (item for table in family.tables() for item in table.items()):
        is_mixed = parameter.kind == "delta" or any(tensor.below for tensor in parameter.tensors)
        can = "*" not in name and parameter.split in {"rows", "columns"} and not is_mixed
        for tensor in parameter.tensors:
            if tensor.name.endswith(_WEIGHT) and len(tensor.shape) == 2:
                (layers if can else others).add(layer_of(tensor.name))
    allowed = ", ".join(sorted(layers - others))
    for target in targets:
        if target in others and target in layers:
            raise ConfigError(
                f"lora.targets names {target}, which {family.model_type} has in its experts, and "
                f"experts have no adapters: expected some of {allowed}"
            )
        if target not in layers - others:
            raise ConfigError(
                f"lora.targets names {target}, and {family.model_type} has no such linear layer "
                f"that can have an adapter: expected some of {allowed}"
            )


def adapter_config(facts: AdapterFacts, base_model: str) -> bytes:
    """Return the content of adapter_config.json."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": facts.rank,
        "lora_alpha": facts.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(facts.targets),
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
    if difference := _facts(path, config).difference(here):
        raise ConfigError(
            f"{folder} (lora.adapter) holds another adapter than the settings ask for: {difference}"
        )


def _facts(path: Path, config: Mapping[str, Any]) -> AdapterFacts:
    targets = config.get("target_modules")
    if config.get("peft_type") != "LORA" or not isinstance(targets, list):
        raise ConfigError(
            f"{path} must have peft_type = LORA and a list of target_modules, got "
            f"{config.get('peft_type')!r} and {targets!r} (lora.adapter)"
        )
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
        targets=tuple(sorted(map(str, targets))),
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise ConfigError(f"cannot read {path} (lora.adapter): {error.strerror}") from error
    except UNREADABLE as error:
        raise ConfigError(f"{path} is no such file of PEFT's (lora.adapter): {error}") from error


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
