"""Pure: time that a pipeline's stages take for microbatches of different sizes."""

from collections.abc import Iterator, Sequence


def pipeline_span(work: Sequence[float], stages: int) -> float:
    """Return the time of a step by the 1F1B schedule; with one stage the sum of ``work``.

    ``work`` is the time of each microbatch in one stage, forward and backward, in order. Stages are
    equal, a backward pass takes twice its forward pass, and data sent arrives at once. A stage
    runs a forward pass for each stage after it, then forward and backward passes alternately
    (Narayanan et al. 2021, arXiv:2104.04473, section 2.2).
    """
    if stages == 1:
        return sum(work)
    passes = [_passes(len(work), ahead=stages - 1 - stage) for stage in range(stages)]
    upcoming = [next(stage_passes, None) for stage_passes in passes]
    forward_done = [[0.0] * len(work) for _ in range(stages + 1)]  # row 0: the data is there
    backward_done: list[list[float]] = [[] for _ in range(stages)] + [[0.0] * len(work)]
    num_forward = [len(work)] + [0] * stages
    free_at = [0.0] * stages
    remaining = 2 * len(work) * stages
    while remaining:
        for stage in range(stages):
            while (one := upcoming[stage]) is not None:
                is_forward, k = one
                if is_forward:
                    if num_forward[stage] <= k:
                        break
                    free_at[stage] = max(free_at[stage], forward_done[stage][k]) + work[k] / 3
                    forward_done[stage + 1][k] = free_at[stage]
                    num_forward[stage + 1] = k + 1
                else:
                    if len(backward_done[stage + 1]) <= k:
                        break
                    begin = max(free_at[stage], backward_done[stage + 1][k])
                    free_at[stage] = begin + 2 * work[k] / 3
                    backward_done[stage].append(free_at[stage])
                upcoming[stage] = next(passes[stage], None)
                remaining -= 1
    return max(free_at)


def _passes(number: int, *, ahead: int) -> Iterator[tuple[bool, int]]:
    """Yield the passes of one stage in order: (is it a forward pass, microbatch)."""
    ahead = min(ahead, number)
    for k in range(ahead):
        yield True, k
    for k in range(number):
        if ahead + k < number:
            yield True, ahead + k
        yield False, k
