"""Which tensors a model folder holds, read from the headers of its safetensors files."""

import json
import struct
from pathlib import Path

from wire.errors import ConfigError
from wire.manifest import WeightManifest

Shapes = dict[str, tuple[int, ...]]


def model_shapes(folder: Path) -> Shapes:
    """Return the shape of every tensor of a Hugging Face folder.

    Raises:
        ConfigError: no safetensors file there, or one that cannot be read.
    """
    shapes: Shapes = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(length))
        except (OSError, ValueError, struct.error) as error:
            raise ConfigError(f"cannot read {path} (run.model): {error}") from error
        for name, entry in header.items():
            if name != "__metadata__":
                shapes[name] = tuple(entry["shape"])
    if not shapes:
        raise ConfigError(f"no safetensors files in {folder} (run.model)")
    return shapes


def mismatch(manifest: WeightManifest, shapes: Shapes) -> str:
    """Say how a manifest differs from the model's tensors; empty if it does not.

    A tied output layer may be left out or sent.
    """
    offered = {t.name: t.shape for bucket in manifest.buckets for t in bucket.tensors}
    optional = {"lm_head.weight"}
    missing = sorted(shapes.keys() - offered.keys() - optional)
    surplus = sorted(offered.keys() - shapes.keys() - optional)
    if missing or surplus:
        return f"manifest lacks {missing[:3]} and has unknown {surplus[:3]}"
    for name, shape in offered.items():
        if name in shapes and shapes[name] != shape:
            return f"{name} has shape {shape}, the model has {shapes[name]}"
    return ""
