"""Print, per process of a finished run, how its time splits into phases.

usage: python benchmarks/profile_learner_step.py runs/quickstart
"""

import json
import sys
from pathlib import Path


def main() -> int:
    summary = json.loads((Path(sys.argv[1]) / "summary.json").read_text())
    print("| process | seconds | share of each phase |")
    print("|---|---|---|")
    for role in summary["roles"]:
        phases = role["phase_seconds"]
        total = sum(phases.values())
        shares = sorted(phases.items(), key=lambda item: -item[1])
        text = ", ".join(f"{name} {seconds / total:.1%}" for name, seconds in shares)
        print(f"| {role['name']} | {total:.0f} | {text} |")
    print()
    print("| phase of a publish | mean ms |")
    print("|---|---|")
    for phase, seconds in summary["publish_seconds"].items():
        print(f"| {phase} | {1000 * seconds:.0f} |")
    rates = summary["tokens_per_second"]
    print()
    print(", ".join(f"{role} {rate:.0f} tokens/s" for role, rate in rates.items()))
    print(f"{summary['steps']} steps in {summary['elapsed_s']:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
