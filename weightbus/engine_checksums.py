"""What SGLang's weights checker must answer if an engine holds exactly our tensors.

SGLang keeps query, key and value as one tensor, gate and up as another, and pads with zeros: the
vocabulary to a multiple of 64, and on a CPU the MLP's inner size to one of 32. Its checksum there
is the first 8 bytes of sha256 over the raw bytes (sglang 0.5.23). A GPU uses another function:
there the publish record keeps a digest per engine, to be compared with each other.
"""

import hashlib

from torch import Tensor, cat
from torch.nn.functional import pad

from weightbus.snapshot import raw_bytes

_EMBEDDING, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
_VOCABULARY_MULTIPLE = 64
_INNER_MULTIPLE = 32
_FUSED = {  # part -> (whole, position)
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}


def expected_checksums(tensors: dict[str, Tensor]) -> dict[str, str]:
    """Return the checksum of every tensor of an engine with one rank, by the engine's name."""
    checksums: dict[str, str] = {}
    parts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        if name in {_EMBEDDING, _OUTPUT}:
            rows = -len(tensor) % _VOCABULARY_MULTIPLE
            checksums[name] = _checksum(pad(tensor, (0, 0, 0, rows)))
            continue
        if name.endswith(".down_proj.weight"):
            columns = -tensor.shape[1] % _INNER_MULTIPLE
            checksums[name] = _checksum(pad(tensor, (0, columns)))
            continue
        part = next((p for p in _FUSED if f".{p}." in name), None)
        if part is None:
            checksums[name] = _checksum(tensor)
        else:
            whole, position = _FUSED[part]
            rows = -len(tensor) % _INNER_MULTIPLE if whole == "gate_up_proj" else 0
            padded = pad(tensor, (0, 0, 0, rows)) if rows else tensor
            parts.setdefault(name.replace(part, whole), {})[position] = padded
    for name, pieces in parts.items():
        checksums[name] = _checksum(cat([pieces[position] for position in sorted(pieces)]))
    return checksums


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


def _checksum(tensor: Tensor) -> str:
    return hashlib.sha256(raw_bytes(tensor)).digest()[:8].hex()
