"""Pure: the state of a staleness target for clients, and as figures of a learner step."""

from slipstream.broker.ledger.throttle import StalenessController, Throttle
from slipstream.wire.messages.status import ThrottleChange, ThrottleStatus

_SHOWN = 20  # changes


def throttle_of(controller: StalenessController | None) -> ThrottleStatus | None:
    """Return what is in force and why; None without a target."""
    if controller is None:
        return None
    now, target = controller.throttle, controller.target
    return ThrottleStatus(
        target=f"{target.name} = {target.value:g}",
        bound=now.bound,
        in_flight=now.in_flight,
        most_in_flight=controller.most_in_flight,
        excess=controller.excess,
        changes=tuple(map(_change, list(controller.changes)[-_SHOWN:])),
    )


def throttle_figures(controller: StalenessController | None) -> dict[str, float]:
    """Return what is in force as figures of a learner step."""
    if controller is None:
        return {}
    now = controller.throttle
    return {"staleness/bound_in_force": now.bound, "staleness/groups_allowed": now.in_flight}


def _change(one: Throttle) -> ThrottleChange:
    return ThrottleChange(
        step=one.step, bound=one.bound, in_flight=one.in_flight, reason=one.reason
    )
