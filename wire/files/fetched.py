"""Local copies of a model or a file that a setting names by URL, or of a model by its hub's name.

A copy is CACHE/HASH/, with the hash of what the store lists: URL, names, sizes and checksums. It
appears when it is complete and on disk, and is never changed. Several processes of a host that
need it at once fetch it once. Models of the Hugging Face hub lie in the hub's own cache instead.
"""

import fcntl
import functools
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import msgspec

from slipstream.wire.errors import ConfigError
from slipstream.wire.files.remote import RemoteFile, RemoteFolder, StorageError, is_url
from slipstream.wire.files.replace import replacing_folder
from slipstream.wire.models.model_files import (
    COPIED_SUFFIXES,
    TEMPLATES,
    WEIGHTS_INDEX,
    copied_files,
    names_in,
    refuse_no_config,
    refuse_pointers,
    weight_names,
)
from slipstream.wire.models.shelf import refuse_listed
from slipstream.wire.models.tokenizer_conversion import convert_tokenizer, written_otherwise
from slipstream.wire.redaction import without_secrets

_log = logging.getLogger(__name__)
_HASH_BYTES = 16
_HASH = re.compile(rf"[0-9a-f]{{{2 * _HASH_BYTES}}}")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_WEIGHTS = ".safetensors"
_NOT_COPIED = (_WEIGHTS, WEIGHTS_INDEX)  # into a folder with another tokenizer
_MODEL_SUFFIXES = (*COPIED_SUFFIXES, _WEIGHTS)  # what a role may read


@dataclass(frozen=True, slots=True)
class Fetch:
    """What to have a copy of."""

    url: str  # or the name of a model of the hub
    setting: str  # name of the setting, for errors
    cache: Path  # folder of all copies
    expected: str = ""  # hash that it must have, or commit; empty takes what is there


def is_hub_name(text: str, expected: str = "") -> bool:
    """True if a setting names a model of the Hugging Face hub: ORGANIZATION/NAME, no path here.

    A run that began with the ``expected`` commit of one stays with it, whatever lies here by now.
    """
    is_name = _HUB_NAME.fullmatch(text) is not None
    return is_name and (bool(expected) or not os.path.lexists(text))


def is_fetched(text: str, expected: str = "") -> bool:
    """True if a setting names a model by URL or on the hub, and not by a path."""
    return is_url(text) or is_hub_name(text, expected)


def found_model(fetch: Fetch, *, with_weights: bool) -> Path:
    """Return the folder of a model, as it is; that of a URL or of the hub is fetched.

    Without ``with_weights`` config and tokenizer are all that is fetched.

    Raises:
        ConfigError: it cannot be fetched.
    """
    if is_url(fetch.url):
        return fetched_model(fetch, with_weights=with_weights)
    if is_hub_name(fetch.url, fetch.expected):
        refuse_listed(fetch.url, fetch.setting)
        return hub_model(fetch, with_weights=with_weights)
    return Path(fetch.url)


def content_hash(url: str, setting: str, *, is_model: bool) -> str:
    """Return the hash of what the store lists; of a model of the hub, its commit.

    Raises:
        ConfigError: it cannot be listed, or holds nothing.
    """
    if not is_url(url):
        return hub_model(Fetch(url, setting, default_cache()), with_weights=False).name
    with _settings_to_blame():
        folder = RemoteFolder(url, setting)
        return _hash(folder, _checked(folder, folder.files(), is_model=is_model))


@functools.cache  # one process uses one content, and asks for it once
def fetched_model(fetch: Fetch, *, with_weights: bool) -> Path:
    """Return the folder with a copy of a Hugging Face folder.

    Files below the folder, but for chat templates, and those that no role reads are not fetched.

    Raises:
        ConfigError: it does not exist, has changed, or cannot be fetched or kept.
    """
    return _fetched(fetch, is_model=True, with_weights=with_weights)


@functools.cache
def hub_model(fetch: Fetch, *, with_weights: bool) -> Path:
    """Return a model of the Hugging Face hub: the snapshot of a commit, in the hub's own cache.

    What the cache lacks is fetched. Where the hub cannot be asked, the cache is all there is.

    Raises:
        ConfigError: neither has it, or what is there is no model's.
    """
    from huggingface_hub import HfApi, snapshot_download

    def further(folder: Path, names: Collection[str], setting: str) -> list[str]:
        refuse_no_config(names, fetch.url, setting)
        templates = [f"{TEMPLATES}/*.jinja"]
        if not with_weights:
            return templates
        return templates + weight_names(names, folder / WEIGHTS_INDEX, fetch.url, setting)

    reason = ""
    for is_offline in (False, True):
        snapshot = functools.partial(snapshot_download, fetch.url, local_files_only=is_offline)
        try:
            suffixes = [f"*{suffix}" for suffix in COPIED_SUFFIXES]
            commit = fetch.expected or None
            folder = Path(snapshot(revision=commit, allow_patterns=suffixes, ignore_patterns="*/*"))
            try:
                others = further(folder, names_in(folder), f"{fetch.setting}, cached: {reason}")
            except ConfigError:
                if is_offline:
                    raise
                listed = HfApi().list_repo_files(fetch.url, revision=folder.name)
                others = further(folder, listed, fetch.setting)
            return Path(snapshot(revision=folder.name, allow_patterns=others))
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 of its libraries, whatever they are
            reason = reason or without_secrets((str(error).splitlines() or [""])[0])
            _log.info("%s is not taken from the Hugging Face hub: %s", fetch.url, reason)
    raise ConfigError(
        f"{fetch.url} is no folder here, and as a name of the Hugging Face hub it is neither in "
        f"its cache (HF_HOME) nor to be had: {reason} ({fetch.setting})"
    )


def with_tokenizer(folder: Path, cache: Path, setting: str = "run.model") -> Path:
    """Return a model's folder that has tokenizer.json: itself, or a copy with a converted one.

    The copy is CACHE/HASH-tokenizer, with the hash of the folder's path, names and contents; its
    weights are links.

    Raises:
        ConfigError: it has a tokenizer that cannot be converted.
    """
    source = written_otherwise(folder)
    if source is None:
        return folder
    with _settings_to_blame():
        copied = copied_files(folder)
        weights = [path for path in folder.iterdir() if path.name.endswith(_NOT_COPIED)]
        state = hashlib.blake2b(str(folder.resolve()).encode(), digest_size=_HASH_BYTES)
        for path in copied:
            state.update(f"\0{path.name}\0".encode() + path.read_bytes())
        state.update(repr(sorted(path.name for path in weights)).encode())
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        copy = cache / f"{state.hexdigest()}-tokenizer"
        with _locked(copy):
            if not copy.is_dir():
                with replacing_folder(copy) as unfinished:
                    for path in copied:
                        target = unfinished / path.relative_to(folder)
                        target.parent.mkdir(exist_ok=True)
                        shutil.copyfile(path, target)
                    convert_tokenizer(source, unfinished, setting)
                    for path in weights:
                        (unfinished / path.name).symlink_to(path.resolve())
    return copy


@functools.cache
def fetched_file(fetch: Fetch) -> Path:
    """Return the copy of a file, under its own name.

    Raises:
        ConfigError: it does not exist, has changed, or cannot be fetched or kept.
    """
    return _fetched(fetch, is_model=False) / PurePosixPath(fetch.url).name


def _fetched(fetch: Fetch, *, is_model: bool, with_weights: bool = True) -> Path:
    with _settings_to_blame():
        if fetch.expected:
            if not _HASH.fullmatch(fetch.expected):
                raise ConfigError(
                    f"run.contents: the hash of {fetch.url} must be {2 * _HASH_BYTES} hexadecimal "
                    f"digits, got {fetch.expected!r:.100}"
                )
            copy = _place(fetch, fetch.expected, with_weights=with_weights)
            if copy.is_dir():
                return copy
        folder = RemoteFolder(fetch.url, fetch.setting)
        listed = folder.files()
        files = _checked(folder, listed, is_model=is_model)
        found = _hash(folder, files)
        if fetch.expected not in {"", found}:
            raise ConfigError(
                f"{fetch.setting} = {fetch.url} has changed: its content has hash {found}, "
                f"expected {fetch.expected} (run.contents; run.contents={{}} takes the new one; "
                "for an export, an empty content in checkpoint.json)"
            )
        copy = _place(fetch, found, with_weights=with_weights)
        fetch.cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(copy):
            if not copy.is_dir():
                with replacing_folder(copy) as unfinished:
                    small = [file for file in files if not file.name.endswith(_WEIGHTS)]
                    _download(folder, small, unfinished)
                    if is_model and with_weights:
                        all_names = [file.name for file in listed]
                        index = unfinished / WEIGHTS_INDEX
                        names = weight_names(all_names, index, fetch.url, fetch.setting)
                        weights = [file for file in files if file.name in names]
                        _download(folder, weights, unfinished)
                    if is_model:
                        refuse_pointers(unfinished, fetch.url, fetch.setting)
                    if _checked(folder, folder.files(), is_model=is_model) != files:
                        raise StorageError(f"{fetch.url} changed while it was fetched")
        return copy


def _place(fetch: Fetch, content: str, *, with_weights: bool) -> Path:
    return fetch.cache / (content if with_weights else f"{content}-config")


def _checked(folder: RemoteFolder, listed: list[RemoteFile], *, is_model: bool) -> list[RemoteFile]:
    """Return the listed files that a role may read, of a model's folder or of a single file."""
    if is_model:
        refuse_no_config({file.name for file in listed}, folder.url, folder.setting)
        return [file for file in listed if _is_of_model(PurePosixPath(file.name))]
    if [file.name for file in listed] != [""]:
        raise ConfigError(f"{folder.url} is no file ({folder.setting})")
    return listed


def _is_of_model(path: PurePosixPath) -> bool:
    """True if a role may read it: it lies in the folder itself, or is one of several templates."""
    return path.name.endswith(_MODEL_SUFFIXES) and str(path.parent) in {".", TEMPLATES}


def _hash(folder: RemoteFolder, files: Sequence[RemoteFile]) -> str:
    facts = [folder.url, *((file.name, file.size, file.content) for file in files)]
    return hashlib.blake2b(msgspec.json.encode(facts), digest_size=_HASH_BYTES).hexdigest()


def _download(folder: RemoteFolder, files: Sequence[RemoteFile], target: Path) -> None:
    paths = {file.name: target / (file.name or PurePosixPath(folder.url).name) for file in files}
    folder.fetch(paths, total=sum(file.size for file in files))
    for file in files:
        size = paths[file.name].stat().st_size
        if size != file.size:
            raise StorageError(
                f"{folder.url}/{file.name} came with {size} bytes, expected {file.size}"
            )


@contextmanager
def _locked(copy: Path) -> Iterator[None]:
    """Hold the lock of a copy: requests of its holder are bounded, and it does not outlive it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC  # no file of ours by a link
    with os.fdopen(os.open(copy.with_name(f".{copy.name}.lock"), flags, 0o666), "r+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.info("waiting for another process, which fetches %s", copy)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _settings_to_blame() -> Iterator[None]:
    """A run cannot start without what its settings name."""
    try:
        yield
    except StorageError as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        raise ConfigError(
            f"cannot keep a local copy: {error.strerror or error}: {error.filename or ''} "
            "(run.cache_dir)"
        ) from error


def default_cache() -> Path:
    """Return the folder of all copies where run.cache_dir is not set."""
    base = os.environ.get("XDG_CACHE_HOME")  # noqa: TID251 where users keep caches
    return (Path(base) if base else Path.home() / ".cache") / "slipstream"
