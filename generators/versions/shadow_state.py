"""Pure: which version a shadow holds, and what may be done with it.

A shadow is a second copy of an engine's weights on its device. A version is loaded into it while
the engine generates, and becomes live by a copy on the device. One that is only partly there is
never copied.
"""

from enum import IntEnum
from typing import Literal, NamedTuple

from slipstream.wire.errors import PublishError

_ROOM = 4  # weights that must fit into what the cache would get
Holding = Literal["nothing", "a part", "all", "a failure"]


class Readiness(IntEnum):
    """Answer of a rank that is asked for a version; the lowest of an engine's ranks is its own."""

    FAILED = 0
    LOADING = 1
    READY = 2


class ShadowState(NamedTuple):
    """Contents of a shadow; ``version`` is a label."""

    holding: Holding = "nothing"
    version: str = ""
    why: str = ""  # reason of a failure
    is_unwanted: bool = False  # another version was asked for, by another agent


class ShadowReply(NamedTuple):
    """Result of a question."""

    state: ShadowState
    readiness: Readiness
    begins: bool = False  # the load of the version that was asked for
    why: str = ""


def ask(state: ShadowState, version: str) -> ShadowReply:
    """Ask for a version to be loaded; may be asked again until it is there, or has failed.

    A failure is answered once: the next question begins the load again. A load of another version
    is given up, and is waited for.
    """
    is_same = state.version == version and not state.is_unwanted
    match state.holding:
        case "a part":
            kept = state if is_same else state._replace(is_unwanted=True)
            return ShadowReply(kept, Readiness.LOADING)
        case "all" if is_same:
            return ShadowReply(state, Readiness.READY)
        case "a failure" if is_same:
            return ShadowReply(ShadowState(), Readiness.FAILED, why=state.why)
        case _:
            return ShadowReply(ShadowState("a part", version), Readiness.LOADING, begins=True)


def ended(state: ShadowState, why: str | None) -> ShadowState:
    """Return the state after a load; ``why`` is the reason if it failed, else None."""
    if state.is_unwanted:
        return ShadowState()
    if why is not None:
        return ShadowState("a failure", state.version, why)
    return ShadowState("all", state.version)


def check_adoptable(state: ShadowState, version: str) -> None:
    """Check that a version may be copied over the live weights.

    Raises:
        PublishError: the shadow does not hold it, or not all of it.
    """
    if state.holding != "all" or state.version != version:
        of = f" of {state.version}" if state.version else ""
        raise PublishError(f"the shadow holds {state.holding}{of}, not {version}")


def has_room(num_bytes: float, *, free: float) -> bool:
    """Return whether a device keeps a shadow: it takes a quarter of what the cache gets, at most.

    Args:
        num_bytes: Bytes of a rank's weights.
        free: Bytes that the cache of keys and values would get without a shadow.
    """
    return 0 < _ROOM * num_bytes <= free
