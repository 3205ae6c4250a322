"""Weights between a Hugging Face folder and the Megatron model, one tensor at a time."""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from slipstream.learner.model.hf_config import HfConfig
from slipstream.learner.model.shards import Geometry, Shard, fuse_gate_up, fuse_qkv, write_shard
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.model_families import OUTPUT_LAYER, Parameter
from slipstream.wire.files.model_files import WEIGHTS, copied_files, weight_files
from slipstream.wire.files.replace import replacing_folder

_IGNORED_SUFFIX = ".rotary_emb.inv_freq"  # derived from the config; old files hold it


def load_hf_weights(model: GPTModel, folder: Path, setting: str = "run.model") -> None:
    """Fill this rank's part of the model from the safetensors files in ``folder``.

    Raises:
        ConfigError: a tensor is missing, has another shape, or has no place in the model.
    """
    with HfTensors(folder, setting) as tensors, torch.no_grad():
        used = {OUTPUT_LAYER} if model.hf_config.tie_word_embeddings else set()
        for name, parameter in _own_parameters(model):
            mapping = _mapping(model, name)
            used.update(mapping.names)
            parameter.copy_(_read(tensors, mapping, parameter, model.hf_config))
        left = sorted(name for name in tensors.names - used if not name.endswith(_IGNORED_SUFFIX))
    if left:
        raise ConfigError(
            f"{folder} holds {len(left)} tensors that a {model.hf_config.model_type} model does "
            f"not have, such as {left[0]} ({setting})"
        )


def export_hf_weights(model: GPTModel) -> Iterator[tuple[str, Tensor]]:
    """Yield each Hugging Face tensor, whole, with its name; one parameter at a time.

    Collective: every rank of the tensor-parallel group must iterate to the end. Tensors may
    share memory with the model: copy them to keep them past the next optimizer update. They
    have the model's dtype; the padding of the vocabulary is stripped and tied embeddings come
    once.
    """
    for name, parameter in _own_parameters(model):
        mapping = _mapping(model, name)
        yield from zip(mapping.names, _whole(mapping, parameter, model.hf_config), strict=True)


def shards_of(model: GPTModel) -> Iterator[tuple[str, Shard]]:
    """Yield this rank's share of each parameter with its Megatron name; tied embeddings once."""
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    for name, parameter in _own_parameters(model):
        dim = _split_dim(parameter)
        mapping = _mapping(model, name)
        if dim is None:
            yield name, Shard(mapping, parameter)
        else:
            yield name, Shard(mapping, parameter, dim, rank, ranks)


def hf_shapes(model: GPTModel) -> dict[str, tuple[int, ...]]:
    """Return the name and whole shape of every Hugging Face tensor that the model exports."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, _ in _own_parameters(model):
        mapping = _mapping(model, name)
        shapes.update(zip(mapping.names, _whole_shapes(mapping, model.hf_config), strict=True))
    return shapes


def save_hf_folder(
    model: GPTModel, folder: Path, source_folder: Path, *, dtype: torch.dtype | None = None
) -> None:
    """Write the model as a Hugging Face folder, on rank 0; collective like the export.

    The folder appears complete or not at all, and replaces an older one of its name. Config and
    tokenizer are those of ``source_folder``; a ``dtype`` of None is the model's.
    """
    is_writer = dist.get_rank() == 0
    tensors: dict[str, Tensor] = {}
    for name, tensor in export_hf_weights(model):
        if is_writer:
            tensors[name] = tensor.detach().to("cpu", dtype, copy=True).contiguous()
    if not is_writer:
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

    def read(self, name: str, shape: tuple[int, ...], rows: slice, dim: int) -> Tensor:
        """Return part of a tensor that must have the given whole shape."""
        if name not in self._file_of:
            raise ConfigError(f"{self._folder} holds no tensor {name} ({self._setting})")
        part = self._file_of[name].get_slice(name)  # type: ignore[no-untyped-call]  # safetensors is untyped
        got = tuple(part.get_shape())
        if got != shape:
            raise ConfigError(
                f"{self._folder}: tensor {name} must have shape {list(shape)} for its "
                f"config.json, got {list(got)} ({self._setting})"
            )
        tensor: Tensor = part[(slice(None),) * dim + (rows,)]
        return tensor


def _own_parameters(model: GPTModel) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield this rank's parameters, without a second copy of tied embeddings."""
    for name, parameter in model.named_parameters():
        if name != "output_layer.weight" or not model.share_embeddings_and_output_weights:
            yield name, parameter


def _mapping(model: GPTModel, name: str) -> Parameter:
    hf: HfConfig = model.hf_config
    tied = model.share_embeddings_and_output_weights
    return hf.family.parameter(name, tied_embeddings=tied)


def _split_dim(parameter: torch.nn.Parameter) -> int | None:
    """Return the dimension that tensor parallelism splits, None if every rank holds it all."""
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    if ranks == 1 or not parameter.tensor_model_parallel:  # type: ignore[attr-defined]  # a mark
        return None
    dim: int = parameter.partition_dim  # type: ignore[attr-defined]  # set with the mark
    return dim


def _whole_shapes(mapping: Parameter, hf: HfConfig) -> list[tuple[int, ...]]:
    sizes = hf.sizes
    return [tensor.whole_shape(sizes) for tensor in mapping.tensors]


def _read(
    tensors: HfTensors, mapping: Parameter, parameter: torch.nn.Parameter, hf: HfConfig
) -> Tensor:
    """Return the value of this rank's parameter, reading no more than its share."""
    dim = _split_dim(parameter)
    ranks = parallel_state.get_tensor_model_parallel_world_size() if dim is not None else 1
    rank = parallel_state.get_tensor_model_parallel_rank() if dim is not None else 0
    at = dim if dim is not None else 0
    parts = []
    for name, shape in zip(mapping.names, _whole_shapes(mapping, hf), strict=True):
        share = -(-shape[at] // ranks)  # rounded up for the vocabulary, exact for the rest
        rows = slice(min(rank * share, shape[at]), min((rank + 1) * share, shape[at]))
        parts.append(tensors.read(name, shape, rows, at))
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


def _whole(mapping: Parameter, parameter: torch.nn.Parameter, hf: HfConfig) -> list[Tensor]:
    """Return the Hugging Face tensors of a parameter; gathers it over tensor parallelism."""
    dim = _split_dim(parameter)
    tensor = parameter.detach()
    shards = [tensor]
    if dim is not None:
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        shards = [torch.empty_like(tensor) for _ in range(ranks)]
        group = parallel_state.get_tensor_model_parallel_group()
        dist.all_gather(shards, tensor.contiguous(), group=group)
    wholes = [tensor.new_empty(shape) for shape in _whole_shapes(mapping, hf)]
    for rank, shard in enumerate(shards):
        part = Shard(mapping, shard, dim, rank, len(shards))
        write_shard(part, wholes, geometry_of(hf))
    return wholes
