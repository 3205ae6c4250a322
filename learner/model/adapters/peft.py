"""Adapters between a Megatron model and a PEFT folder."""

from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from slipstream.learner.model.adapters.lora import LoraAdapters
from slipstream.learner.model.adapters.low_rank import refuse_no_numbers
from slipstream.learner.model.rank_model import RankModel
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.replace import replacing_folder
from slipstream.wire.models.adapters import (
    CONFIG,
    TENSORS,
    adapter_config,
    adapter_shapes,
    refuse_other_tensors,
)
from slipstream.wire.models.model_files import weight_files

_PIECE_BYTES = 1 << 20


def adapters_of(model: RankModel) -> LoraAdapters:
    """Return a model's adapters.

    Raises:
        TypeError: the model has no adapters.
    """
    if not isinstance(model.adapters, LoraAdapters):
        raise TypeError("this model has no adapters")
    return model.adapters


def load_adapter(model: RankModel, folder: Path) -> None:
    """Fill this rank's part of a model's adapters from a PEFT folder.

    Raises:
        ConfigError: the folder cannot be read, or its tensors are not those of the adapters or
            not finite.
    """
    adapters = adapters_of(model)
    path = folder / TENSORS
    try:
        with safe_open(path, framework="pt") as file, torch.no_grad():
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 no dict
            expected = adapter_shapes(model.hf_config.tensor_shapes, adapters.facts)
            refuse_other_tensors(found, expected, folder)
            for name in found:  # whole tensors, so every rank refuses alike
                refuse_no_numbers(name, file.get_tensor(name), folder)
            for name, parameter, place, dim in adapters.named_tensors():
                rows = place.share(found[name][dim], dim)
                part: Tensor = file.get_slice(name)[(slice(None),) * dim + (rows,)]
                parameter.copy_(part)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"cannot read {path} (lora.adapter): {error}") from error


def save_adapter(model: RankModel, folder: Path, base_model: str) -> None:
    """Write the adapters of a whole model, in one process, as a folder that PEFT reads.

    The folder appears complete or not at all, and replaces an older one of its name.
    """
    adapters = adapters_of(model)
    tensors = {name: tensor.detach().cpu() for name, tensor, _, _ in adapters.named_tensors()}
    with replacing_folder(folder, durable=False) as unfinished:
        (unfinished / CONFIG).write_bytes(adapter_config(adapters.facts, base_model))
        save_file(tensors, unfinished / TENSORS, metadata={"format": "pt"})  # owner-only file
        (unfinished / TENSORS).chmod((unfinished / CONFIG).stat().st_mode & 0o777)


def hash_of_base(folder: Path) -> str:
    """Return a hash of the weight files of a Hugging Face folder."""
    digest = xxhash.xxh3_128()
    for path in weight_files(folder):
        digest.update(path.name.encode() + b"\n")
        with path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
    return digest.hexdigest()
