"""What the comparison of throughput with TRL computes from a file of results."""

from benchmarks.bars import Bars
from benchmarks.vs_trl import OURS, POLICIES, Measured, compare

TINY = POLICIES[0]


def test_the_best_of_trl_in_each_figure_is_what_ours_is_compared_with():
    def line(system: str, wall_s: float, cpu_s: float, repeat: int = 0) -> Measured:
        return Measured(TINY.name, "fixed", system, repeat, wall_s, cpu_s)

    lines, shown = [line(OURS, 1.0, n, repeat=int(n)) for n in (1.0, 2.0, 16.0)], list[str]()
    lines += [line("trl-padded-1", 2.0, 1.0), line("trl-padded-2", 0.5, 4.0)]
    asked = [(TINY, "fixed"), (TINY, "long-tailed")]
    text = compare(lines, Bars(shown.append), asked).splitlines()[2:]
    assert text == [
        "| 0.8M | fixed | 32.00 | 64.00 (trl-padded-1) | 0.50 | 1.00 | 0.50 (trl-padded-2) |"
    ]
    assert shown == [
        "bar samples_per_cpu_second_fixed_0.8M: 0.500 of TRL's (needs >= 0.7): short",
        "samples_per_cpu_second_long-tailed_0.8M was not run: both sides have to run",
        "bar samples_per_cpu_second_long-tailed_0.8M: - of TRL's (needs >= 1): short (not run)",
    ]
