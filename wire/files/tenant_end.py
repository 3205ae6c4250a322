"""That a learner or generator has ended one of its tenants: a file in the tenant's run folder."""

from contextlib import suppress
from pathlib import Path

import msgspec

from slipstream.wire.files.replace import replace_file

_FILE = Path("tenant_end.json")


class TenantEnd(msgspec.Struct, frozen=True):
    """The end of a tenant in a role that serves others, too."""

    reason: str  # failure, or empty: the learner has done all of its run


def write_tenant_end(folder: Path, reason: str) -> None:
    """Write into a tenant's run folder that a role has ended it; why, if it gave it up."""
    with suppress(OSError):  # the role's log has it
        replace_file(folder / _FILE, msgspec.json.encode(TenantEnd(reason)))


def forget_tenant_end(folder: Path) -> None:
    """Remove the end of an earlier start."""
    (folder / _FILE).unlink(missing_ok=True)


def read_tenant_end(folder: Path) -> str | None:
    """Return why a role gave a tenant up: empty if the learner has done all, None if it has not.

    What the learner exports and uploads at the end of a run is there by then.
    """
    try:
        return msgspec.json.decode((folder / _FILE).read_bytes(), type=TenantEnd).reason
    except (OSError, msgspec.MsgspecError):
        return None
