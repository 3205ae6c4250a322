"""Tensors of a model folder, read from the headers of its safetensors files."""

import math
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from slipstream.weightbus.agent.weight_files import Shapes, tensor_shapes
from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.manifest import ITEM_BYTES, WeightManifest

_OPTIONAL = {"lm_head.weight"}


@dataclass(frozen=True, slots=True)
class TensorSet:
    """Tensors of an engine's model: shapes by Hugging Face name, and the type of all."""

    shapes: Shapes
    dtype: str  # as in float32

    @property
    def num_bytes(self) -> int:
        """Size of all tensors."""
        return sum(map(math.prod, self.shapes.values())) * ITEM_BYTES[self.dtype]


def model_tensors(folder: Path, *, dtype: str) -> TensorSet:
    """Return the tensors of an engine that was started from a Hugging Face folder.

    ``dtype`` is the engine's; files may have another.

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
    return TensorSet(shapes, dtype)


def mismatch(manifest: WeightManifest, expected: TensorSet) -> str:
    """Describe a manifest's difference from the model's tensors; empty if there is none.

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
        if spec.dtype != expected.dtype:
            return (
                f"{name} has type {spec.dtype}, the engine {expected.dtype} "
                "(learner.dtype, generators.dtype)"
            )
    return ""
