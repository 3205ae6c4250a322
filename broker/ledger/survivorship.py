"""Measures whether long answers are trained as often as short ones.

Answers dropped for their age were slow, and slow ones are long: a policy whose long answers are
never trained learns to be brief. The lengths of all answers are counted by fate, in buckets of a
quarter of a power of two, so that the count is small however long a run is.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import floor, log2

from slipstream.wire.messages.status import LengthQuartile, Survivorship

TRAINED = "trained"
# Reasons that have to do with how long an answer takes, unlike its content.
BY_AGE = frozenset({"stale", "orphaned", "overlong_response", "lease_exhausted", "poison"})
_PER_DOUBLING = 4
_ENOUGH = 200  # trajectories before anything is reported
_ALARM = 0.1  # difference of the shares dropped, longest quarter against shortest


def bucket_of(num_tokens: int) -> int:
    """Return the bucket of a length in response tokens, >= 1."""
    return floor(_PER_DOUBLING * log2(num_tokens))


def upper_tokens(bucket: int) -> int:
    """Return the largest length of a bucket."""
    return max(1, round(2 ** ((bucket + 1) / _PER_DOUBLING)))


def survivorship_of(
    lengths: Mapping[str, Mapping[int, int]], cancelled: Mapping[str, int], *, drops: bool
) -> Survivorship:
    """Return the share of answers dropped for their age, by length.

    Args:
        lengths: Trajectories by bucket, by fate (trained, or a reason to drop).
        cancelled: Unfinished siblings of dropped groups, by reason. They count to the longest
            quarter: an answer still being written when its group is too old is longer than a
            finished one.
        drops: True if the run drops by age; decides which setting is to be changed.
    """
    all_lengths: Counter[int] = Counter()
    aged: Counter[int] = Counter()
    for fate, counts in lengths.items():
        all_lengths.update(counts)
        if fate in BY_AGE:
            aged.update(counts)
    lost = sum(count for reason, count in cancelled.items() if reason in BY_AGE)
    finished = all_lengths.total()
    quartiles: list[LengthQuartile] = []
    count = dropped = passed = 0
    for bucket in sorted(all_lengths):
        count += all_lengths[bucket]
        dropped += aged[bucket]
        passed += all_lengths[bucket]
        is_last = passed == finished
        if passed * 4 >= finished * (len(quartiles) + 1) or is_last:
            extra = lost if is_last else 0
            quartiles.append(
                LengthQuartile(
                    up_to_tokens=upper_tokens(bucket),
                    trajectories=count + extra,
                    dropped_for_age=dropped + extra,
                )
            )
            count = dropped = 0
    trained = lengths.get(TRAINED, {})
    return Survivorship(
        generated_mean=_mean(all_lengths),
        trained_mean=_mean(trained),
        cancelled=sum(cancelled.values()),
        quartiles=quartiles,
        alarm=_alarm(quartiles, finished + lost, drops=drops),
        lengths=_by_length(all_lengths),
    )


def _by_length(counts: Mapping[int, int]) -> dict[str, int]:
    found: Counter[str] = Counter()  # short buckets may have one length
    for bucket in sorted(counts):
        found[str(upper_tokens(bucket))] += counts[bucket]
    return dict(found)


def _mean(counts: Mapping[int, int]) -> float:
    total = sum(counts.values())
    if not total:
        return 0.0
    middle = 0.5 / _PER_DOUBLING
    return sum(n * 2 ** (b / _PER_DOUBLING + middle) for b, n in counts.items()) / total


def _alarm(quartiles: Sequence[LengthQuartile], total: int, *, drops: bool) -> str:
    if total < _ENOUGH or not quartiles:
        return ""
    shortest, longest = quartiles[0].dropped_share, quartiles[-1].dropped_share
    if longest - shortest <= _ALARM:
        return ""
    setting = (
        'set run.staleness_mode = "wait" or raise run.max_staleness_steps'
        if drops
        else "raise broker.lease_s or sampling.max_response_tokens"
    )
    return (
        f"{longest:.0%} of the longest answers are dropped for the time they take, {shortest:.0%} "
        f"of the shortest: the policy learns to be brief; {setting}"
    )
