"""What SGLang's weights checker must answer if an engine holds exactly our tensors.

SGLang keeps query, key and value as one tensor, gate and up as another, and pads with zeros: the
vocabulary to a multiple of 64, and on a CPU the MLP's inner size to one of 32. Its checksum there
is the first 8 bytes of sha256 over the raw bytes (sglang 0.5.23). A GPU uses another function:
there the publish record keeps a digest per engine, to be compared with each other.
"""

import hashlib
from collections.abc import Iterator, Mapping

from torch import Tensor, uint8
from torch.nn.functional import pad

_EMBEDDING, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
_VOCABULARY_MULTIPLE = 64
_INNER_MULTIPLE = 32
_ROWS_AT_A_TIME = 256
_FUSED = {  # part -> (whole, position)
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}


def expected_checksums(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the checksum of every tensor of an engine with one rank, by the engine's name.

    Args:
        tensors: by Hugging Face name. They are read where they lie.
    """
    wholes: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        part = next((p for p in _FUSED if f".{p}." in name), None)
        whole, position = (name, 0) if part is None else _FUSED[part]
        pieces = wholes.setdefault(name if part is None else name.replace(part, whole), {})
        pieces[position] = tensor
    return {name: _checksum(name, pieces) for name, pieces in wholes.items()}


def _checksum(name: str, pieces: dict[int, Tensor]) -> str:
    digest = hashlib.sha256()
    for position in sorted(pieces):
        for part in _padded(name, pieces[position]):
            digest.update(_raw(part))
    return digest.digest()[:8].hex()


def _padded(name: str, tensor: Tensor) -> Iterator[Tensor]:
    """Yield a tensor as SGLang keeps it, in parts; only rows that are padded are copied."""
    rows = 0
    if name in {_EMBEDDING, _OUTPUT}:
        rows = -len(tensor) % _VOCABULARY_MULTIPLE
    elif ".gate_up_proj." in name:
        rows = -len(tensor) % _INNER_MULTIPLE
    columns = -tensor.shape[1] % _INNER_MULTIPLE if name.endswith(".down_proj.weight") else 0
    if columns:
        for start in range(0, len(tensor), _ROWS_AT_A_TIME):
            yield pad(tensor[start : start + _ROWS_AT_A_TIME], (0, columns))
    else:
        yield tensor
    if rows:
        yield tensor.new_zeros(rows, *tensor.shape[1:])


def _raw(tensor: Tensor) -> memoryview:
    """Return a tensor's elements as they lie in memory."""
    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(uint8).numpy().data


def differing(expected: dict[str, str], found: dict[str, str]) -> list[str]:
    """Return the names of tensors whose checksums differ or that only one side has.

    A tied output layer may be listed by the engine under its own name as well.
    """
    names = set(expected) | set(found)
    if _OUTPUT not in expected and found.get(_OUTPUT) == expected.get(_EMBEDDING):
        names.discard(_OUTPUT)
    return sorted(name for name in names if expected.get(name) != found.get(name))


def digest_of(checksums: dict[str, str]) -> str:
    """Return one digest for all tensors: equal if and only if every checksum is.

    A tied output layer that the engine lists under its own name adds nothing.
    """
    names = sorted(checksums)
    if _OUTPUT in checksums and checksums[_OUTPUT] == checksums.get(_EMBEDDING):
        names.remove(_OUTPUT)
    text = "\n".join(f"{name} {checksums[name]}" for name in names)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
