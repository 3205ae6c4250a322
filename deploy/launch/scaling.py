"""Pure: number of generators of a run, by a request or by which pool waits for the other."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from slipstream.deploy.launch.plan import number_of
from slipstream.wire.messages.status import RunStatus

WAITED = 0.25  # share of a window; advisories call a pool starved from here on


@dataclass(frozen=True, slots=True)
class GeneratorBounds:
    """Bounds from the settings. Without a largest number, only requests change the count."""

    smallest: int
    largest: int  # 0: no change without a request

    def __contains__(self, count: int) -> bool:
        return count >= max(1, self.smallest) and (not self.largest or count <= self.largest)


@dataclass(frozen=True, slots=True)
class Waited:
    """Shares of a window that each pool spent waiting, and whether rewards were late."""

    learner: float
    generators: float
    has_reward_backlog: bool


def waited_between(before: RunStatus, after: RunStatus) -> Waited | None:
    """Return how the pools spent the time between two answers of the broker.

    None if a pool has no process in both answers.
    """
    learner = _share_waited(before, after, "learner")
    generators = _share_waited(before, after, "generator")
    if learner is None or generators is None:
        return None
    half_a_batch = after.group_size * after.groups_per_step / 2
    late = after.queue.get("waiting_for_reward", 0)
    return Waited(learner, generators, has_reward_backlog=late >= half_a_batch)


def count_by_load(count: int, waited: Waited, bounds: GeneratorBounds) -> int:
    """Return the number of generators after a window: one more, one fewer, or the same.

    One more while the learner waits and the generators do not; one fewer while only the generators
    wait. If both wait, or rewards are late, another number would change nothing.
    """
    if not bounds.largest or waited.has_reward_backlog:
        return count
    learner_waits, generators_wait = waited.learner >= WAITED, waited.generators >= WAITED
    wanted = count + (learner_waits - generators_wait)
    return min(max(wanted, bounds.smallest, 1), bounds.largest)


def changes(present: Mapping[str, bool], count: int) -> tuple[list[str], list[str]]:
    """Return the generators to start and to end.

    Args:
        present: Generators that have not ended; True for those that stay.
        count: Number that stays. The highest numbers leave first, the lowest are taken first.
    """
    staying = sorted((name for name, stays in present.items() if stays), key=number_of)
    leaving = staying[count:]
    taken = set(map(number_of, present))
    free = (number for number in range(len(present) + count) if number not in taken)
    started = [f"generator-{next(free)}" for _ in range(count - len(staying))]
    return started, leaving[::-1]


def _share_waited(before: RunStatus, after: RunStatus, role: str) -> float | None:
    earlier = {row.name: row for row in before.roles if row.role == role}
    shares = []
    for row in after.roles:
        if row.role != role or (known := earlier.get(row.name)) is None:
            continue
        passed = row.age_s - known.age_s
        if passed <= 0:  # another process under that name
            continue
        waited = (1 - row.busy) * row.age_s - (1 - known.busy) * known.age_s
        shares.append(min(max(waited / passed, 0.0), 1.0))
    return fmean(shares) if shares else None
