"""Deltas: their bytes in real runs, how fast they are applied, and the quickstart over a slow link.

    bytes   SmolLM2-135M in bfloat16 (269 MB) under GRPO by the learner, at three learning rates:
            what goes over the wire for each publish of the steps 20 to 40, of all bytes
    apply   one of these publishes, applied in place, beside a copy of the version and the digests
            of all tensors; in turns, CPU seconds of one core
    link    the quickstart in bfloat16: generators on the learner's host, and on another one at the
            end of a link of 50 Mbit/s with a round trip of 80 ms, in turns; steps per second

The first needs what `make smollm2` installs and 6 GB of disk per rate, the last root. On a machine
where others compute, the last says little.
"""

import argparse
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

import numpy as np
import xxhash

from benchmarks.bars import Bars, NotRun
from benchmarks.weightbus.figures import spread, table
from benchmarks.weightbus.real_run import MODEL, pairs, record, tensors_in
from slipstream.weightbus.version.delta import apply_delta, encode_delta

RATES = ("1e-6", "1e-5", "1e-4")
FIRST, LAST = 20, 40
MOST_SHARE = 0.02  # of all bytes, at the smallest rate
ITEM_BYTES = 2
ROUNDS = 15
LINK_NEEDS = 0.8
_WARM_STEPS = 10
_STEP = re.compile(r"^(\S+) I learner step (\d+) ", re.MULTILINE)
_EXAMPLES = """examples:
  python -m benchmarks.bench_deltas --path /tmp/deltas
  python -m benchmarks.bench_deltas --path /tmp/deltas --only apply"""


class Bench:
    """The parts, and what they found."""

    def __init__(self, path: Path) -> None:
        self.bars = Bars()
        self.rows: list[tuple[str, str]] = []
        self._path = path

    # ---- bytes -------------------------------------------------------------------

    def bytes(self) -> None:
        for rate in RATES:
            name = f"delta_bytes_share_{rate}"
            if not (MODEL / "config.json").exists():
                why = NotRun(f"there is no {MODEL}: `make smollm2` makes it")
                self.bars.at_most(name, why, "of all bytes", needs=MOST_SHARE)
                return
            folder = self._path / f"lr-{rate}"
            record(folder, lr=float(rate), steps=LAST, first=FIRST - 1)
            shares, changed, encoded_s = [], [], []
            for _, before, after in pairs(folder):
                one = measured(before, after)
                shares.append(one[0])
                changed.append(one[1])
                encoded_s.append(one[2])
            what = f"lr {rate}, steps {FIRST} to {LAST} ({len(shares)} publishes)"
            self.rows += [
                (f"{what}: bytes of a delta, % of all", spread(shares, unit=100)),
                (f"{what}: items that changed, %", spread(changed, unit=100)),
                (f"{what}: CPU of encoding, s", spread(encoded_s)),
            ]
            if rate == RATES[0]:
                self.bars.at_most(name, max(shares), "of all bytes", needs=MOST_SHARE)

    # ---- apply -------------------------------------------------------------------

    def apply(self) -> None:
        for rate in RATES:
            found = list(pairs(self._path / f"lr-{rate}"))
            name = f"delta_apply_speed_{rate}"
            if not found:
                if rate == RATES[0]:
                    self.bars.at_least(name, NotRun("no versions: run bytes"), "", needs=1.0)
                continue
            copies, applied, digested = self._turns(*found[-1][1:])
            what = f"lr {rate}: CPU of 269 MB, ms"
            self.rows += [
                (f"{what}, copied", spread(copies, unit=1e3, digits=1)),
                (f"{what}, delta applied in place", spread(applied, unit=1e3, digits=1)),
                (f"{what}, digests of all tensors", spread(digested, unit=1e3, digits=1)),
            ]
            ratios = [copy / apply for copy, apply in zip(copies, applied, strict=True)]
            if rate == RATES[0]:
                self.bars.at_least(name, statistics.median(ratios), "x a copy", needs=1.0)
            else:
                self.rows.append((f"lr {rate}: speed of a copy", spread(ratios, digits=2)))

    def _turns(self, before: Path, after: Path) -> tuple[list[float], list[float], list[float]]:
        places, old = tensors_in(before)
        new = tensors_in(after)[1]
        deltas = [
            (memoryview(encode_delta(old[a:b], new[a:b], ITEM_BYTES)), a, b) for _, a, b in places
        ]
        target = np.frombuffer(bytearray(old), np.uint8)
        source = np.frombuffer(new, np.uint8)
        held = old  # an exclusive or brings it forth and back
        copies, applied, digested = [], [], []

        def apply() -> None:
            for delta, start, end in deltas:
                apply_delta(delta, held[start:end], ITEM_BYTES)

        def digest() -> None:
            for _, start, end in deltas:
                xxhash.xxh3_128_hexdigest(held[start:end])

        for number in range(ROUNDS + 2):
            copy_s = cpu_s(lambda: np.copyto(target, source))
            apply_s, digest_s = cpu_s(apply), cpu_s(digest)
            if number % 2 == 0 and held != new:
                raise RuntimeError("a delta was not exact")
            if number >= 2:
                copies.append(copy_s)
                applied.append(apply_s)
                digested.append(digest_s)
        return copies, applied, digested

    # ---- link --------------------------------------------------------------------

    def link(self, rounds: int) -> None:
        from benchmarks.weightbus.slow_link import LinkRun

        rates: dict[str, list[float]] = {}
        fetched: dict[str, list[float]] = {}
        for number in range(rounds):
            order = ("local", "delta", "full") if number % 2 == 0 else ("full", "delta", "local")
            for way in order:
                with tempfile.TemporaryDirectory(prefix="sp-link-", dir="/tmp") as name:
                    run = LinkRun(Path(name), way)
                    log, sizes = run.result()
                rates.setdefault(way, []).append(steps_per_s(log))
                fetched.setdefault(way, []).extend(sizes)
                print(f"{way}: {rates[way][-1]:.3f} steps/s", flush=True)
        for way, values in rates.items():
            self.rows.append((f"quickstart, {way}: steps per s", spread(values)))
            if fetched[way]:
                sizes = spread(fetched[way], unit=1e-6)
                self.rows.append((f"quickstart, {way}: MB fetched per publish", sizes))
        kept = statistics.median(rates["delta"]) / statistics.median(rates["local"])
        self.bars.at_least("delta_link_rate", kept, "of the local rate", needs=LINK_NEEDS)


def measured(before: Path, after: Path) -> tuple[float, float, float]:
    """Return the share of bytes, that of items which changed, and CPU seconds of encoding."""
    places, old = tensors_in(before)
    new = tensors_in(after)[1]
    sizes: list[int] = []

    def encode() -> None:
        for _, start, end in places:
            delta = encode_delta(old[start:end], new[start:end], ITEM_BYTES)
            sizes.append(min(len(delta), end - start))

    seconds = cpu_s(encode)
    differ = np.frombuffer(old, np.uint16) != np.frombuffer(new, np.uint16)
    return sum(sizes) / len(new), float(differ.mean()), seconds


def cpu_s(work: Callable[[], object]) -> float:
    """Return the CPU seconds of this thread that some work takes."""
    began_s = time.thread_time()
    work()
    return time.thread_time() - began_s


def steps_per_s(log: str) -> float:
    """Return the learner's rate after the first steps, from its log."""
    at = {int(step): datetime.fromisoformat(when) for when, step in _STEP.findall(log)}
    last = max(at)
    return (last - _WARM_STEPS) / ((at[last] - at[_WARM_STEPS]).total_seconds())


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_deltas",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--path", type=Path, required=True, help="folder for runs; is kept")
    parts = ("bytes", "apply", "link")
    parser.add_argument("--only", action="append", choices=parts, default=[])
    parser.add_argument("--rounds", type=int, default=3, help="of the link (3)")
    arguments = parser.parse_args(words)
    bench = Bench(arguments.path.resolve())
    for name in arguments.only or parts:
        if name == "link":
            bench.link(arguments.rounds)
        else:
            getattr(bench, name)()
    print("\n" + table(("measured", "median (smallest to largest)"), bench.rows))
    return bench.bars.exit_code


if __name__ == "__main__":
    sys.exit(main())
