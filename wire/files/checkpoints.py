"""Checkpoints as folders: the facts that need no torch.

RUN/checkpoints/step-000040/ holds the learner's state, ``checkpoint.json`` (its info) and
``ledger.bin`` (the broker's ledger as of that step). A checkpoint appears under its name when it
is complete and on disk, so a run can resume from any folder with such a name.
"""

import hashlib
import logging
import re
from pathlib import Path

import msgspec

from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.status import EvalPoint
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.models.adapters import AdapterFacts
from slipstream.wire.unreadable import UNREADABLE

_log = logging.getLogger(__name__)
FORMAT_REVISION = 2
INFO_FILE = "checkpoint.json"
LEDGER_FILE = "ledger.bin"
BEST_FILE = "best.json"
UPLOAD_FILE = "upload.json"
_LEDGER_MARK = b"slipstream-ledger-1\n"
_DIGEST_BYTES = 16
_NAME = re.compile(r"step-([0-9]{6,})")


class CheckpointInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Content of checkpoint.json."""

    format_revision: int
    run_name: str
    run_id: str = ""  # id in the run folder's identity.json; empty without a broker
    version: PolicyVersion  # (epoch, learner steps completed)
    saved_at: str  # UTC, ISO 8601
    model: str  # absolute path, URL or hub's name of the folder with config and tokenizer
    content: str = ""  # hash in run.contents of that URL or name
    architecture: dict[str, int | float | bool | str]  # settings that decide the shape of the model
    parameters: str  # hash of all names and whole shapes
    dtype: str  # dtype of the parameters
    ranks: int
    tensor_parallel: int
    parallel: dict[str, int] = {}  # the other parallel sizes, those above 1
    packages: dict[str, str]
    # The round of this step, once it is known; newer versions may have answered a part of it
    # (docs/adr/0011), listed in ``versions``.
    evaluation: EvalPoint | None = None
    has_critic: bool = False
    has_reference: bool = False  # one that was renewed
    has_digests: bool = False  # digests of its files are in digests.json
    has_divided_optimizer: bool = False  # divided over copies of weights: it has another form
    has_places: bool = False  # and its buckets are in their places (docs/adr/0078)
    adapters: AdapterFacts | None = None  # it holds these alone, and none of the model's weights

    @property
    def step(self) -> int:
        """Learner steps completed."""
        return self.version.step


class BestCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Content of best.json: the existing checkpoint with the best evaluation."""

    checkpoint: str  # name of its folder
    metric: str  # eval.metric of the run
    value: float
    oldest_version: str = ""  # label of the oldest and of the newest version that answered
    newest_version: str = ""


class UploadState(msgspec.Struct, frozen=True, kw_only=True):
    """Content of upload.json: what remote storage has of the run's checkpoints."""

    url: str
    step: int = 0  # newest checkpoint there, as far as this learner knows
    num_failed: int = 0
    error: str = ""  # why the newest is not there; empty once it is


def read_upload_state(folder: Path) -> UploadState | None:
    """Return the content of RUN/checkpoints/upload.json, or None if it cannot be read."""
    try:
        return msgspec.json.decode((folder / UPLOAD_FILE).read_bytes(), type=UploadState)
    except (OSError, *UNREADABLE) as error:
        _log.debug("no %s: %s", folder / UPLOAD_FILE, error)
        return None


def encode_info(info: CheckpointInfo) -> bytes:
    """Return the bytes of checkpoint.json."""
    return msgspec.json.format(msgspec.json.encode(info), indent=2) + b"\n"


def checkpoint_name(step: int) -> str:
    """Return the name of the folder of a checkpoint, e.g. ``step-000040``."""
    return f"step-{step:06d}"


def readable_checkpoints(folder: Path) -> dict[Path, CheckpointInfo]:
    """Return the checkpoints in RUN/checkpoints; unreadable ones are logged and left out."""
    found: dict[Path, CheckpointInfo] = {}
    for path in sorted(folder.glob("step-*")):
        if _NAME.fullmatch(path.name) and path.is_dir() and (info := _readable(path)) is not None:
            found[path] = info
    return found


def _readable(path: Path) -> CheckpointInfo | None:
    try:
        return read_checkpoint_info(path)
    except ConfigError as error:
        _log.error("%s is passed over: %s", path, error)
        return None


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the readable checkpoints in RUN/checkpoints, the newest last.

    Newest is the highest policy version: after going back to an earlier step the epoch decides.
    """
    infos = readable_checkpoints(folder)
    return sorted(infos, key=lambda path: infos[path].version)


def newest_checkpoint(run_folder: Path) -> Path | None:
    """Return the newest complete checkpoint of a run, or None."""
    found = checkpoints_in(run_folder / "checkpoints")
    return found[-1] if found else None


def best_checkpoint(run_folder: Path) -> Path | None:
    """Return the checkpoint that best.json of a run names, or None."""
    folder = run_folder / "checkpoints"
    best = read_best(folder)
    path = folder / best.checkpoint if best is not None else None
    return path if path is not None and path.is_dir() and _readable(path) is not None else None


def read_best(folder: Path) -> BestCheckpoint | None:
    """Return the content of RUN/checkpoints/best.json, or None if it cannot be read.

    The next save writes it again: evaluations stand in the checkpoints.
    """
    path = folder / BEST_FILE
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=BestCheckpoint)
    except (OSError, *UNREADABLE) as error:
        _log.warning("cannot read %s: %s", path, error)
        return None


def read_checkpoint_info(folder: Path) -> CheckpointInfo:
    """Return the info of a checkpoint.

    Raises:
        ConfigError: the folder is no checkpoint, or of a format that this version cannot read.
    """
    path = folder / INFO_FILE
    try:
        info = msgspec.json.decode(path.read_bytes(), type=CheckpointInfo)
    except OSError as error:
        raise ConfigError(f"{folder} is no checkpoint: {INFO_FILE}: {error.strerror}") from error
    except UNREADABLE as error:
        raise ConfigError(f"{folder} is no checkpoint: {INFO_FILE}: {error}") from error
    if info.format_revision != FORMAT_REVISION:
        raise ConfigError(
            f"{folder} is of checkpoint format {info.format_revision}, "
            f"this version reads {FORMAT_REVISION}"
        )
    return info


def ledger_file(ledger: bytes) -> bytes:
    """Return the content of ledger.bin: a mark, a digest of the ledger (BLAKE2b, 128 bits), itself.

    The ledger is empty in a checkpoint that was trained without a broker.
    """
    return _LEDGER_MARK + _digest_of(ledger) + ledger


def read_ledger(folder: Path) -> bytes:
    """Return the broker's ledger in a checkpoint; empty if it was trained without a broker.

    Raises:
        ConfigError: the checkpoint lacks it, or it is damaged.
    """
    path = folder / LEDGER_FILE
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    start = len(_LEDGER_MARK) + _DIGEST_BYTES
    ledger = data[start:]
    if data[:start] != _LEDGER_MARK + _digest_of(ledger):
        raise ConfigError(f"{path} is damaged: its digest does not match")
    return ledger


def _digest_of(ledger: bytes) -> bytes:
    return hashlib.blake2b(ledger, digest_size=_DIGEST_BYTES).digest()
