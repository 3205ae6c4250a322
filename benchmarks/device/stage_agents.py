"""Stage 13: environments of several turns beside one turn, as tokens per second of the engine."""

from pathlib import Path

from benchmarks.bench_agents import NEEDS, measured, parser, share_of_one_turn
from benchmarks.device.engines import device_name, has_cuda
from benchmarks.device.report import Report, run_stage

_ON_GPU = (
    *("--sequences", "32", "--trajectories", "64", "--rounds", "3", "--reply-tokens", "192"),
    *("--hidden", "1024", "--heads", "16", "--layers", "12"),
)
_ON_CPU = (
    *("--sequences", "8", "--trajectories", "8", "--rounds", "1", "--reply-tokens", "16"),
    *("--hidden", "64", "--layers", "2"),
)


def work(report: Report, _out: Path) -> None:
    arguments = parser().parse_args(
        [*(_ON_GPU if has_cuda() else _ON_CPU), "--device", device_name(), "--sandbox", "none"]
    )
    if has_cuda():
        arguments.sglang = {
            "mem_fraction_static": 0.5,
            "cuda_graph_max_bs_decode": arguments.sequences,
            "cuda_graph_max_bs_prefill": 2048,  # tokens; larger batches are no graph
        }
    medians = measured(arguments)
    for name, one in medians.items():
        report.fact(f"tokens per second, {name}", round(one.rate))
        report.fact(f"share of the lanes in use, {name}", round(one.used, 4))
    for ms, needs in NEEDS.items():
        share = share_of_one_turn(medians, ms)
        if has_cuda():
            report.at_least(f"agents_{ms}_ms_vs_one_turn", share, "x", needs=needs)
        else:
            report.fact(f"agents_{ms}_ms_vs_one_turn", round(share, 3))


if __name__ == "__main__":
    run_stage("agents", work)
