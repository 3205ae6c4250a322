"""The answer of SGLang's weights checker if an engine holds exactly our tensors.

SGLang keeps query, key and value as one tensor, gate and up as another, pads some with zeros, and
splits most over its ranks (wire/models/families/). The experts of a layer are two tensors; with
several groups of experts a rank's have only those of its group, in their order. On a GPU its
checksum is a hash of words (gpu_hash.py; sglang 0.5.23), on a CPU xxh3-128 of the raw bytes, as in
the manifest: its own sha256 would be several times slower than the wire
(generators/sglang/patches.py replaces it).
"""

import hashlib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Literal, NamedTuple, NoReturn, TypeAlias

import numpy as np
import xxhash

from slipstream.weightbus.version.gpu_hash import HostTiles, Tiles, TileSums, joined_hash, tile_sums
from slipstream.weightbus.version.tensor_bits import Bits, Tensors, bits_of
from slipstream.wire.errors import PublishError
from slipstream.wire.gpus import usable_gpus
from slipstream.wire.messages.manifest import ITEM_BYTES, WeightManifest
from slipstream.wire.messages.part_relays import HashPart
from slipstream.wire.messages.weightbus import Join
from slipstream.wire.models.families.registry import EngineTensor, checksum_name, engine_tensor
from slipstream.wire.models.families.tables import EMBEDDING, HF_TOWER, OUTPUT_LAYER

Piece: TypeAlias = tuple[EngineTensor, str]  # place of one of our tensors, and its name
_ROWS_AT_A_TIME = 256


class EngineLayout(NamedTuple):
    """Layout of the tensors of an engine: engines of one kind hold the same."""

    device: Literal["cpu", "cuda"] = "cpu"
    num_ranks: int = 1  # ranks that share the tensors
    attention_groups: int = 1  # groups of ranks, each with the whole attention
    expert_groups: int = 1  # groups of ranks, each with as many of the experts

    def share_of(self, place: EngineTensor, rank: int) -> tuple[int, int]:
        """Return the index of a rank's share of a tensor, and the number of shares."""
        groups = self.attention_groups if place.of_attention else 1
        count = self.num_ranks // (self.expert_groups if place.of_expert else groups)
        return rank % count, count

    def held_by(self, rank: int, pieces: Sequence[Piece]) -> Sequence[Piece]:
        """Return those of a tensor's pieces, in their order, that a rank has a share of."""
        groups = self.expert_groups if pieces[0][0].of_expert else 1
        count = len(pieces) // groups
        first = rank // (self.num_ranks // groups) * count
        return pieces[first : first + count]

    def place_of(self, name: str, among: Container[str]) -> EngineTensor:
        """Return the place of a tensor of ours in the engine, padded as on its device.

        Args:
            name: Hugging Face name.
            among: All names.
        """
        place = engine_tensor(name, among)
        if self.device != "cpu":  # a GPU pads only the size of the vocabulary
            vocabulary = place.row_multiple if place.split == "vocabulary" else 1
            return replace(place, row_multiple=vocabulary, column_multiple=1)
        if place.of_expert:  # padded so that all ranks could share it
            rows, columns = (
                multiple * self.expert_groups if multiple > 1 else 1
                for multiple in (place.row_multiple, place.column_multiple)
            )
            return replace(place, row_multiple=rows, column_multiple=columns)
        return place


def engine_layout_of(join: Join) -> EngineLayout:
    """Return the layout of the tensors of a member's engine."""
    groups = join.attention_groups or 1, join.expert_groups or 1
    return EngineLayout(join.device, join.num_ranks, *groups)


def expected_checksums(tensors: Tensors, of: EngineLayout | None = None) -> dict[str, str]:
    """Return the checksum of every tensor of an engine, by ``checksum_name``.

    ``tensors`` are by Hugging Face name and not copied. Without a layout the engine is one rank on
    a CPU.
    """
    of = of or EngineLayout()
    tiles = None if of.device == "cpu" else _tiles()

    def checksum(parts: Iterable[Bits]) -> str:
        return host_checksum(parts) if tiles is None else tile_sums(parts, tiles).hash()

    return {
        name: checksum(part for _, shares in pieces for part in shares)
        for name, pieces in _pieces({name: bits_of(t) for name, t in tensors.items()}, of)
    }


def hash_parts(
    tensors: Tensors, manifest: WeightManifest, of: EngineLayout
) -> dict[str, tuple[HashPart, ...]]:
    """Return the share of some of a version's tensors in the checksums of an engine on a GPU.

    Returns:
        Runs of bytes of each of the engine's tensors, by ``checksum_name``.
    """
    own = {name: bits_of(tensor) for name, tensor in tensors.items()}
    # Tensors of other hosts have a shape here, and no memory.
    absent = {
        spec.name: np.broadcast_to(np.zeros((), f"u{ITEM_BYTES[spec.dtype]}"), spec.shape)
        for spec in manifest.tensors
    }
    tiles, found = _tiles(), dict[str, tuple[HashPart, ...]]()
    for name, pieces in _pieces({**absent, **own}, of):
        placed, at = list[tuple[int, TileSums]](), 0  # sums of runs, by their first byte
        for is_own, group in groupby(pieces, key=lambda piece: piece[0] in own):
            parts = [part for _, shares in group for part in shares]
            num_bytes = sum(part.nbytes for part in parts)
            if is_own and num_bytes:
                placed.append((at, tile_sums(parts, tiles, at)))
            at += num_bytes
        found[name] = tuple(sums.reduced(start, at) for start, sums in placed)
    return found


def joined_checksums(hosts: Sequence[Mapping[str, Sequence[HashPart]]]) -> dict[str, str]:
    """Return an engine's checksums from the shares of all hosts.

    Raises:
        PublishError: bytes of a tensor are missing, or there twice.
    """
    found: dict[str, str] = {}
    for name in {name for host in hosts for name in host}:
        try:
            found[name] = joined_hash([part for host in hosts for part in host.get(name, ())])
        except ValueError as error:
            raise PublishError(f"hosts of the learner do not have {name} once: {error}") from error
    return found


def _pieces(
    tensors: Mapping[str, Bits], of: EngineLayout
) -> Iterator[tuple[str, Iterator[tuple[str, Iterator[Bits]]]]]:
    """Yield an engine's tensors, by ``checksum_name``, as ranks' shares of ours in their order."""
    fused: dict[str, list[Piece]] = {}
    for name in tensors:
        place = of.place_of(name, tensors)
        fused.setdefault(place.name, []).extend(
            (placed, name) for placed in _matrices(place, tensors[name])
        )
    for engine_name, places in fused.items():
        places.sort(key=lambda placed: placed[0].position)
        for rank in range(of.num_ranks):
            yield (
                checksum_name(engine_name, rank),
                (
                    (name, _share(place, name, tensors, *of.share_of(place, rank)))
                    for place, name in of.held_by(rank, places)
                ),
            )


def _matrices(place: EngineTensor, tensor: Bits) -> Sequence[EngineTensor]:
    """Return the places of a tensor's matrices, in their order: of each expert, or its own."""
    if not place.has_experts:
        return [place]
    return [replace(place, position=number) for number in range(len(tensor))]


def _of_piece(place: EngineTensor, tensor: Bits) -> Bits:
    """Return the matrix of a place, as the engine has it: rows and columns."""
    matrix = tensor[place.position] if place.has_experts else tensor
    return matrix.swapaxes(0, 1) if place.is_transposed else matrix


def host_checksum(parts: Iterable[Bits]) -> str:
    """Return the engine's checksum of a tensor on the host: these parts end to end."""
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(np.ascontiguousarray(part).data)
    return digest.hexdigest()


def _tiles() -> Tiles:
    """Return those of a GPU if this process has any; else torch is not imported."""
    if usable_gpus():
        from torch import cuda, device

        if cuda.is_available():
            from slipstream.weightbus.version.triton_hash import GpuTiles, runs_on

            if runs_on(gpu := device("cuda")):
                return GpuTiles(gpu)
    return HostTiles()


def _share(
    place: EngineTensor, name: str, tensors: Mapping[str, Bits], rank: int, num_ranks: int
) -> Iterator[Bits]:
    """Yield a rank's share of a tensor, in parts; only padded rows are copied."""
    whole = _of_piece(place, tensors[name])
    count, last = place.stacked, len(whole) // place.stacked
    if place.last_like:
        last = tensors[place.last_like].shape[1]
    others = (len(whole) - last) // (count - 1) if count > 1 else 0
    ends = (*(others * number for number in range(1, count)), len(whole))
    for start, end in pairwise((0, *ends)):
        yield from _share_of_one(place, whole[start:end], rank, num_ranks)


def _share_of_one(place: EngineTensor, tensor: Bits, rank: int, num_ranks: int) -> Iterator[Bits]:
    in_rows = num_ranks if place.split in {"rows", "vocabulary"} else 1
    in_columns = num_ranks if place.split == "columns" else 1
    if place.split == "first" and rank:
        yield np.zeros_like(tensor)
        return
    of_each = place.row_multiple * (in_rows if place.split == "rows" else 1)
    rows = _rounded(len(tensor), of_each)
    if rows % in_rows:  # only the vocabulary's
        rows = _rounded(len(tensor), of_each * in_rows)
    first, last = (rows // in_rows * edge for edge in _edges(rank, in_rows))
    mine = tensor[first : min(last, len(tensor))]
    if place.column_multiple * in_columns > 1 or place.is_transposed:
        columns = _rounded(tensor.shape[1], place.column_multiple * in_columns)
        left, right = (columns // in_columns * edge for edge in _edges(rank, in_columns))
        for start in range(0, len(mine), _ROWS_AT_A_TIME):
            part = mine[start : start + _ROWS_AT_A_TIME, left:right]
            missing = [(0, 0)] * (part.ndim - 1) + [(0, right - left - part.shape[-1])]
            yield np.pad(part, missing) if missing[-1][1] else part
    else:
        yield mine
    if len(mine) < last - first:
        yield np.zeros((last - first - len(mine), *tensor.shape[1:]), tensor.dtype)


def _edges(rank: int, num_shares: int) -> tuple[int, int]:
    return (rank, rank + 1) if num_shares > 1 else (0, 1)


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def differing(expected: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """Return the names of tensors with different checksums, or on one side only.

    A tied output layer may be listed by the engine under its own name as well.
    """
    if not any(name.startswith(HF_TOWER) for name in expected):
        found = without_tower(found)
    names = set(expected) | (set(found) - _tied(found))
    return sorted(name for name in names if expected.get(name) != found.get(name))


def refuse(expected: Mapping[str, str], found: Mapping[str, str]) -> NoReturn:
    """Refuse an engine whose checksums have another digest than the expected ones.

    Raises:
        PublishError: always; the text names some tensors that differ.
    """
    wrong = differing(expected, found)
    what = f"{len(wrong)} tensors differ in the engine: {wrong[:3]}"
    raise PublishError(what if wrong else "its digest differs, and none of its tensors")


def digest_of(checksums: Mapping[str, str]) -> str:
    """Return one digest for all tensors: equal if and only if every checksum is.

    A tied output layer that the engine lists under its own name adds nothing.
    """
    names = sorted(set(checksums) - _tied(checksums))
    text = "\n".join(f"{name} {checksums[name]}" for name in names)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def has_digest(checksums: Mapping[str, str], digest: str) -> bool:
    """Return True if an engine's checksums have a version's digest.

    A version may leave out a vision tower that is not trained: the engine has it from its folder.
    """
    return digest in {digest_of(checksums), digest_of(without_tower(checksums))}


def without_tower(checksums: Mapping[str, str]) -> dict[str, str]:
    """Return checksums without those of a vision tower."""
    return {name: checksum for name, checksum in checksums.items() if not name.startswith(HF_TOWER)}


def _tied(checksums: Mapping[str, str]) -> set[str]:
    """Return the names of output layers that are their rank's embedding."""
    names = [name for name in checksums if name.startswith(OUTPUT_LAYER)]
    pairs = [(name, name.replace(OUTPUT_LAYER, EMBEDDING)) for name in names]
    return {name for name, other in pairs if checksums[name] == checksums.get(other)}
