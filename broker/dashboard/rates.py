"""Turns what a run's state counts since the beginning into what happened since the last look."""

from dataclasses import dataclass

from wire.phases import WAIT
from wire.status import RoleStatus, RunStatus


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a process had done when it was looked at last."""

    age_s: float
    waited_s: float
    worked_s: float
    tokens: float


class Rates:
    """Remembers the last look."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def take(self, status: RunStatus) -> dict[str, float | None]:
        """Return one sample of a run: values by the names of the page's series."""
        sample: dict[str, float | None] = {
            "issued": status.issued,
            "trained": status.trained,
            "in_flight": sum(status.in_flight.values()),
            "queue_age_s": status.queue_age_s,
            "answers": sum(role.trajectories for role in status.roles),
            "retracted": sum(role.retracted for role in status.roles),
        }
        for name in _QUEUES:
            sample[f"queue:{name}"] = status.queue.get(name, 0)
        for reason, count in status.dropped.items():
            sample[f"dropped:{reason}"] = count
        for place, lags in (("in_flight", status.lags_in_flight), ("queue", status.lags_in_queue)):
            for lag in range(status.max_staleness_steps + 1):
                sample[f"staleness_{place}:{lag}"] = lags.get(str(lag), 0)
        sample |= status.memory
        for member in status.members:
            sample[f"version:{member.name}"] = member.version.step if member.version else None
        sample.update(self._of_roles(status.roles))
        return sample

    def _of_roles(self, roles: list[RoleStatus]) -> dict[str, float]:
        sample: dict[str, float] = {}
        seen: dict[str, _Seen] = {}
        for role in roles:
            now = seen[role.name] = _look(role)
            before = self._seen.get(role.name)
            if before is None or now.age_s < before.age_s:
                before = _Seen(0.0, 0.0, 0.0, 0.0)  # it has just begun
            if (busy := _busy(before, now)) is not None:
                sample[f"busy:{role.name}"] = busy
            if role.role in _TOKEN_ROLES:
                lasted_s = max(now.age_s - before.age_s, 1e-9)
                rate = max(0.0, now.tokens - before.tokens) / lasted_s
                name = f"tokens:{role.role}"
                sample[name] = sample.get(name, 0.0) + rate
        self._seen = seen
        return sample


_QUEUES = ("ready_groups", "leased_groups", "waiting_for_reward", "being_scored", "dead_letters")
_TOKEN_ROLES = {"generator", "learner"}


def _look(role: RoleStatus) -> _Seen:
    waited = role.phase_seconds.get(WAIT, 0.0)
    worked = sum(role.phase_seconds.values()) - waited
    return _Seen(role.age_s, waited, worked, role.tokens_per_second * role.age_s)


def _busy(before: _Seen, now: _Seen) -> float | None:
    """Return the share of the interval that was no waiting; None if nothing was reported."""
    worked, waited = now.worked_s - before.worked_s, now.waited_s - before.waited_s
    total = worked + waited
    return min(1.0, max(0.0, worked / total)) if total > 0 else None
