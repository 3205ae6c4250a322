"""A publish between hosts over links of 1 Gbit/s, star and chain, against the arithmetic.

Network namespaces with links shaped by tc (root); a relay, and agents with engines of plain
tensors, as processes. Other load on the machine only adds to the seconds: the fastest one counts.
"""

import argparse
import sys

from benchmarks.bars import Bars
from benchmarks.weightbus.shaped import Shape, measure_shaped

WITHIN = 0.15
_EXAMPLES = """examples:
  python -m benchmarks.bench_chain
  python -m benchmarks.bench_chain --quick"""


def main() -> int:
    """Measure, print bars."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer publishes")
    quick = parser.parse_args().quick
    bars = Bars()
    for name, fanout, publishes in (("star", 0, 4), ("two_chains", 2, 8), ("chain", 1, 16)):
        shape = Shape(fanout=fanout, receivers=4 if name == "two_chains" else 3)
        took_s = measure_shaped(shape, publishes=2 if quick else publishes)
        best_s, expected_s = min(took_s), shape.expected_s
        print(f"{name}: {best_s:.3f} s of {len(took_s)}, the arithmetic says {expected_s:.3f} s")
        bars.at_most(f"{name}_over_arithmetic", best_s / expected_s, "", needs=1 + WITHIN)
        bars.at_least(f"{name}_under_arithmetic", best_s / expected_s, "", needs=1 - WITHIN)
    return bars.exit_code


if __name__ == "__main__":
    sys.exit(main())
