"""Stage 13: environments of several turns beside one turn, as tokens per second of the engine."""

import itertools
from contextlib import closing
from pathlib import Path

from benchmarks.agent_trajectories import Measured
from benchmarks.bench_agents import (
    LATENCIES_MS,
    SETTINGS,
    Bench,
    Setting,
    medians_of,
    parser,
    share_of_one_turn,
)
from benchmarks.device.engines import device_name, has_cuda
from benchmarks.device.report import Report, run_stage

_NEEDS = {32: 0.9, 128: 0.95}  # shares of one turn's tokens per second, by sequences
_ON_GPU = (
    *("--sequences", "32,128", "--seconds", "4", "--rounds", "3"),
    *("--hidden", "1024", "--heads", "16", "--layers", "12"),
)
_ON_CPU = (
    *("--sequences", "8,16", "--seconds", "1", "--rounds", "1"),
    *("--shortest", "8", "--longest", "32"),
)


def _flags(sequences: int) -> dict[str, str | int | float | bool]:
    """Return SGLang's settings beside the device's defaults, so that it starts soon."""
    if not has_cuda():
        return {}
    return {
        "mem_fraction_static": 0.5,
        "cuda_graph_max_bs_decode": sequences,
        "cuda_graph_max_bs_prefill": 2048,  # tokens; larger batches are no graph
    }


def work(report: Report, _out: Path) -> None:
    arguments = parser().parse_args(
        [*(_ON_GPU if has_cuda() else _ON_CPU), "--device", device_name(), "--sandbox", "none"]
    )
    arguments.sglang = _flags
    for index, sequences in enumerate(arguments.sequences):
        with report.part(f"{sequences} sequences"):
            share_s = report.left_s / (len(arguments.sequences) - index)
            _part(report, Bench(arguments, sequences), sequences, until_s=report.left_s - share_s)


def _part(report: Report, bench: Bench, sequences: int, *, until_s: float) -> None:
    """Measure one number of sequences; ``until_s`` is the time that others need afterwards.

    The first round is whole. Another one begins if there is time for it.
    """
    found: list[tuple[Setting, Measured]] = []
    with closing(bench.measurements()) as measurements:
        began_s = report.left_s
        while in_round := list(itertools.islice(measurements, len(SETTINGS))):
            found += in_round
            took_s, began_s = began_s - report.left_s, report.left_s
            if began_s - took_s < until_s:
                break
    medians = medians_of(found)
    for setting, one in medians.items():
        report.fact(f"tokens per second, {sequences} sequences, {setting.name}", round(one.rate))
        report.fact(f"share in use, {sequences} sequences, {setting.name}", round(one.used, 4))
    for ms in LATENCIES_MS:
        share = share_of_one_turn(medians, ms)
        name = f"agents_{sequences}_{ms}_ms_vs_one_turn"
        if has_cuda():
            report.at_least(name, share, "x", needs=_NEEDS[sequences])
        else:
            report.fact(name, round(share, 3))


if __name__ == "__main__":
    run_stage("agents", work)
