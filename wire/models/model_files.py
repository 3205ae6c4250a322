"""Files of a Hugging Face folder to read and copy: only those in it."""

from collections.abc import Collection, Container, Mapping
from pathlib import Path, PurePath
from typing import Any

import msgspec

from slipstream.wire.errors import ConfigError
from slipstream.wire.unreadable import UNREADABLE

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
COPIED_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".py")
TEMPLATES = "additional_chat_templates"  # folder of further templates
_FURTHER = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
_WEIGHTS_SUFFIX = ".safetensors"
_POINTER, _POINTER_BYTES = b"version https://git-lfs.github.com/spec/", 1024  # is smaller


class _Index(msgspec.Struct, frozen=True):
    weight_map: Mapping[str, str]


def refuse_no_model(folder: Path, setting: str = "run.model") -> None:
    """Refuse what is no model's folder, which a setting names, or whose files were not fetched.

    Raises:
        ConfigError: so it is; with the way to one.
    """
    refuse_no_config(names_in(folder), str(folder), setting)
    refuse_pointers(folder, str(folder), setting)


def refuse_no_config(names: Collection[str], place: str, setting: str) -> None:
    """Refuse what is no model's folder: ``names`` are those of its files, ``place`` is where.

    Raises:
        ConfigError: so it is; with the way to one.
    """
    if "config.json" not in names:
        instead = _instead(names) or (
            "a model is a folder on this host (hf download NAME --local-dir DIR makes one); "
            "run.model may also be the URL of one, or a name of the Hugging Face hub"
        )
        raise ConfigError(f"no config.json in {place}: {instead} ({setting})")


def refuse_pointers(folder: Path, place: str, setting: str) -> None:
    """Refuse a folder with pointers of Git LFS; ``place`` is where its files come from.

    Raises:
        ConfigError: it has one; with the way to the file.
    """
    for path in sorted(folder.iterdir()):
        if path.suffix in (*COPIED_SUFFIXES, _WEIGHTS_SUFFIX) and _is_pointer(path):
            raise ConfigError(
                f"{place}/{path.name} is a pointer of Git LFS, not the file itself: git lfs pull "
                "in the repository that it is from, or hf download NAME --local-dir DIR "
                f"({setting})"
            )


def names_in(folder: Path) -> set[str]:
    """Return the names of what a folder holds; one that is not there holds nothing."""
    if not folder.is_dir():
        return set()
    return {path.name for path in folder.iterdir() if path.exists()}


def _is_pointer(path: Path) -> bool:
    if not path.is_file() or path.stat().st_size >= _POINTER_BYTES:
        return False
    return path.read_bytes().startswith(_POINTER)


def _instead(names: Collection[str]) -> str:
    """Return what a folder without a model holds instead, and what to do with it."""
    names = {name.partition("/")[0] for name in names}  # not of what lies below it
    suffixes = {PurePath(name).suffix for name in names}
    if "adapter_config.json" in names:
        return (
            "it holds adapters of PEFT: name the model that they were trained on, and the adapters "
            "by lora.adapter, or add them to its weights first (merge_and_unload of PEFT)"
        )
    if "snapshots" in names:
        return "it is a repository of Hugging Face's cache: name a folder in its snapshots/"
    if suffixes & {".bin", ".pt", ".pth"}:
        return "its weights are torch's: load them with transformers and write save_pretrained's"
    if suffixes & {".gguf", ".ggml"}:
        return "its weights are llama.cpp's: name the folder that they were made from"
    if _WEIGHTS_SUFFIX in suffixes:
        return "weights under other names are not read: fetch or save the whole folder again"
    return ""


def weight_files(folder: Path, setting: str = "run.model") -> list[Path]:
    """Return the files with the weights of a folder, which a setting names.

    Raises:
        ConfigError: there are no weights, or the index is unreadable or names a missing file.
    """
    names = weight_names(names_in(folder), folder / WEIGHTS_INDEX, str(folder), setting)
    return [folder / name for name in names]


def weight_names(
    listed: Collection[str], index: Path, place: str, setting: str = "run.model"
) -> list[str]:
    """Return the names of the files with a model's weights: one, or those that its index names.

    ``listed`` are the names of all its files; the index is read if it is listed.

    Raises:
        ConfigError: there are no weights, or the index is unreadable or names a missing file.
    """
    if WEIGHTS in listed:
        return [WEIGHTS]
    if WEIGHTS_INDEX not in listed:
        instead = f": {what}" if (what := _instead(listed)) else ""
        raise ConfigError(
            f"{place} holds neither {WEIGHTS} nor {WEIGHTS_INDEX}{instead} ({setting})"
        )
    try:
        names = set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values())
    except UNREADABLE as error:
        raise ConfigError(f"{place}/{WEIGHTS_INDEX}: {error} ({setting})") from error
    for name in sorted(names):
        if name not in listed or PurePath(name).name != name:
            raise ConfigError(
                f"{place}/{WEIGHTS_INDEX} names {name!r:.200}, which is no file beside it: fetch "
                f"or save the whole folder again ({setting})"
            )
    return sorted(names)


def copied_files(folder: Path) -> list[Path]:
    """Return the files that an export copies: config, tokenizer, templates, code, but no weights.

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
        for path in sorted((*folder.iterdir(), *folder.glob(f"{TEMPLATES}/*")))
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


def as_exported(
    config: Mapping[str, Any], files: Container[str], *, keeps_more: bool = False
) -> dict[str, Any]:
    """Return a copied config of model or tokenizer, without what is not true of an export.

    Its weights are not quantized, and unless it ``keeps_more`` than the policy has, layers that
    predict further tokens are left out. Code that ``auto_map`` names must be among the ``files``
    next to it, or in another repository.
    """
    exported = {key: value for key, value in config.items() if key != "quantization_config"}
    if isinstance(text := exported.get("text_config"), dict):
        exported["text_config"] = {k: v for k, v in text.items() if k != "quantization_config"}
    if not keeps_more:
        exported |= {key: 0 for key in _FURTHER if config.get(key)}
    named = config.get("auto_map")
    if isinstance(named, dict):
        named = {key: code for key, code in named.items() if _is_beside(code, files)}
        exported["auto_map"] = named
    if not named or not _is_beside(named, files):
        exported.pop("auto_map", None)
    return exported


def _is_beside(code: Any, files: Container[str]) -> bool:  # noqa: ANN401 JSON
    """True if code can be loaded, which is MODULE.CLASS, REPOSITORY--MODULE.CLASS, or some such."""
    match code:
        case str():
            return "--" in code or code.partition(".")[0] + ".py" in files
        case list():  # a slow tokenizer and a fast one; one may be missing
            return any(code) and all(_is_beside(part, files) for part in code if part is not None)
    return True
