"""Weights between a Hugging Face folder and the Megatron model, one tensor at a time."""

import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.learner.model.rank_model import RankModel
from slipstream.learner.model.weights.gathering import (
    exchange,
    facts_of_all,
    owned_shards,
    parameter_of,
    place_for,
    split_of,
    with_adapter,
)
from slipstream.learner.model.weights.hf_tensors import HfTensors, stored_matrix
from slipstream.learner.model.weights.shards import Geometry, ShardFacts, fuse, in_turn, write_shard
from slipstream.weightbus.version.layout import plan_layout, safetensors_header, tensor_offsets
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.replace import replacing_folder
from slipstream.wire.messages.manifest import TensorSpec
from slipstream.wire.models.families.tables import Parameter
from slipstream.wire.models.hf_config import HfConfig
from slipstream.wire.models.model_files import WEIGHTS, as_exported, copied_files


def load_hf_weights(model: RankModel, folder: Path, setting: str = "run.model") -> None:
    """Fill this rank's part of the model from the safetensors files in ``folder``.

    Every rank checks the names and shapes of the whole model, so all ranks refuse it alike.

    Raises:
        ConfigError: a tensor is missing, has another shape, or has no place in the model.
    """
    hf = model.hf_config
    with HfTensors(folder, setting) as tensors, torch.no_grad():
        tensors.refuse_others(hf)
        for name, weight in model.named_weights():
            mapping = parameter_of(model, name)
            weight.copy_(_read(tensors, mapping, name, weight, hf))


def export_hf_weights(model: RankModel) -> Iterator[tuple[str, Tensor]]:
    """Yield each Hugging Face tensor with its name on rank 0, whole; one parameter at a time.

    Collective: every rank must iterate to the end, though other ranks get nothing. The tensors
    have the model's dtype, or the dtype that the family keeps them in; the vocabulary's padding is
    stripped and tied embeddings come once. Adapters are added to their layers' weights.
    """
    hf = model.hf_config
    rank, mine = dist.get_rank(), dict(owned_shards(model))
    facts = facts_of_all(list(mine.items()))
    owners = defaultdict[str, list[tuple[int, ShardFacts]]](list)
    for owner, owned in enumerate(facts):
        for shard_facts in owned:
            owners[shard_facts.name].append((owner, shard_facts))
    # Parameters of one tensor, as those of all experts may be, follow each other.
    for names, parameters in groupby(hf.parameters(), key=lambda named: named[1].names):
        tensors: list[Tensor] = []
        for name, mapping in parameters:
            if rank != 0:
                if name in mine:
                    exchange([(with_adapter(model, name, mine[name]).tensor.contiguous(), 0)], [])
                continue
            dtype = dtype_of(mapping, model)
            tensors = tensors or [
                torch.empty(tensor.whole_shape(hf.sizes), dtype=dtype) for tensor in mapping.tensors
            ]
            others = [
                (shard_facts.shard(mapping, place_for(shard_facts, dtype)), owner)
                for owner, shard_facts in owners[name]
                if owner != rank
            ]
            exchange([], [(shard.tensor, owner) for shard, owner in others])
            own = [with_adapter(model, name, mine[name])] if name in mine else []
            for shard in (*own, *(shard for shard, _ in others)):
                write_shard(shard, tensors, geometry_of(hf))
        if rank == 0:
            yield from zip(names, tensors, strict=True)


def dtype_of(
    mapping: Parameter, model: RankModel, wanted: torch.dtype | None = None
) -> torch.dtype:
    """Return the type of a parameter's tensors: the model's, or the one wanted instead."""
    dtype: torch.dtype = wanted or model.config.params_dtype
    return torch.float32 if mapping.tensors[0].dtype == "float32" else dtype


def hf_specs(model: RankModel, dtype: torch.dtype | None = None) -> list[TensorSpec]:
    """Return name, type and whole shape of every Hugging Face tensor of a model.

    A ``dtype`` replaces the model's type, but not a type that the family requires.
    """
    hf = model.hf_config
    specs = {
        tensor.name: TensorSpec(
            tensor.name,
            str(dtype_of(mapping, model, dtype)).removeprefix("torch."),
            tensor.whole_shape(hf.sizes),
        )
        for _, mapping in hf.parameters()
        for tensor in mapping.tensors
    }
    return list(specs.values())


def save_hf_folder(
    model: RankModel, folder: Path, source_folder: Path, *, dtype: torch.dtype | None = None
) -> None:
    """Write the model as a Hugging Face folder, on rank 0; collective like the export.

    The folder appears complete or not at all, and replaces an older one of its name. Config and
    tokenizer come from ``source_folder``; a ``dtype`` of None is the model's. A single tensor is in
    memory at a time.

    Raises:
        OSError: on rank 0, after all ranks have done their part.
    """
    tensors = export_hf_weights(model)
    if dist.get_rank() != 0:
        for _ in tensors:
            pass
        return
    try:
        with replacing_folder(folder, durable=False) as unfinished, ExitStack() as stack:
            for path in copied_files(source_folder):
                copy = unfinished / path.relative_to(source_folder)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, copy)
            source = _opened(source_folder, model.hf_config, stack)
            _describe_export(unfinished, keeps_more=bool(source and source.kept))
            _write_weights(unfinished / WEIGHTS, _form_of(model, source, dtype), tensors)
    finally:
        for _ in tensors:  # a failure here must not stop the other ranks' sends
            pass


def _opened(folder: Path, hf: HfConfig, stack: ExitStack) -> HfTensors | None:
    """Return the weights that a model was made from, for their form; None where they are gone.

    Raises:
        ConfigError: they are gone, and an export is to keep some of them.
    """
    try:
        source = stack.enter_context(HfTensors(folder))
        source.refuse_others(hf)
    except ConfigError:
        if hf.may_keep:
            raise
        return None
    return source


class _Form(NamedTuple):
    """The form of the weights in a folder."""

    specs: list[TensorSpec]
    places: dict[str, tuple[str, int]]  # tensor of the folder, and first number there, by own name
    kept: dict[str, Callable[[], Tensor]]  # tensors that are written as they were


def _form_of(model: RankModel, source: HfTensors | None, dtype: torch.dtype | None) -> _Form:
    """Return the form of an export: names, and tensors of all experts, are those of the source."""
    hf, specs = model.hf_config, dict[str, TensorSpec]()
    form = _Form([], {}, {})
    names = source.names if source is not None else set()
    for _, mapping in hf.parameters():
        kind = str(dtype_of(mapping, model, dtype)).removeprefix("torch.")
        for tensor in mapping.tensors:
            place = stored_matrix(tensor, hf.sizes, names)
            name = place.name if source is None else source.stored_as(place.name)
            specs[name] = TensorSpec(name, kind, place.shape)
            expert = place.expert if place.name != tensor.name else None
            first = 0 if expert is None else expert * place.shape[1] + place.first
            form.places[tensor.name] = name, first * (place.shape[-1] if first else 1)
    if source is not None:
        for name in source.kept:
            spec = source.kept_spec(name)
            specs[spec.name] = spec
            form.kept[spec.name] = partial(source.kept_tensor, name)
    form.specs.extend(specs.values())
    return form


def _write_weights(path: Path, form: _Form, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Write a safetensors file, each tensor to its place on arrival."""
    layout = plan_layout(form.specs, bucket_bytes=1)
    header, offsets = safetensors_header(layout), tensor_offsets(layout)
    dtypes = {spec.name: getattr(torch, spec.dtype) for spec in form.specs}
    with path.open("wb") as file:
        file.write(header)

        def write(tensor: Tensor, name: str, first: int) -> None:
            flat = tensor.to(dtypes[name]).contiguous().flatten()
            file.seek(len(header) + offsets[name] + first * flat.itemsize)
            file.write(flat.view(torch.uint8).numpy().data)

        for name, tensor in tensors:
            write(tensor, *form.places[name])
        for stored, kept in form.kept.items():
            write(kept(), stored, 0)


def _describe_export(folder: Path, *, keeps_more: bool) -> None:
    """Remove from copied configs the entries that an export makes untrue."""
    files = {path.name for path in folder.iterdir()}
    for path in (folder / name for name in ("config.json", "tokenizer_config.json")):
        config = json.loads(path.read_bytes()) if path.is_file() else {}
        if (exported := as_exported(config, files, keeps_more=keeps_more)) != config:
            path.write_text(json.dumps(exported, indent=2, ensure_ascii=False) + "\n")


def _read(
    tensors: HfTensors, mapping: Parameter, name: str, weight: Tensor, hf: HfConfig
) -> Tensor:
    """Return the value of this rank's weight, reading only its share."""
    dim, rank, ranks = split_of(name, weight)
    at = dim if dim is not None else 0
    parts = list[Tensor]()
    for tensor in mapping.tensors:
        blocks = tensor.blocks(hf.sizes) if at == 0 else (tensor.shape_of_one(hf.sizes)[at],)
        in_turn_of = len(blocks) if tensor.is_interleaved else 1
        start = 0
        for size in blocks[:1] if in_turn_of > 1 else blocks:
            share = -(-size // ranks)  # rounded up for the vocabulary, exact for the rest
            first, last = (min(number * share, size) for number in (rank, rank + 1))
            rows = slice(start + first * in_turn_of, start + last * in_turn_of)
            parts += in_turn(tensors.read(tensor, rows, at), in_turn_of)
            start += size
    match mapping.kind:
        case "vocab":
            padding = weight.shape[0] - parts[0].shape[0]
            return torch.nn.functional.pad(parts[0], (0, 0, 0, padding))
        case "copy":
            return parts[0]
        case kind:
            return fuse(*parts, num_groups=geometry_of(hf).num_groups(kind, ranks))


def geometry_of(hf: HfConfig) -> Geometry:
    """Return the sizes that do not follow from a fused parameter."""
    return Geometry(hf.num_query_groups, hf.linear_num_key_heads or 1, hf.sizes)
