"""Tensors of a Hugging Face folder, read on demand and compared with a model's."""

import logging
import re
from collections.abc import Container
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from slipstream.learner.model.weights.mxfp4 import (
    BLOCKS,
    LARGEST_SCALE,
    SCALES,
    packed_shapes,
    unpacked,
)
from slipstream.learner.model.weights.quantized import number_trouble
from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.manifest import TensorSpec
from slipstream.wire.models.families.registry import SCALE_SUFFIX
from slipstream.wire.models.families.tables import EMBEDDING, OUTPUT_LAYER, HfTensor, Sizes
from slipstream.wire.models.hf_config import MXFP4_BLOCK, HfConfig, name_alone
from slipstream.wire.models.model_files import weight_files

_IGNORED_SUFFIX = ".rotary_emb.inv_freq"  # derived from the config; in old files
_OF_EXPERT = re.compile(r"(.+\.experts\.)(\d+)\.(gate|up|down)_proj\.weight")
_FUSED = {"gate": "gate_up", "up": "gate_up"}
# Types in an export.
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float32"}
_COMPARED_ROWS = 8192  # rows in memory at a time
_log = logging.getLogger(__name__)


class StoredMatrix(NamedTuple):
    """StoredMatrix of a matrix or a vector in a folder."""

    name: str  # tensor that has it
    shape: tuple[int, ...]  # shape of that tensor
    rows: int  # rows of the matrix
    first: int = 0  # its first row there
    expert: int | None = None  # its number there, if that tensor has those of all experts
    is_transposed: bool = False


def stored_matrix(tensor: HfTensor, sizes: Sizes, names: Container[str]) -> StoredMatrix:
    """Return the place of a matrix in a folder with tensors of these names.

    Matrices of experts may lie in one tensor of all of them, [E, 2I, H] or [E, H, I], where the
    family's usual names are of single ones.
    """
    shape = tensor.shape_of_one(sizes)
    single, name = _OF_EXPERT.fullmatch(tensor.name), _of_all_experts(tensor.name)
    if single is None or tensor.name in names or name not in names:
        whole = tensor.whole_shape(sizes)
        return StoredMatrix(tensor.name, whole, shape[0], 0, tensor.expert, tensor.is_transposed)
    rows, columns = shape
    whole = (sizes["experts"], rows * (2 if single[3] in _FUSED else 1), columns)
    return StoredMatrix(name, whole, rows, rows * (single[3] == "up"), int(single[2]))


def _of_all_experts(name: str) -> str:
    """Return the name that a tensor of one expert's matrix and others' would have; else empty."""
    single = _OF_EXPERT.fullmatch(name)
    return "" if single is None else f"{single[1]}{_FUSED.get(single[3], single[3])}_proj"


class HfTensors:
    """The tensors in a folder of safetensors files, read on demand.

    Tensors of 8 or 4 bits come with scales of their blocks, and are read as float32. Those of a
    language model within another have the names that they would have alone.
    """

    def __init__(self, folder: Path, setting: str = "run.model") -> None:
        self._folder, self._setting = folder, setting
        self._open_files = ExitStack()
        self._file_of: dict[str, safe_open] = {}
        self._stored_as: dict[str, str] = {}  # names in the folder, where they are others
        self.kept: tuple[str, ...] = ()
        """Tensors that a policy does not have, and that an export keeps as they are."""
        self._block: tuple[int, int] | None = None  # block of tensors of 8 bits
        self._packed: set[str] = set()  # tensors of 4 bits
        self._sizes: Sizes = {}

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
            ConfigError: a tensor is missing, has another shape, or has no place in the model; or
                the output layer is not the embedding although config.json ties them.
        """
        if hf.is_wrapped:
            self._stored_as = {name_alone(name): name for name in self._file_of}
            if twice := sorted(self.names - set(self._stored_as.values())):
                raise ConfigError(
                    f"{self._folder} holds {twice[0]} and {self._stored_as[name_alone(twice[0])]}, "
                    f"which are one tensor of a {hf.model_type} model ({self._setting})"
                )
            self._file_of = {name_alone(name): file for name, file in self._file_of.items()}
        if hf.quantization_config is not None and hf.quantization_config.weight_block_size:
            self._block = hf.quantization_config.weight_block_size
        shapes = self._expected(hf)
        for name, shape in {**shapes, **hf.tower_shapes}.items():
            if name not in self._file_of:
                raise ConfigError(f"{self._folder} holds no tensor {name} ({self._setting})")
            got = self._shape(name)
            if got != shape:
                raise ConfigError(
                    f"{self._folder}: tensor {name} must have shape {list(shape)} for its "
                    f"config.json, got {list(got)} ({self._setting})"
                )
            self._refuse_numbers(name, shape)
        if hf.tie_word_embeddings and OUTPUT_LAYER in self._file_of:
            self._refuse_untied()
        used = shapes.keys() | ({OUTPUT_LAYER} if hf.tie_word_embeddings else set())
        if self._block is not None:
            used |= {name + SCALE_SUFFIX for name in shapes}
        used |= {name + suffix for name in self._packed for suffix in (BLOCKS, SCALES)}
        self.kept = tuple(sorted(name for name in self.names - used if hf.keeps(name)))
        if self.kept:
            _log.info(
                "%s: %d tensors of pictures or of layers that predict further tokens are not "
                "trained, and exported as they are",
                self._folder,
                len(self.kept),
            )
        for name in self.kept:
            self._refuse_numbers(name, self._shape(name))
        others = self.names - used - {n + end for n in self.kept for end in ("", SCALE_SUFFIX)}
        left = sorted(n for n in others if not n.endswith(_IGNORED_SUFFIX))
        if left:
            raise ConfigError(
                f"{self._folder} holds {len(left)} tensors that a {hf.model_type} model does not "
                f"have, such as {left[0]} ({self._setting})"
            )

    def _expected(self, hf: HfConfig) -> dict[str, tuple[int, ...]]:
        """Return the shapes that tensors of these names must have; those of 4 bits are checked."""
        self._sizes, shapes = hf.sizes, dict[str, tuple[int, ...]]()
        for tensor in (tensor for _, mapping in hf.parameters() for tensor in mapping.tensors):
            place = stored_matrix(tensor, hf.sizes, self._file_of)
            of_all = _of_all_experts(tensor.name)
            if place.name == tensor.name and of_all in self._file_of:
                raise ConfigError(
                    f"{self._folder} holds {tensor.name} and {of_all}, of all experts: remove one "
                    f"({self._setting})"
                )
            if place.name in shapes or place.name in self._packed:
                continue
            if place.name + BLOCKS in self._file_of:
                self._refuse_packed(tensor, hf)
                self._packed.add(tensor.name)
                continue
            shapes[place.name] = place.shape
        return shapes

    def _refuse_numbers(self, name: str, shape: tuple[int, ...]) -> None:
        """Refuse a tensor whose numbers are no weights, or lack the scales that make them so."""
        scales = name + SCALE_SUFFIX
        of_scales = self._shape(scales) if scales in self._file_of else None
        if trouble := number_trouble(name, self._dtype(name), shape, self._block, of_scales):
            raise ConfigError(f"{self._folder}: {trouble} ({self._setting})")

    def _refuse_untied(self) -> None:
        """Refuse a separate output layer if config.json says that it is the embedding."""
        (rows, columns), shape = self._shape(EMBEDDING), self._shape(OUTPUT_LAYER)
        parts = (slice(at, at + _COMPARED_ROWS) for at in range(0, rows, _COMPARED_ROWS))
        if shape == (rows, columns) and all(
            torch.equal(*(self._slice(name, part, 0).float() for name in (EMBEDDING, OUTPUT_LAYER)))
            for part in parts
        ):
            return
        raise ConfigError(
            f"{self._folder} holds {OUTPUT_LAYER} with other values than {EMBEDDING}, and its "
            "config.json has tie_word_embeddings = true, with which it is dropped: set "
            "tie_word_embeddings to false there, as transformers reads such a folder, or take the "
            f"tensor out if it means nothing ({self._setting})"
        )

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slices(name).get_shape())

    def _dtype(self, name: str) -> str:
        dtype: str = self._slices(name).get_dtype()
        return dtype

    def _refuse_packed(self, tensor: HfTensor, hf: HfConfig) -> None:
        """Refuse blocks of 4 bits that config.json, or the other tensors, contradict."""
        name, found = tensor.name, hf.quantization_config
        if found is None or found.quant_method != "mxfp4" or tensor.expert is None:
            raise ConfigError(
                f"{self._folder} holds {name}{BLOCKS}, which quantization_config of its "
                f'config.json does not say: expected quant_method "mxfp4" ({self._setting})'
            )
        expected = packed_shapes((hf.sizes["experts"], *tensor.shape_of_one(hf.sizes)))
        for suffix, shape in zip((BLOCKS, SCALES), expected, strict=True):
            if name + suffix not in self._file_of:
                raise ConfigError(
                    f"{self._folder} holds no tensor {name}{suffix} ({self._setting})"
                )
            got, dtype = self._shape(name + suffix), self._dtype(name + suffix)
            if (got, dtype) != (shape, "U8"):
                raise ConfigError(
                    f"{self._folder}: tensor {name}{suffix} must be U8 of shape {list(shape)} for "
                    f"its config.json, got {dtype} of {list(got)} ({self._setting})"
                )

    def read(self, tensor: HfTensor, part: slice, dim: int) -> Tensor:
        """Return part of a matrix or a vector: some of its rows (0) or columns (1).

        Raises:
            ConfigError: a scale of its blocks makes no finite number.
        """
        if tensor.name in self._packed:
            return self._unpacked(tensor, part, dim)
        place = stored_matrix(tensor, self._sizes, self._file_of)
        first, last = (part.start, part.stop) if dim == 0 else (0, place.rows)
        rows = slice(place.first + first, place.first + last)
        columns = slice(None) if dim == 0 else part
        if place.is_transposed:
            index: tuple[slice, ...] = (columns, rows)
        else:
            index = (rows,) if dim == 0 else (rows, columns)
        of_expert = () if place.expert is None else (place.expert,)
        found = self._at(place.name, *of_expert, *index)
        scales = place.name + SCALE_SUFFIX
        if self._block is None or scales not in self._file_of:
            return found.T if place.is_transposed else found
        block = self._block[dim]
        blocks = slice(part.start // block, -(-part.stop // block))
        of_blocks = self._slice(scales, blocks, dim)
        bad = of_blocks[~(of_blocks.isfinite() & (of_blocks > 0))]
        if len(bad):
            raise ConfigError(
                f"{self._folder}: tensor {scales} has scales such as {float(bad[0]):g}, expected "
                f"finite numbers above 0 ({self._setting})"
            )
        return dequantized(found, of_blocks, self._block, dim, part.start % block)

    def _unpacked(self, tensor: HfTensor, part: slice, dim: int) -> Tensor:
        """Return part of a matrix of 4 bits, [R, C] float32; blocks are of its columns."""
        groups = slice(part.start // MXFP4_BLOCK, -(-part.stop // MXFP4_BLOCK))
        index = (tensor.expert, part) if dim == 0 else (tensor.expert, slice(None), groups)
        blocks, scales = (self._at(tensor.name + suffix, *index) for suffix in (BLOCKS, SCALES))
        if (largest := int(scales.max())) > LARGEST_SCALE:
            raise ConfigError(
                f"{self._folder}: tensor {tensor.name}{SCALES} has a scale of {largest}, which "
                f"makes no finite numbers: expected at most {LARGEST_SCALE} ({self._setting})"
            )
        numbers = unpacked(blocks, scales)
        if dim == 0:
            return numbers
        skipped = part.start - groups.start * MXFP4_BLOCK
        return numbers[:, skipped : skipped + part.stop - part.start]

    def _slice(self, name: str, rows: slice, dim: int) -> Tensor:
        return self._at(name, *(slice(None),) * dim, rows)

    def _at(self, name: str, *index: slice | int | None) -> Tensor:
        tensor: Tensor = self._slices(name)[index]
        return tensor

    def _slices(self, name: str) -> Any:  # noqa: ANN401 safetensors is untyped
        return self._file_of[name].get_slice(self._stored_as.get(name, name))  # type: ignore[no-untyped-call]

    def stored_as(self, name: str) -> str:
        """Return the name of a tensor of the policy in this folder."""
        return self._stored_as.get(name, name)

    def kept_spec(self, name: str) -> TensorSpec:
        """Return what ``kept_tensor`` returns, under its name in the folder."""
        dtype = _DTYPES.get(self._dtype(name), "bfloat16")
        return TensorSpec(self.stored_as(name), dtype, self._shape(name))

    def kept_tensor(self, name: str) -> Tensor:
        """Return a tensor that is kept, whole; one of 8 bits in bfloat16, times its scales."""
        tensor: Tensor = self._slices(name)[...]
        if self._block is None or name + SCALE_SUFFIX not in self._file_of:
            return tensor
        scales = self._at(name + SCALE_SUFFIX, slice(None))
        return dequantized(tensor, scales, self._block, 0, 0).bfloat16()


def dequantized(
    tensor: Tensor, scales: Tensor, block: tuple[int, int], dim: int, offset: int
) -> Tensor:
    """Return weights as the product of 8-bit numbers and the scale of each block.

    DeepSeek-V3 stores weights so (arXiv:2412.19437, section 3.3): ``weight_scale_inv`` is the
    factor of a block's numbers.

    Args:
        tensor: [R, C], of an 8-bit type.
        scales: [ceil((offset + R) / block), ceil(C / block)], rows and columns alike.
        block: rows and columns of a block; blocks at the ends may have fewer.
        dim: dimension in which the tensor is part of a larger one.
        offset: rows or columns of its first block before the tensor, in that dimension.

    Returns:
        [R, C] float32.
    """
    starts = [offset if dim == axis else 0 for axis in (0, 1)]
    rows, columns = (
        torch.arange(start, start + size) // of
        for start, size, of in zip(starts, tensor.shape, block, strict=True)
    )
    return tensor.float() * scales.float()[rows][:, columns]
