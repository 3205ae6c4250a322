"""What a publish costs: the wire, control calls, end to end, the learner, generation, late joins.

Every part measures its baseline in the same run, in turns. A version has the tensors of
SmolLM2-135M in bfloat16: 269 MB. No GPU is needed; what only one can show is left out without it.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import psutil
import torch

from benchmarks.bars import Bars, NotRun
from benchmarks.weightbus.figures import best, mean_of, spread, table
from benchmarks.weightbus.gpu import measure_gpu
from benchmarks.weightbus.late_join import measure_late_join
from benchmarks.weightbus.learner_side import measure_stall, measure_steps
from benchmarks.weightbus.many_members import measure_many
from benchmarks.weightbus.model import BUCKET_BYTES, MIB, ONE_BILLION, QUICK, SMOLLM2, Sizes
from benchmarks.weightbus.plain_bulk import measure_plain
from benchmarks.weightbus.predicted import predicted_s
from benchmarks.weightbus.rebuild import TIMEOUT_S, measure_rebuild
from benchmarks.weightbus.served import (
    EndToEnd,
    Server,
    measure_control,
    measure_end_to_end,
    measure_loss,
    measure_probe,
    measure_standstill,
    sglang,
)
from benchmarks.weightbus.wire_phase import RAW_BUCKETS, WireFigures, measure_wire

NEEDS_WIRE_SHARE = 0.95
NEEDS_DIGEST_SHARE = 0.10
NEEDS_STEP_GROWTH = 0.10
NEEDS_LOSS = 0.02
NEEDS_LATE_JOIN = 1.3
NEEDS_CONTROL_MS = 15.0
NEEDS_MANY_CPU_S = 0.5
NEEDS_PROBE_SHARE = 0.01
NEEDS_PREDICTED = 0.15
NEEDS_STALL = 1.8
NEEDS_STANDSTILL = 1.2
PUBLISH_EVERY_S = 10.0
NEEDS_PLAIN_SHARE = 0.5
MANY = 1_000
_FREE_FOR_1B = 12 * 1024**3
_FREE_FOR_1B_SERVER = 14 * 1024**3
_EXAMPLES = """examples:
  python -m benchmarks.bench_weightbus
  python -m benchmarks.bench_weightbus --quick
  python -m benchmarks.bench_weightbus --only wire --only late-join"""


class Bench:
    """The parts, and the rows of the table that they print at the end."""

    def __init__(self, *, quick: bool) -> None:
        self.bars = Bars()
        self.rows: list[tuple[str, str]] = []
        self._quick = quick
        self._name = "quick" if quick else "smollm2"
        self._sizes = QUICK if quick else SMOLLM2

    # ---- wire ----------------------------------------------------------------

    def wire(self) -> None:
        """Digests and collective against raw broadcasts."""
        for receivers in (1, 2, 4):
            _show(f"wire: {receivers} receivers")
            rounds = 3 if self._quick else 9
            figures = measure_wire(self._sizes, receivers=receivers, rounds=rounds)
            self._wire_rows(f"{receivers} receivers", figures)
            self._wire_bars(f"_{receivers}", figures.share, figures.digest_share)
        if not self._quick:
            self._wire_1b(ONE_BILLION)

    def _wire_1b(self, sizes: Sizes) -> None:
        _show("wire: 1B parameters")
        free = psutil.virtual_memory().available
        if free < _FREE_FOR_1B:
            few = f"{free / 1024**3:.0f} GiB are free, {_FREE_FOR_1B / 1024**3:.0f} are needed"
            self._wire_bars("_1b", NotRun(few), NotRun(few))
            return
        raw = [size for size in RAW_BUCKETS if size >= 16 * MIB]
        figures = measure_wire(sizes, receivers=1, rounds=3, raw_buckets=raw)
        self._wire_rows("1B parameters", figures)
        self._wire_bars("_1b", figures.share, figures.digest_share)

    def _wire_bars(self, name: str, wire: float | NotRun, digests: float | NotRun) -> None:
        self.bars.at_least("wire_share" + name, wire, "of raw", needs=NEEDS_WIRE_SHARE)
        self.bars.at_most("digest_share" + name, digests, "of CPU", needs=NEEDS_DIGEST_SHARE)

    def _wire_rows(self, name: str, figures: WireFigures) -> None:
        size, _ = figures.raw_best
        turns = figures.by_default
        raw_by_size = ", ".join(
            f"{size // MIB}: {1e3 * statistics.median(seconds):.0f}"
            for size, seconds in figures.raw.items()
        )
        ours_by_size = ", ".join(
            f"{size // MIB}: {1e3 * figures.ours_s(size):.0f}" for size in figures.ours
        )
        _show(f"  raw, ms by MiB of a bucket: {raw_by_size}")
        _show(f"  ours, ms by MiB of a bucket: {ours_by_size}")
        self._row(
            f"wire, {name}, {figures.num_bytes / 1e6:.0f} MB: ms",
            f"{spread([turn.seconds for turn in turns], unit=1e3, digits=0)}, of which digests "
            f"{1e3 * statistics.median(turn.digest_s for turn in turns):.0f}; buckets of "
            f"{BUCKET_BYTES // MIB} MiB",
        )
        self._row(
            f"raw broadcasts, {name}: ms",
            f"{spread(figures.raw[size], unit=1e3, digits=0)}, best at {size // MIB} MiB",
        )
        if figures.ours_shared:
            shared, _ = best(figures.raw_shared)
            self._row(
                f"wire, {name} in one group that they share: ms",
                f"{spread([turn.seconds for turn in figures.ours_shared], unit=1e3, digits=0)}; "
                f"raw {spread(figures.raw_shared[shared], unit=1e3, digits=0)}, best at "
                f"{shared // MIB} MiB; {figures.share_shared:.2f} of raw",
            )
        self._row(
            f"wire, {name}: CPU ms",
            f"{1e3 * statistics.median(turn.cpu_s for turn in turns):.0f}, of which digests "
            f"{1e3 * statistics.median(turn.digest_cpu_s for turn in turns):.0f}; raw "
            f"{1e3 * statistics.median(figures.raw_cpu[size]):.0f}",
        )

    def plain(self) -> None:
        """Buckets over tcp to another host, encrypted and plain."""
        _show("buckets over tcp, encrypted and plain")
        figures = measure_plain(self._sizes, rounds=3 if self._quick else 15)
        for name, one in (("encrypted, xxh3", figures.encrypted), ("plain, keyed", figures.plain)):
            self._row(
                f"buckets to another host, {name}: CPU s per GB, both ends",
                f"{spread(one.wire)}; with digests of both ends {spread(one.received)}; the wire "
                f"took {spread(one.seconds)} s",
            )
        self._row("the same, plain of encrypted, best of each", f"{figures.wire_share:.3f}")
        self.bars.at_most(
            "plain_cpu", figures.wire_share, "of encrypted's", needs=NEEDS_PLAIN_SHARE
        )
        self.bars.at_most(
            "plain_cpu_with_digests",
            figures.received_share,
            "of encrypted's",
            needs=NEEDS_PLAIN_SHARE,
        )

    # ---- a real engine -------------------------------------------------------

    def served(self) -> None:
        """Control calls, end to end and generation, with a real SGLang of a tiny policy."""
        _show("served: SGLang starts")
        with sglang() as server:
            self._control(server)
            self._end_to_end(server, "tiny policy", epoch=10, has_bars=True)
            self._probe(server, "tiny policy", "probe_tiny")
            self._generation(server)

    def served_smollm2(self) -> None:
        """End to end with an engine of the size of SmolLM2-135M."""
        if self._quick:
            return
        _show("served: SGLang starts with 135M parameters")
        with sglang(SMOLLM2) as server:
            figures = self._end_to_end(server, "135M parameters in bfloat16", epoch=1)
            self._predicted(figures)
            self._probe(server, "135M parameters in bfloat16", "probe_135m")

    def _control(self, server: Server) -> None:
        _show("control calls")
        figures = measure_control(server, rounds=50 if self._quick else 300)
        self._row(
            "control of one publish over a collective: ms",
            f"{1e3 * figures.seconds:.1f}: {figures.commands} commands of "
            f"{1e3 * figures.command_s:.2f}, {figures.calls} calls of "
            f"{1e3 * figures.scheduler_call_s:.2f} (HTTP alone {1e3 * figures.call_s:.2f})",
        )

    def _end_to_end(
        self, server: Server, name: str, *, epoch: int, has_bars: bool = False
    ) -> EndToEnd:
        _show(f"end to end: {name}")
        rounds = 3 if self._quick else 21 if has_bars else 7
        figures = measure_end_to_end(server, rounds=rounds, epoch=epoch)
        for way, seconds in figures.seconds.items():
            self._row(
                f"end to end, {name}, {figures.num_bytes / 1e6:.2f} MB, {way}: ms",
                spread(seconds, unit=1e3, digits=1),
            )
        for transport, phases in figures.phases.items():
            text = ", ".join(f"{phase} {1e3 * s:.1f}" for phase, s in phases.items())
            self._row(f"phases, {name}, {transport}: ms", text)
        for transport in ("collective", "tcp", "mapped") if has_bars else ():
            control_ms = 1e3 * statistics.median(figures.seconds[transport])
            self.bars.at_most(f"control_{transport}", control_ms, "ms", needs=NEEDS_CONTROL_MS)
        return figures

    def _predicted(self, figures: EndToEnd) -> None:
        """Compare publishes with the plan's law, given how fast this machine does each part."""
        median_s = {way: statistics.median(seconds) for way, seconds in figures.seconds.items()}
        for transport in ("tcp", "mapped"):
            law_s = predicted_s(figures.num_bytes, median_s, is_mapped=transport == "mapped")
            self._row(
                f"{transport}, predicted and measured: ms",
                f"{1e3 * law_s:.0f}, {1e3 * median_s[transport]:.0f}",
            )
            error = abs(law_s / median_s[transport] - 1)
            self.bars.at_most(f"predicted_{transport}", error, "off", needs=NEEDS_PREDICTED)

    def _probe(self, server: Server, name: str, bar: str) -> None:
        seconds = measure_probe(server, rounds=3 if self._quick else 21)
        self._row(f"the probe of a version, {name}: ms", spread(seconds, unit=1e3, digits=1))
        share = statistics.median(seconds) / PUBLISH_EVERY_S
        self.bars.at_most(
            bar,
            share,
            f"of an engine's time, at one publish per {PUBLISH_EVERY_S:g} s",
            needs=NEEDS_PROBE_SHARE,
        )

    def _generation(self, server: Server) -> None:
        _show("generation under constant load")
        windows, window_s = (4, 2.0) if self._quick else (60, 2.0)
        figures = measure_loss(server, windows=windows, window_s=window_s, every_s=2.0, epoch=30)
        mean = mean_of(figures.losses)
        self._row(
            "generation, one publish per 2 s: tokens/s",
            f"{spread(figures.published, digits=0)}; without {spread(figures.alone, digits=0)}; "
            f"paused {100 * statistics.median(figures.pause_shares):.1f}% of the time",
        )
        self._row(
            "generation, loss beyond the pause, by pair of windows",
            f"{spread(figures.losses)}; windows without a publish differ by "
            f"{100 * figures.noise:.0f}%",
        )
        self._row(
            f"the same, mean of {len(figures.losses)} pairs",
            f"{mean.mean:.3f}, 95% interval {mean.low:.3f} to {mean.high:.3f}; "
            f"a loss of {mean.detectable:.3f} would be seen with a power of 80%: "
            f"{mean.verdict(NEEDS_LOSS)}",
        )
        self.bars.at_most(
            "generation_loss_beyond_pause", mean.high, "of tokens/s, 95%", needs=NEEDS_LOSS
        )

    # ---- the learner ---------------------------------------------------------

    def stall(self) -> None:
        """What the learner waits for."""
        _show("the learner's stall")
        figures = measure_stall(self._name, 5 if self._quick else 15)
        for what in figures.rounds:
            seconds, cpu_s = figures.median(what)
            self._row(
                f"stall, {figures.num_bytes / 1e6:.0f} MB, {what}: ms",
                f"{1e3 * seconds:.0f}, CPU {1e3 * cpu_s:.0f}",
            )
        self.bars.at_most("stall", figures.stall, "x one memcpy", needs=NEEDS_STALL)
        gpu = measure_gpu(self._sizes, rounds=5)
        if gpu is None:
            _show("  no CUDA here: the copy from a GPU, pinned memory and NCCL are not measured")
        else:
            self._row(
                "stall, copy from the GPU: ms",
                f"{1e3 * gpu.into_slot_s:.1f}; into pinned memory {1e3 * gpu.into_pinned_s:.1f}",
            )

    def steps(self) -> None:
        """What steps cost more when every one is published."""
        _show("the learner's steps")
        steps, step_cpu_s = (2, 0.6) if self._quick else (7, 2.0)
        figures = measure_steps(self._name, steps=steps, step_cpu_s=step_cpu_s)
        self._row(
            "a learner step: CPU s",
            f"{spread(figures.without)}; published {spread(figures.with_publish)}; "
            f"beside it the relay {figures.relay:.3f}; the learner alone grows by "
            f"{figures.growth_of_learner:.3f}",
        )
        self.bars.at_most(
            "step_growth", figures.growth, "of CPU time, with the relay's", needs=NEEDS_STEP_GROWTH
        )

    def standstill(self) -> None:
        """How long an engine of 1B parameters stands still, with and without a second copy."""
        if (free := psutil.virtual_memory().available) < _FREE_FOR_1B_SERVER:
            few = NotRun(f"{free / 1024**3:.0f} GiB are free, 14 are needed")
            self.bars.at_most("standstill_1b", few, "x one memcpy", needs=NEEDS_STANDSTILL)
            return
        sizes = QUICK if self._quick else ONE_BILLION
        for shadow in (False, True):
            name = "with a second copy" if shadow else "without"
            _show(f"an engine's pause, {name}")
            with sglang(sizes, shadow=shadow) as server:
                figures = measure_standstill(server, rounds=5)
            memcpy_s = statistics.median(figures.memcpy)
            self._row(
                f"an engine's pause, {figures.num_bytes / 1e6:.0f} MB, {name}: ms",
                f"{spread(figures.stood, unit=1e3, digits=0)}; a memcpy {1e3 * memcpy_s:.0f}; "
                f"until it runs the version {spread(figures.arrived, unit=1e3, digits=0)}",
            )
        share = statistics.median(figures.stood) / memcpy_s
        self.bars.at_most("standstill_1b", share, "x one memcpy", needs=NEEDS_STANDSTILL)

    def late_join(self) -> None:
        """How soon a late joiner is up to date."""
        _show("late joins")
        figures = measure_late_join(self._name, 2 if self._quick else 7)
        self._row(
            "late joiner, until it runs the newest version: ms",
            spread(figures.join, unit=1e3, digits=0),
        )
        phases = ", ".join(
            f"{phase} {1e3 * statistics.median(one[phase] for one in figures.phases):.0f}"
            for phase in figures.phases[0]
        )
        self._row("phases of that: ms", phases)
        self._row(
            "a member that is there, over tcp: ms",
            f"received and loaded {spread(figures.transfer, unit=1e3, digits=0)}, whole publish "
            f"{spread(figures.publish, unit=1e3, digits=0)}; the joiner is "
            f"{figures.ratio_to_publish:.2f} x the latter",
        )
        self.bars.at_most("late_join", figures.ratio, "x one transfer", needs=NEEDS_LATE_JOIN)

    def many(self) -> None:
        """What a publish to a thousand engines costs the relay."""
        _show(f"one relay, {MANY} members")
        figures = measure_many(100 if self._quick else MANY, 2 if self._quick else 7)
        self._row(
            f"one relay, {figures.num_members} members, tcp, a few bytes: CPU s of a publish",
            f"{figures.median_cpu_s:.3f}, with heartbeats {spread(figures.cpu_s)}; "
            f"all have it after {spread(figures.seconds, digits=1)} s; "
            f"heartbeats alone {figures.idle_cpu_s:.3f} of a core",
        )
        self.bars.at_most(
            "relay_cpu_many", figures.median_cpu_s, "CPU s per publish", needs=NEEDS_MANY_CPU_S
        )

    def rebuild(self) -> None:
        """A group of three engines of which one dies or is stopped."""
        _show("rebuild: three engines in one group")
        figures = measure_rebuild(1 if self._quick else 4)
        for what, seconds in (
            ("nothing happened", figures.standing),
            ("one died before it", figures.died),
            (f"one was stopped before it (weightbus.timeout_s = {TIMEOUT_S:g})", figures.stopped),
            ("the one after that", figures.anew),
        ):
            self._row(
                f"a publish to a group of three, {what}: ms", spread(seconds, unit=1e3, digits=0)
            )

    def _row(self, what: str, value: str) -> None:
        self.rows.append((what, value))
        _show(f"  {what}: {value}")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_weightbus",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="a small version, few rounds")
    parts = (
        "wire",
        "plain",
        "stall",
        "steps",
        "standstill",
        "late-join",
        "rebuild",
        "many",
        "served",
        "served-smollm2",
    )
    parser.add_argument(
        "--only", action="append", choices=parts, default=[], metavar="PART", help=", ".join(parts)
    )
    arguments = parser.parse_args()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # read by gloo, here and in all children
    torch.set_num_threads(1)
    bench = Bench(quick=arguments.quick)
    _run(bench, arguments.only or parts)
    print("\n" + table(("measured", "median (smallest to largest)"), bench.rows))
    return bench.bars.exit_code


def _run(bench: Bench, names: Sequence[str]) -> None:
    for name in names:
        part: Callable[[], None] = getattr(bench, name.replace("-", "_"))
        began_s, before = time.monotonic(), psutil.getloadavg()[0]
        part()
        after = psutil.getloadavg()[0]
        _show(f"{name}: {time.monotonic() - began_s:.0f} s, load {before:.1f} to {after:.1f}")


def _show(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
