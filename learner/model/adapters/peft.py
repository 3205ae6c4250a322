"""Adapters between a Megatron model and a PEFT folder."""

from collections import defaultdict
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from slipstream.learner.model.adapters.lora import HeldTensor, LoraAdapters
from slipstream.learner.model.adapters.low_rank import refuse_no_numbers
from slipstream.learner.model.rank_model import RankModel
from slipstream.learner.model.weights.hf_weights import geometry_of
from slipstream.learner.model.weights.shards import read_shard, write_shard
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.replace import replacing_folder
from slipstream.wire.models.adapters import (
    CONFIG,
    TENSORS,
    AdapterSource,
    adapter_config,
    adapter_shapes,
    adapter_sources,
    refuse_other_tensors,
    stacked_targets,
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
    path, geometry = folder / TENSORS, geometry_of(model.hf_config)
    try:
        with safe_open(path, framework="pt") as file, torch.no_grad():
            stored = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 no dict
            rank = adapters.facts.rank
            expected = adapter_shapes(model.hf_config.tensor_shapes, adapters.facts)
            sources = adapter_sources(stored, expected, adapters.facts.targets)
            found = {
                name: source.shape(stored[source.name], rank) for name, source in sources.items()
            }
            refuse_other_tensors(found, expected, folder)
            shares = defaultdict[str, list[HeldTensor]](list)
            for held in adapters.held():
                shares[held.name].append(held)
            parts = defaultdict[str, list[tuple[AdapterSource, HeldTensor]]](list)
            for name, source in sources.items():
                parts[source.name] += [(source, held) for held in shares[name]]
            for name in stored:  # whole tensors, so every rank refuses alike
                tensor: Tensor = file.get_tensor(name)
                refuse_no_numbers(name, tensor, folder)
                for source, held in parts[name]:
                    read_shard(held.shard(), [_part(tensor, source, held, rank)], geometry)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"cannot read {path} (lora.adapter): {error}") from error


def save_adapter(model: RankModel, folder: Path, base_model: str) -> None:
    """Write the adapters of a whole model, in one process, as a folder that PEFT reads.

    The folder appears complete or not at all, and replaces an older one of its name.
    """
    adapters, hf = adapters_of(model), model.hf_config
    dtype = model.config.params_dtype
    tensors = {
        name: torch.empty(shape, dtype=dtype)
        for name, shape in adapter_shapes(hf.tensor_shapes, adapters.facts).items()
    }
    for held in adapters.held():
        whole = _by_expert(tensors[held.name], held, adapters.facts.rank)
        write_shard(held.shard(), [whole], geometry_of(hf))
    config = adapter_config(adapters.facts, base_model, stacked_targets(hf))
    with replacing_folder(folder, durable=False) as unfinished:
        (unfinished / CONFIG).write_bytes(config)
        save_file(tensors, unfinished / TENSORS, metadata={"format": "pt"})  # owner-only file
        (unfinished / TENSORS).chmod((unfinished / CONFIG).stat().st_mode & 0o777)


def _part(tensor: Tensor, source: AdapterSource, held: HeldTensor, rank: int) -> Tensor:
    """Return a view of the part of a whole tensor that is named there."""
    if source.expert is None:
        return _by_expert(tensor, held, rank)
    matrix = _stack(tensor, held, rank)[source.expert]
    return matrix if source.half is None or held.dim == 1 else matrix.chunk(2)[source.half]


def _by_expert(tensor: Tensor, held: HeldTensor, rank: int) -> Tensor:
    """Return a view of a whole tensor; one of all experts has each expert's matrix first."""
    is_stack = held.parameter.tensors[0].expert is not None
    return _stack(tensor, held, rank) if is_stack else tensor


def _stack(tensor: Tensor, held: HeldTensor, rank: int) -> Tensor:
    """Return PEFT's A [E r, I] as [E, r, I], or its B [O, r E] as [E, O, r]."""
    if held.dim == 1:
        return tensor.view(-1, rank, tensor.shape[1])
    return tensor.view(tensor.shape[0], rank, -1).permute(2, 0, 1)


def hash_of_base(folder: Path) -> str:
    """Return a hash of the weight files of a Hugging Face folder."""
    digest = xxhash.xxh3_128()
    for path in weight_files(folder):
        digest.update(path.name.encode() + b"\n")
        with path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
    return digest.hexdigest()
