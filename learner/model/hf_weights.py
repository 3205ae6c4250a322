"""Weights between a Hugging Face folder and the Megatron model, one tensor at a time."""

import shutil
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from slipstream.learner.model.gathering import (
    ShardFacts,
    facts_of_all,
    owned_shards,
    parameter_of,
    received,
    send,
    split_of,
)
from slipstream.learner.model.hf_config import HfConfig
from slipstream.learner.model.rank_model import RankModel
from slipstream.learner.model.shards import Geometry, fuse_gate_up, fuse_qkv, write_shard
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.model_families import OUTPUT_LAYER, Parameter
from slipstream.wire.files.model_files import WEIGHTS, copied_files, weight_files
from slipstream.wire.files.replace import replacing_folder

_IGNORED_SUFFIX = ".rotary_emb.inv_freq"  # derived from the config; old files hold it


def load_hf_weights(model: RankModel, folder: Path, setting: str = "run.model") -> None:
    """Fill this rank's part of the model from the safetensors files in ``folder``.

    Every rank checks the names and shapes of the whole model, so that all of them refuse it.

    Raises:
        ConfigError: a tensor is missing, has another shape, or has no place in the model.
    """
    hf = model.hf_config
    with HfTensors(folder, setting) as tensors, torch.no_grad():
        tensors.refuse_others(hf)
        for name, parameter in model.named_parameters():
            mapping = parameter_of(model, name)
            parameter.copy_(_read(tensors, mapping, name, parameter, hf))


def export_hf_weights(model: RankModel) -> Iterator[tuple[str, Tensor]]:
    """Yield each Hugging Face tensor with its name on rank 0, whole; one parameter at a time.

    Collective: every rank must iterate to the end, though the others get nothing. The tensors have
    the model's dtype; the padding of the vocabulary is stripped and tied embeddings come once.
    """
    hf = model.hf_config
    rank, mine = dist.get_rank(), dict(owned_shards(model))
    facts = facts_of_all(list(mine.items()))
    owners = defaultdict[str, list[tuple[int, ShardFacts]]](list)
    for owner, owned in enumerate(facts):
        for one in owned:
            owners[one.name].append((owner, one))
    for name, mapping in hf.parameters():
        if rank != 0:
            if name in mine:
                send(mine[name], 0)
            continue
        tensors = [
            torch.empty(tensor.whole_shape(hf.sizes), dtype=model.config.params_dtype)
            for tensor in mapping.tensors
        ]
        for owner, one in owners[name]:
            if owner == rank:
                shard = mine[name]
            else:
                shard = one.shard(mapping, received(one, owner, model.config.params_dtype))
            write_shard(shard, tensors, geometry_of(hf))
        yield from zip(mapping.names, tensors, strict=True)


def hf_shapes(hf: HfConfig) -> dict[str, tuple[int, ...]]:
    """Return the name and whole shape of every Hugging Face tensor of a model."""
    sizes = hf.sizes
    return {
        tensor.name: tensor.whole_shape(sizes)
        for _, mapping in hf.parameters()
        for tensor in mapping.tensors
    }


def save_hf_folder(
    model: RankModel, folder: Path, source_folder: Path, *, dtype: torch.dtype | None = None
) -> None:
    """Write the model as a Hugging Face folder, on rank 0; collective like the export.

    The folder appears complete or not at all, and replaces an older one of its name. Config and
    tokenizer are those of ``source_folder``; a ``dtype`` of None is the model's.
    """
    tensors = {name: tensor.to(dtype) for name, tensor in export_hf_weights(model)}
    if dist.get_rank() != 0:
        return
    with replacing_folder(folder, durable=False) as unfinished:
        for path in copied_files(source_folder):
            shutil.copyfile(path, unfinished / path.name)
        save_file(tensors, unfinished / WEIGHTS, metadata={"format": "pt"})


class HfTensors:
    """The tensors in a folder of safetensors files, read on demand."""

    def __init__(self, folder: Path, setting: str = "run.model") -> None:
        self._folder, self._setting = folder, setting
        self._open_files = ExitStack()
        self._file_of: dict[str, safe_open] = {}

    def __enter__(self) -> "HfTensors":
        with ExitStack() as stack:
            try:
                for path in weight_files(self._folder, self._setting):
                    file = stack.enter_context(safe_open(path, framework="pt"))
                    self._file_of.update(dict.fromkeys(file.keys(), file))
            except (SafetensorError, OSError) as error:
                raise ConfigError(
                    f"cannot read the weights in {self._folder}: {error} ({self._setting})"
                ) from error
            self._open_files = stack.pop_all()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._open_files.close()

    @property
    def names(self) -> set[str]:
        """The names of all tensors."""
        return set(self._file_of)

    def refuse_others(self, hf: HfConfig) -> None:
        """Compare names and shapes with those of a model.

        Raises:
            ConfigError: a tensor is missing, has another shape, or has no place in the model.
        """
        shapes = hf_shapes(hf)
        for name, shape in shapes.items():
            if name not in self._file_of:
                raise ConfigError(f"{self._folder} holds no tensor {name} ({self._setting})")
            got = tuple(self._file_of[name].get_slice(name).get_shape())  # type: ignore[no-untyped-call]  # safetensors is untyped
            if got != shape:
                raise ConfigError(
                    f"{self._folder}: tensor {name} must have shape {list(shape)} for its "
                    f"config.json, got {list(got)} ({self._setting})"
                )
        used = shapes.keys() | ({OUTPUT_LAYER} if hf.tie_word_embeddings else set())
        left = sorted(n for n in self.names - used if not n.endswith(_IGNORED_SUFFIX))
        if left:
            raise ConfigError(
                f"{self._folder} holds {len(left)} tensors that a {hf.model_type} model does not "
                f"have, such as {left[0]} ({self._setting})"
            )

    def read(self, name: str, rows: slice, dim: int) -> Tensor:
        """Return part of a tensor."""
        part = self._file_of[name].get_slice(name)  # type: ignore[no-untyped-call]  # safetensors is untyped
        tensor: Tensor = part[(slice(None),) * dim + (rows,)]
        return tensor


def _read(
    tensors: HfTensors, mapping: Parameter, name: str, parameter: torch.nn.Parameter, hf: HfConfig
) -> Tensor:
    """Return the value of this rank's parameter, reading no more than its share."""
    dim, rank, ranks = split_of(name, parameter)
    at = dim if dim is not None else 0
    parts = []
    for tensor in mapping.tensors:
        size = tensor.whole_shape(hf.sizes)[at]
        share = -(-size // ranks)  # rounded up for the vocabulary, exact for the rest
        rows = slice(min(rank * share, size), min((rank + 1) * share, size))
        parts.append(tensors.read(tensor.name, rows, at))
    match mapping.kind:
        case "qkv":
            return fuse_qkv(*parts, num_groups=hf.num_query_groups // ranks)
        case "gate_up":
            return fuse_gate_up(*parts)
        case "vocab":
            padding = parameter.shape[0] - parts[0].shape[0]
            return torch.nn.functional.pad(parts[0], (0, 0, 0, padding))
        case "copy":
            return parts[0]


def geometry_of(hf: HfConfig) -> Geometry:
    """Return the sizes that do not follow from a fused parameter."""
    return Geometry(
        num_query_groups=hf.num_query_groups,
        queries_per_group=hf.num_attention_heads // hf.num_query_groups,
        head_dim=hf.kv_channels,
    )
