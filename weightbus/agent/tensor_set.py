"""Tensors of a model folder, read from the headers of its safetensors files."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from slipstream.weightbus.agent.weight_files import Shapes, tensor_shapes
from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.manifest import ITEM_BYTES, WeightManifest
from slipstream.wire.models.families.registry import SCALE_SUFFIX, engine_tensor, layer_of

_OPTIONAL = {"lm_head.weight"}


@dataclass(frozen=True, slots=True)
class TensorSet:
    """Tensors of an engine's model: shapes by Hugging Face name, and the type of all."""

    shapes: Shapes
    dtype: str  # example: float32

    @property
    def num_bytes(self) -> int:
        """Size of all tensors."""
        return sum(map(math.prod, self.shapes.values())) * ITEM_BYTES[self.dtype]


def model_tensors(folder: Path, *, dtype: str) -> TensorSet:
    """Return the tensors of an engine that was started from a Hugging Face folder.

    ``dtype`` is the engine's; files may have another, with scales. Layers that predict further
    tokens do not belong to the policy.

    Raises:
        ConfigError: the folder has no safetensors file, or one that cannot be read.
    """
    shapes: Shapes = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            shapes |= tensor_shapes(path)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"cannot read {path} (run.model): {error}") from error
    if not shapes:
        raise ConfigError(f"no safetensors files in {folder} (run.model)")
    layers = _number_of_layers(folder)
    own = {
        name: shape
        for name, shape in shapes.items()
        if not name.endswith(SCALE_SUFFIX) and layer_of(name) < layers
    }
    return TensorSet(own, dtype)


def _number_of_layers(folder: Path) -> float:
    """Return the number of a policy's layers; infinity if no layers predict further tokens."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
        if config.get("num_nextn_predict_layers") or config.get("num_mtp_layers"):
            return int(config["num_hidden_layers"])
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return math.inf  # the engine reports what is wrong with it
    return math.inf


def mismatch(manifest: WeightManifest, expected: TensorSet) -> str:
    """Describe a manifest's difference from the model's tensors; empty if they agree.

    A tied output layer may be left out or sent.
    """
    shapes = expected.shapes
    offered = {spec.name: spec for spec in manifest.tensors}
    if len(offered) != len(manifest.tensors):
        return "manifest names a tensor twice"
    missing = sorted(shapes.keys() - offered.keys() - _OPTIONAL)
    surplus = sorted(offered.keys() - shapes.keys() - _OPTIONAL)
    if missing or surplus:
        return f"manifest lacks {missing[:3]} and has unknown {surplus[:3]}"
    for name, spec in offered.items():
        if name in shapes and shapes[name] != spec.shape:
            return f"{name} has shape {spec.shape}, the model has {shapes[name]}"
        kept = engine_tensor(name).dtype
        dtype = expected.dtype if kept == "model" else kept
        if spec.dtype != dtype:
            return (
                f"{name} has type {spec.dtype}, the engine {dtype} "
                "(learner.dtype, generators.dtype)"
            )
    return ""
