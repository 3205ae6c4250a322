"""Turns the cumulative counts of a run's state into changes since the last snapshot."""

from operator import sub
from typing import NamedTuple

from slipstream.wire.messages.status import RoleStatus, RunStatus
from slipstream.wire.process.phases import ACT, WAIT


class Seen(NamedTuple):
    """Counters of a process when it was sampled."""

    age_s: float
    waited_s: float
    worked_s: float
    tokens: float
    acted_s: float = 0.0  # part of worked_s in which environments answered and the engine idled

    @classmethod
    def of(cls, role: RoleStatus) -> "Seen":
        """Return the cumulative count that a process reports."""
        waited = role.phase_seconds.get(WAIT, 0.0)
        worked = sum(role.phase_seconds.values()) - waited
        acted = role.phase_seconds.get(ACT, 0.0)
        return cls(role.age_s, waited, worked, role.tokens_per_second * role.age_s, acted)

    def since(self, before: "Seen | None") -> "Seen":
        """Return the difference since an earlier sample; all of it after a restart."""
        if before is None or self.age_s < before.age_s:
            return self
        return Seen(*map(sub, self, before))

    @property
    def busy(self) -> float | None:
        """Share of the time that was not waiting; None if nothing was reported."""
        return self._share(self.worked_s)

    @property
    def acted(self) -> float | None:
        """Share of the time that was up to environments alone; None if nothing was reported."""
        return self._share(self.acted_s)

    def _share(self, seconds: float) -> float | None:
        total = self.worked_s + self.waited_s
        return min(1.0, max(0.0, seconds / total)) if total > 0 else None


class RunRates:
    """Remembers the last snapshot."""

    def __init__(self) -> None:
        self._seen: dict[str, Seen] = {}

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
        seen: dict[str, Seen] = {}
        for role in status.roles:
            now = seen[role.name] = Seen.of(role)
            done = now.since(self._seen.get(role.name))
            if (busy := done.busy) is not None:
                sample[f"busy:{role.name}"] = busy
            if role.acting is not None:
                sample["acting"] = (sample.get("acting") or 0.0) + role.acting
                sample[f"acted:{role.name}"] = done.acted
            if role.role in _TOKEN_ROLES:
                name = f"tokens:{role.role}"
                rate = max(0.0, done.tokens) / max(done.age_s, 1e-9)
                sample[name] = (sample.get(name) or 0.0) + rate
        self._seen = seen
        return sample


_QUEUES = (
    *("ready_groups", "leased_groups", "waiting_for_reward", "eval_unscored", "being_scored"),
    "dead_letters",
)
_TOKEN_ROLES = {"generator", "learner"}
