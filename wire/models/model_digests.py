"""Digests that tell the folders of two models apart, without reading all of their weights."""

import hashlib
from pathlib import Path

_DIGEST = 12  # hexadecimal digits of a fact that is too long, or not for others, to be shown
_SAMPLES, _SAMPLE_BYTES = 16, 4096  # samples of a file of weights


def model_digests(folder: Path) -> dict[str, str]:
    """Return digests of a model folder's config.json and weights."""
    config = short_digest((folder / "config.json").read_bytes())
    return {"config.json": config, "weights": _weights_digest(folder)}


def _weights_digest(folder: Path) -> str:
    """Return a digest of names, sizes and samples: it takes no time and tells models apart."""
    state = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        state.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for sample in range(_SAMPLES + 1):
                file.seek(max(0, size - _SAMPLE_BYTES) * sample // _SAMPLES)
                state.update(file.read(_SAMPLE_BYTES))
    return state.hexdigest()[:_DIGEST]


def short_digest(data: bytes) -> str:
    """Return a fact that is too long, or not for others, to be shown."""
    return hashlib.sha256(data).hexdigest()[:_DIGEST]
