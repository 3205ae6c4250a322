"""Pure: how many generators a run should have, by a request or by who waits for whom."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from slipstream.deploy.launch.plan import number_of
from slipstream.wire.messages.status import RunStatus

WAITED = 0.25  # share of a window; the advisories call a pool starved from there on


@dataclass(frozen=True, slots=True)
class Bounds:
    """What settings allow. Without a largest number the count follows requests alone."""

    smallest: int
    largest: int  # 0: never by itself

    def __contains__(self, count: int) -> bool:
        return count >= max(1, self.smallest) and (not self.largest or count <= self.largest)


@dataclass(frozen=True, slots=True)
class Waited:
    """Shares of a window that the pools spent waiting, and rewards that were late."""

    learner: float
    generators: float
    has_reward_backlog: bool


def waited_between(before: RunStatus, after: RunStatus) -> Waited | None:
    """Return how the time between two answers of the broker was spent.

    None where no process of one of the pools was there at both.
    """
    learner = _share_waited(before, after, "learner")
    generators = _share_waited(before, after, "generator")
    if learner is None or generators is None:
        return None
    half_a_batch = after.group_size * after.groups_per_step / 2
    late = after.queue.get("waiting_for_reward", 0)
    return Waited(learner, generators, has_reward_backlog=late >= half_a_batch)


def count_by_load(count: int, waited: Waited, bounds: Bounds) -> int:
    """Return the number of generators after a window: one more, one fewer, or as many.

    One more while the learner waits for them and they wait for nothing, one fewer while they wait
    for the learner. Where both wait, or rewards are late, another number would change nothing.
    """
    if not bounds.largest or waited.has_reward_backlog:
        return count
    learner_waits, generators_wait = waited.learner >= WAITED, waited.generators >= WAITED
    wanted = count + (learner_waits - generators_wait)
    return min(max(wanted, bounds.smallest, 1), bounds.largest)


def changes(present: Mapping[str, bool], count: int) -> tuple[list[str], list[str]]:
    """Return the generators to be started and to be ended.

    Args:
        present: those that have not ended: True while one is to stay.
        count: how many are to stay. The highest numbers leave first, the lowest are taken first.
    """
    staying = sorted((name for name, stays in present.items() if stays), key=number_of)
    leaving = staying[count:]
    taken = set(map(number_of, present))
    free = (number for number in range(len(present) + count) if number not in taken)
    started = [f"generator-{next(free)}" for _ in range(count - len(staying))]
    return started, leaving[::-1]


def _share_waited(before: RunStatus, after: RunStatus, role: str) -> float | None:
    earlier = {one.name: one for one in before.roles if one.role == role}
    shares = []
    for one in after.roles:
        if one.role != role or (known := earlier.get(one.name)) is None:
            continue
        passed = one.age_s - known.age_s
        if passed <= 0:  # another process of that name
            continue
        waited = (1 - one.busy) * one.age_s - (1 - known.busy) * known.age_s
        shares.append(min(max(waited / passed, 0.0), 1.0))
    return fmean(shares) if shares else None
