"""Why a learner gave up one of its tenants: a file in the tenant's run folder."""

from contextlib import suppress
from pathlib import Path

import msgspec

from slipstream.wire.files.replace import replace_file

_FILE = Path("learner_end.json")


class LearnerEnd(msgspec.Struct, frozen=True):
    """The reason of a failure."""

    reason: str


def write_learner_end(folder: Path, reason: str) -> None:
    """Write into a tenant's run folder why the learner gave it up."""
    with suppress(OSError):  # the learner's log has it
        replace_file(folder / _FILE, msgspec.json.encode(LearnerEnd(reason)))


def forget_learner_end(folder: Path) -> None:
    """Remove the reason of an earlier start."""
    (folder / _FILE).unlink(missing_ok=True)


def read_learner_end(folder: Path) -> str:
    """Return why the learner gave a tenant up; empty if it did not."""
    try:
        return msgspec.json.decode((folder / _FILE).read_bytes(), type=LearnerEnd).reason
    except (OSError, msgspec.MsgspecError):
        return ""
