"""Tensors of a model folder, read from the headers of its safetensors files."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from safetensors import SafetensorError

from slipstream.weightbus.agent.weight_files import Shapes, tensor_shapes
from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.manifest import TensorSpec, WeightManifest
from slipstream.wire.models.families.registry import SCALE_SUFFIX, engine_tensor
from slipstream.wire.models.families.tables import HF_TOWER
from slipstream.wire.models.fp8 import quantized
from slipstream.wire.models.hf_config import load_hf_config

_OPTIONAL = {"lm_head.weight"}


@dataclass(frozen=True, slots=True)
class TensorSet:
    """Tensors of an engine's model: shapes by Hugging Face name, and the type of all."""

    shapes: Shapes
    dtype: str  # example: float32
    is_fp8: bool = False  # matrices of layers are in fp8, with scales (wire/models/fp8.py)
    tower: Shapes = field(default_factory=dict)  # vision tower: in a version if it is trained

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """The tensors of a version of the model, by name."""

        def dtype_of(name: str) -> str:
            kept = engine_tensor(name).dtype
            return self.dtype if kept == "model" else kept

        specs = (TensorSpec(name, dtype_of(name), shape) for name, shape in self.shapes.items())
        return {spec.name: spec for spec in (quantized(specs) if self.is_fp8 else specs)}

    @property
    def num_bytes(self) -> int:
        """Size of all tensors."""
        return sum(spec.num_bytes for spec in self.specs.values())


def model_tensors(folder: Path, *, dtype: str, is_fp8: bool = False) -> TensorSet:
    """Return the tensors of an engine that was started from a Hugging Face folder.

    They are those of the policy that its config.json describes, in the form in which a learner
    publishes them: files may have others, of pictures or further tokens, all experts in one, or
    numbers with scales. ``dtype`` is the engine's, which may have matrices in fp8 (``is_fp8``).

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
    try:
        hf = load_hf_config(folder)
        return TensorSet(hf.tensor_shapes, dtype, is_fp8, hf.tower_shapes)
    except ConfigError:  # the engine reports what is wrong with it
        names = (name for name in shapes if not name.endswith(SCALE_SUFFIX))
        return TensorSet({name: shapes[name] for name in names}, dtype, is_fp8)


def has_tower(manifest: WeightManifest) -> bool:
    """Return True if a version has a vision tower."""
    return any(spec.name.startswith(HF_TOWER) for spec in manifest.tensors)


def mismatch(manifest: WeightManifest, expected: TensorSet) -> str:
    """Describe a manifest's difference from the model's tensors; empty if they agree.

    A tied output layer may be left out or sent, and so may a whole vision tower.
    """
    if any(spec.name in expected.tower for spec in manifest.tensors):
        expected = replace(expected, shapes=expected.shapes | expected.tower)
    known = expected.specs
    offered = {spec.name: spec for spec in manifest.tensors}
    if len(offered) != len(manifest.tensors):
        return "manifest names a tensor twice"
    missing = sorted(known.keys() - offered.keys() - _OPTIONAL)
    surplus = sorted(offered.keys() - known.keys() - _OPTIONAL)
    if missing or surplus:
        return f"manifest lacks {missing[:3]} and has unknown {surplus[:3]}"
    for name, spec in offered.items():
        own = known.get(name)
        if own is not None and own.shape != spec.shape:
            return f"{name} has shape {spec.shape}, the model has {own.shape}"
        dtype = expected.dtype if own is None else own.dtype
        if spec.dtype != dtype:
            return (
                f"{name} has type {spec.dtype}, the engine {dtype} "
                "(learner.dtype, generators.dtype, weightbus.precision)"
            )
    return ""
