"""Identity of a run and of its lives, on which run folder, store and checkpoints agree.

A *life* of a run is the history of one account of it, from its beginning, from a checkpoint
without the store of the life before, or from where a store that lost acknowledged events ends.
``identity.json`` in the run folder outlives every store, so that an epoch, or the id of a group or
a lease, is never given out twice.
"""

import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from slipstream.broker.ledger.state import BookState
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.replace import replace_file
from slipstream.wire.files.run_folder import IDENTITY
from slipstream.wire.messages.bounds import MOST, Count
from slipstream.wire.unreadable import UNREADABLE

IDS_PER_LIFE = 1_000_000_000  # so that g2000000017 is read as group 17 of life 2


class RunIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Ids and epochs that no life of a run may give out again."""

    run_id: str  # random; empty before there was one
    life: Annotated[int, Meta(ge=0, le=MOST // IDS_PER_LIFE)] = 0  # from 0
    epoch: Count = 0  # the highest that was granted to a learner

    def granted(self, epoch: int) -> "RunIdentity":
        """Return it with an epoch that was granted."""
        return msgspec.structs.replace(self, epoch=max(self.epoch, epoch))


def read_identity(run_folder: Path) -> RunIdentity | None:
    """Return the identity in the run folder; None where no broker has started in it.

    Raises:
        ConfigError: it holds something else.
    """
    path = run_folder / IDENTITY
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunIdentity)
    except FileNotFoundError:
        return None
    except (OSError, *UNREADABLE) as error:
        raise ConfigError(
            f"cannot read {path}: {error}; put it back, or start a new run (another run.name)"
        ) from error


def write_identity(run_folder: Path, identity: RunIdentity) -> None:
    """Replace the identity in the run folder; on return it is on disk."""
    replace_file(run_folder / IDENTITY, msgspec.json.format(msgspec.json.encode(identity)) + b"\n")


def identity_of(state: BookState) -> RunIdentity:
    """Return the identity that a ledger holds."""
    return RunIdentity(run_id=state.run_id, life=state.life, epoch=state.granted_epoch)


def check_store(
    known: RunIdentity | None,
    stored: BookState | None,
    saved: BookState | None,
    *,
    has_begun: bool,
    restarted: bool,
    run_folder: Path,
    store: str,
) -> None:
    """Refuse a store or a checkpoint that is not this run's, before anything of it is touched.

    Args:
        known: Identity in the run folder.
        stored: Ledger in the store, if any.
        has_begun: True if something has happened in that ledger.
        saved: Ledger of the checkpoint to resume from, if any.
        restarted: True if this broker replaces one that died in the same run.
        run_folder: Folder of the run, for errors.
        store: Place of the store, for errors.

    Raises:
        ConfigError: with the way out.
    """
    if stored is not None and has_begun:
        own = known.run_id if known is not None else saved.run_id if saved is not None else ""
        if stored.run_id and own != stored.run_id:
            whose = "another run" if own else "a run that this folder knows nothing of"
            raise ConfigError(
                f"the store at {store} holds {whose} under this name: choose another run.name, put "
                f"{run_folder / IDENTITY} back if it was lost, or empty the store; "
                "nothing was changed there"
            )
    if known is None:
        return
    if saved is not None and saved.run_id and saved.run_id != known.run_id:
        raise ConfigError(
            f"the checkpoint is of another run than {run_folder / IDENTITY}: start a new run from "
            "its weights (slipstream export, then run.model)"
        )
    if stored is None and (saved is None or restarted):
        raise ConfigError(
            f"the run in {run_folder} has started, and its store at {store} is empty: resume "
            "from the newest checkpoint with `slipstream run --resume auto`, or, where there is no "
            "checkpoint, start a new run (another run.name)"
        )


def begin_life(
    state: BookState,
    known: RunIdentity | None,
    *,
    others: Sequence[BookState] = (),
    epochs: Iterable[int] = (),
    apart: bool = False,
) -> None:
    """Have a ledger give out only ids and epochs that no earlier life gave out.

    Args:
        state: Ledger with which the run continues.
        known: Identity in the run folder.
        others: Other ledgers that were found.
        epochs: Epochs of checkpoints.
        apart: True without the store of the previous life, or without its end.
    """
    found = [state, *others]
    ids = [known.run_id] if known is not None else []
    ids += [state.run_id for state in found]
    lives = [state.life for state in found] + ([known.life] if known is not None else [])
    granted = [max(state.granted_epoch, state.version.epoch) for state in found]
    granted += [*epochs, known.epoch if known is not None else 0]
    state.run_id = next(filter(None, ids), "") or secrets.token_hex(16)
    state.life = max(lives) + apart
    state.granted_epoch = max(granted)
    first = state.life * IDS_PER_LIFE
    state.next_group_id = max(state.next_group_id, first)
    state.next_lease_id = max(state.next_lease_id, first)
