"""Files of a Hugging Face folder to read and copy: only those in it."""

from collections.abc import Mapping
from pathlib import Path, PurePath

import msgspec

from slipstream.wire.errors import ConfigError
from slipstream.wire.unreadable import UNREADABLE

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
COPIED_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".tiktoken")


class _Index(msgspec.Struct, frozen=True):
    weight_map: Mapping[str, str]


def weight_files(folder: Path, setting: str = "run.model") -> list[Path]:
    """Return the files with the weights of a folder, which a setting names.

    One, or the files that its index names.

    Raises:
        ConfigError: there are none, or the index is none or names a file elsewhere.
    """
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    index = folder / WEIGHTS_INDEX
    if not index.is_file():
        raise ConfigError(f"{folder} holds neither {WEIGHTS} nor {WEIGHTS_INDEX} ({setting})")
    try:
        names = set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values())
    except UNREADABLE as error:
        raise ConfigError(f"{index}: {error} ({setting})") from error
    for name in sorted(names):
        if PurePath(name).name != name or name in {"", ".."} or "\0" in name:
            raise ConfigError(
                f"{index} names {name!r:.200}, which is no file beside it ({setting})"
            )
    return [folder / name for name in sorted(names)]


def copied_files(folder: Path) -> list[Path]:
    """Return the files that an export copies: config, tokenizer and templates, but no weights.

    An export is passed on, so that a link would take its target along. Links within the
    folder are followed, and those of a Hugging Face cache, from snapshots/REVISION to blobs.

    Raises:
        ConfigError: a file is a link to anywhere else.
    """
    real = folder.resolve()
    roots = [real]
    if real.parent.name == "snapshots":
        roots.append(real.parent.parent / "blobs")
    files = [
        path
        for path in sorted(folder.iterdir())
        if path.suffix in COPIED_SUFFIXES and path.name != WEIGHTS_INDEX and path.is_file()
    ]
    for path in files:
        target = path.resolve()
        if path.is_symlink() and not any(target.is_relative_to(root) for root in roots):
            raise ConfigError(
                f"{path} is a link to {target}, outside of the model's folder, and would be part "
                "of every export: put a copy of the file there (run.model)"
            )
    return files
