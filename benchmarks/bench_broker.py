"""The broker against its bars: throughput, CPU, many generators, many items, restart, memory.

Every figure is of the real broker (``start-broker``) and its private Redis, appendfsync always.
Rates and CPU are compared within one run of this program, in alternating turns, by medians.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable

from benchmarks.bars import Bars, NotRun
from benchmarks.broker import baselines
from benchmarks.broker.baselines import blob_bytes
from benchmarks.broker.forwarding import PathCost, broker_cpu, forwarding_cpu
from benchmarks.broker.in_flight import (
    GROUPS_PER_STEP,
    SMALL_BYTES,
    cpu_per_item,
    filled,
    push_through,
    restart,
)
from benchmarks.broker.open_loop import RATE, measure_leases
from benchmarks.broker.throughput import Throughput, broker_throughput, median_of

SIZES = {"16KB": 16 * 1024, "128KB": 128 * 1024}
_TURNS = 3
_TURN_S = 4.0
_TUNE_S = 1.2
_MANY, _FEW = 100_000, 1_000
_BUDGET_BYTES = 64 * 1024 * 1024
_EXAMPLES = """examples:
  python -m benchmarks.bench_broker
  python -m benchmarks.bench_broker --only forwarding --only restart
  python -m benchmarks.bench_broker --only throughput --ray-python /opt/ray/bin/python"""


def show(text: str) -> None:
    print(text, flush=True)


def throughput(bars: Bars, ray_python: str) -> None:
    for size, payload_bytes in SIZES.items():
        num_bytes = blob_bytes(payload_bytes)
        tried = {
            way: baselines.set_get_rate(num_bytes, way, _TUNE_S) for way in baselines.SET_GET_WAYS
        }
        best = max(tried, key=lambda way: tried[way])
        for way, rate in tried.items():
            show(f"  {size} SET+GET, {way}: {rate:.0f}/s")
        ours: list[Throughput] = []
        set_get, xadd = [], []
        for _ in range(_TURNS):
            ours.append(broker_throughput(payload_bytes, _TURN_S))
            set_get.append(baselines.set_get_rate(num_bytes, best, _TURN_S / 2))
            xadd.append(baselines.xadd_rate(num_bytes, baselines.Way(64), _TURN_S / 2))
            show(
                f"  {size} broker {ours[-1].rate:.0f}/s, SET+GET {set_get[-1]:.0f}/s, "
                f"XADD {xadd[-1]:.0f}/s"
            )
        mid = median_of(ours)
        show(
            f"  {size} broker: {mid.rate:.0f}/s, {mid.rate * payload_bytes / 1e6:.0f} MB/s; "
            f"CPU per trajectory {mid.broker_us:.0f} us, Redis {mid.redis_us:.0f} us, "
            f"producer and consumer {mid.drivers_us:.0f} us"
        )
        ratio = statistics.median(a.rate / b for a, b in zip(ours, set_get, strict=True))
        bars.at_least(f"broker_vs_set_get_{size}", ratio, f"of SET+GET ({best})", needs=0.6)
        ratio = statistics.median(a.rate / b for a, b in zip(ours, xadd, strict=True))
        bars.at_least(f"broker_vs_xadd_pickle_{size}", ratio, "x XADD of a pickle", needs=1.5)
        against_ray(bars, size, num_bytes, mid.rate, ray_python)
        against_http(bars, size, payload_bytes, mid.rate)


def against_ray(bars: Bars, size: str, num_bytes: int, rate: float, ray_python: str) -> None:
    name = f"broker_vs_ray_queue_{size}"
    python = baselines.python_with_ray(ray_python)
    if isinstance(python, NotRun):
        bars.at_least(name, python, "x", needs=10)
        return
    rates = baselines.ray_rates(python, num_bytes, [1, 8, 64], _TURN_S / 2)
    for batch, other in rates.items():
        show(f"  {size} ray.util.queue, {batch} to a call: {other:.0f}/s")
    show(f"  {size} broker is {rate / rates[1]:.2f} x ray.util.queue with one message to a call")
    best = max(rates, key=lambda batch: rates[batch])
    bars.at_least(name, rate / rates[best], f"x ({best} to a call)", needs=10)


def against_http(bars: Bars, size: str, payload_bytes: int, rate: float) -> None:
    rates = {way: baselines.http_rate(payload_bytes, way, _TUNE_S) for way in baselines.HTTP_WAYS}
    for way, other in rates.items():
        show(f"  {size} HTTP JSON, {baselines.describe_http(way)}: {other:.0f}/s")
    typed = max(other for way, other in rates.items() if way.typed)
    show(f"  {size} broker is {rate / typed:.2f} x HTTP JSON with pydantic models")
    best = max(rates, key=lambda way: rates[way])
    name = baselines.describe_http(best)
    bars.at_least(f"broker_vs_http_json_{size}", rate / rates[best], f"x ({name})", needs=30)


def forwarding(bars: Bars, _ray_python: str) -> None:
    for size, payload_bytes in SIZES.items():
        count = 10_000 if payload_bytes < 100_000 else 2_400
        turns: list[PathCost] = []
        for _ in range(_TURNS):
            whole = broker_throughput(payload_bytes, _TURN_S)
            taken_in, _ = broker_cpu(payload_bytes, count)
            turns.append(
                PathCost(
                    whole_us=whole.broker_us,
                    taken_in_us=1e6 * taken_in,
                    forwarded_us=1e6
                    * min(
                        forwarding_cpu(payload_bytes, count, in_c=in_c) for in_c in (True, False)
                    ),
                )
            )
            show(f"  {size} CPU per trajectory in us: {turns[-1]}, its Redis {whole.redis_us:.0f}")
        taken_in_ratio = statistics.median(turn.taken_in_ratio for turn in turns)
        show(f"  {size} only taken in and acknowledged: {taken_in_ratio:.2f} x forwarding")
        bars.at_most(
            f"broker_cpu_vs_forwarding_{size}",
            statistics.median(turn.whole_ratio for turn in turns),
            "x the cheaper of zmq.proxy and a Python loop",
            needs=3,
        )


def generators(bars: Bars, _ray_python: str) -> None:
    levels: dict[int, list[float]] = {}
    spread: dict[int, list[float]] = {}
    for _ in range(_TURNS):
        for count in (10, 100, 1_000):
            seen = measure_leases(count, seconds=6.0)
            show(
                f"  {count} generators, {RATE:g} leases/s due, {seen.count} in 6 s: CPU per lease "
                f"{seen.broker_us:.0f} us (Redis {seen.redis_us:.0f}), "
                f"latency p50 {seen.p50_ms:.2f} ms p99 {seen.p99_ms:.2f} ms"
            )
            levels.setdefault(count, []).append(seen.broker_us)
            spread.setdefault(count, []).append(seen.p99_ms / seen.p50_ms)
    ratio = statistics.median(levels[1_000]) / statistics.median(levels[10])
    bars.at_most("lease_cpu_1000_vs_10_generators", ratio, "x", needs=1.3)
    for count, ratios in spread.items():
        bars.at_most(
            f"lease_p99_vs_p50_{count}_generators", statistics.median(ratios), "x", needs=10
        )


def items(bars: Bars, _ray_python: str) -> None:
    costs: dict[int, float] = {}
    for count in (_FEW, _MANY):
        with filled(count, SMALL_BYTES) as (broker, _):
            runs = []
            steps = 20
            for turn in range(_TURNS):
                own, redis = cpu_per_item(broker, steps=steps, first_step=turn * steps)
                runs.append(own)
                show(
                    f"  {count} in flight: {own:.0f} us CPU per item of {SMALL_BYTES} bytes from "
                    f"its issue to its sealing (Redis {redis:.0f} us), "
                    f"{steps * GROUPS_PER_STEP} items"
                )
            costs[count] = statistics.mean(runs)  # with the snapshots that fall into some turns
    bars.at_most("item_cpu_100000_vs_1000_in_flight", costs[_MANY] / costs[_FEW], "x", needs=1.3)


def restarts(bars: Bars, _ray_python: str) -> None:
    for size, payload_bytes in {"256B": SMALL_BYTES, "16KB": SIZES["16KB"]}.items():
        with filled(_MANY, payload_bytes) as (broker, folder):
            back = restart(broker, folder)
        show(
            f"  restart from {_MANY} items of {size}: Redis alone {back.redis_s:.2f} s for "
            f"{back.aof_bytes / 1e6:.0f} MB, broker and Redis together {back.whole_s:.2f} s, "
            f"{back.whole_s / back.redis_s:.2f} x"
        )
        ratio = back.broker_s / back.redis_s
        bars.at_most(f"restart_after_redis_vs_redis_load_{size}", ratio, "x", needs=2)


def replay(bars: Bars, _ray_python: str) -> None:
    kept = push_through(_BUDGET_BYTES, SIZES["16KB"], times=10)
    show(
        f"  {kept.pushed_bytes / _BUDGET_BYTES:.1f} x the replay budget trained, none of it sealed"
    )
    for name, value, most in (("rss", kept.rss, 2), ("redis", kept.redis, 3), ("aof", kept.aof, 6)):
        bars.at_most(f"replay_{name}", value / _BUDGET_BYTES, "x the budget at most", needs=most)
    bars.at_most("replay_growth", kept.growth, "last third over middle third", needs=1.1)


PARTS: dict[str, Callable[[Bars, str], None]] = {
    "throughput": throughput,
    "forwarding": forwarding,
    "generators": generators,
    "items": items,
    "restart": restarts,
    "replay": replay,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_broker",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", action="append", choices=list(PARTS), help="this part alone")
    parser.add_argument("--ray-python", default="", metavar="PATH", help="a Python that has ray")
    arguments = parser.parse_args()
    bars, began = Bars(), time.monotonic()
    for name in arguments.only or PARTS:
        show(f"{name}:")
        PARTS[name](bars, arguments.ray_python)
    show(f"took {time.monotonic() - began:.0f} s")
    return bars.exit_code


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
