"""What the comparison of throughput with TRL computes from a file of results."""

from benchmarks.bars import Bars
from benchmarks.parts import Run
from benchmarks.vs_trl import OURS, POLICIES, Took, compare, jobs_of, medians, system_of

TINY = POLICIES[0]


def _run(side: str, repeat: int, wall_s: float, cpu_s: float) -> Run[Took]:
    return Run(system_of(TINY, "fixed", side), repeat, Took(wall_s, cpu_s))


def test_the_best_of_trl_in_each_figure_is_what_ours_is_compared_with():
    runs, shown = [_run(OURS, 0, 1.0, 2.0), _run("trl-padded-1", 0, 2.0, 1.0)], list[str]()
    runs += [_run("trl-padded-2", 0, 0.5, 4.0)]
    asked = [(TINY, "fixed"), (TINY, "long-tailed")]
    assert compare(runs, Bars(shown.append), asked).splitlines()[2:] == [
        "| 0.8M | fixed | 32.00 | 64.00 (trl-padded-1) | 0.50 | 1.00 | 0.50 (trl-padded-2) |"
    ]
    assert shown == [
        "bar samples_per_cpu_second_fixed_0.8M: 0.500 of TRL's (needs >= 0.7): short",
        "samples_per_cpu_second_long-tailed_0.8M was not run: both sides have to end a repeat",
        "bar samples_per_cpu_second_long-tailed_0.8M: - of TRL's (needs >= 1): short (not run)",
    ]


def test_a_repeat_that_one_side_did_not_end_is_in_no_median():
    runs = [_run(OURS, n, 1.0 + n, 2.0) for n in range(3)]
    runs += [_run("trl-padded-1", n, 4.0, 3.0) for n in range(2)]
    took = medians(runs, TINY, "fixed")
    assert took == {OURS: Took(1.5, 2.0), "trl-padded-1": Took(4.0, 3.0)}
    assert medians(runs[:1] + runs[4:], TINY, "fixed") == {}


def test_sides_take_turns():
    assert list(jobs_of(TINY, "fixed", 2))[:2] == [
        ("0.8M fixed slipstream", 0),
        ("0.8M fixed trl-padded-1", 0),
    ]
    assert len(list(jobs_of(TINY, "long-tailed"))) == 5  # one repeat
