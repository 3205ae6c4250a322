"""How a learner step is divided: number of microbatches, balance of replicas, time in a pipeline.

Plans of `learner.batches.plan` for three arrays of 4,096 lengths, beside those of the greedy rule
that it replaced: longest first to the replica with the fewest tokens, first fit within a replica.
FLOPs are those of Qwen2.5-7B. Every figure but the seconds is exact and follows from the arrays in
recorded/sequence_lengths.json, which `--draw` wrote. They are drawn, not measured. 512 groups of 8;
medians in tokens, deviations of logarithms:

    short_math   prompts 90 (deviation 0.4), answers 480 (0.35 between groups, 0.4 within one), at
                 most 3,072.
    long_cot     prompts 120 (0.4); right answers 5,500 and wrong ones three times as long, as
                 DeepScaleR found on AIME (0.5, 0.4). A group's share of right ones is Beta(2, 3).
                 At most 32,768 in all, where 7% are cut.
    multi_turn   8,400, deviation 1.0 (0.8, 0.6): median and deviation of the first 76 requests of
                 Mooncake's conversation trace (FAST'25), input and output together. At most
                 65,536, where 2% are cut.

The time of coupled replicas takes each microbatch to be as long as the largest in its place over
all of them, in four stages by 1F1B where it is a pipeline. 1.0 is a step without any wait.
"""

import argparse
import json
import time
from dataclasses import dataclass, replace
from functools import cache
from itertools import zip_longest
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.bars import Bars
from slipstream.learner.batches.packing import TrainTrajectory, pack
from slipstream.learner.batches.plan import MinibatchPlan, plan_step
from slipstream.learner.batches.schedule import pipeline_span
from slipstream.wire.models.flops import SequenceCost
from slipstream.wire.models.hf_config import HfConfig

RECORDED = Path(__file__).parent / "recorded" / "sequence_lengths.json"
QWEN2_5_7B = SequenceCost.of(
    HfConfig(
        model_type="qwen2",
        vocab_size=152_064,
        hidden_size=3_584,
        intermediate_size=18_944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
    )
)
MAX_TOKENS = {"short_math": 8_192, "long_cot": 32_768, "multi_turn": 65_536}
STAGES = 4
_EXAMPLES = """examples:
  python -m benchmarks.bench_packing
  python -m benchmarks.bench_packing --markdown
  python -m benchmarks.bench_packing --draw"""

Lengths = list[int]
Floats = NDArray[np.float64]


@cache
def recorded() -> dict[str, Lengths]:
    return json.loads(RECORDED.read_text("utf-8"))


# ---- plans and what they are worth -------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """How many trajectories for how many replicas, and how these depend on each other."""

    name: str
    trajectories: int
    replicas: int
    coupled: bool = False
    stages: int = 1

    @property
    def multiple_of(self) -> int:
        return self.stages if self.coupled else 1


DATA_PARALLEL = Case("16", 4_096, 16)
FEW_EACH = Case("64, 8 trajectories each", 512, 64)
EXPERTS = Case("16, coupled by experts", 4_096, 16, coupled=True)
PIPELINE = Case("16, coupled by pipelines", 4_096, 16, coupled=True, stages=STAGES)
MANY = Case("64, coupled by pipelines", 4_096, 64, coupled=True, stages=STAGES)
CASES = (DATA_PARALLEL, FEW_EACH, EXPERTS, PIPELINE, MANY)


@dataclass(frozen=True, slots=True)
class Worth:
    """Figures of a plan; 1.0 is the best there can be."""

    microbatches: float  # over ceil(tokens / max_tokens)
    of_needed: float  # microbatches over the least number that gives every replica its equal number
    balance: float  # FLOPs of the heaviest replica over the mean, or over the heaviest sequence's
    time: float  # of coupled replicas, over the mean FLOPs of one


def lengths_of(name: str, case: Case) -> Lengths:
    return recorded()[name][: case.trajectories]


@cache
def planned(name: str, case: Case) -> MinibatchPlan:
    lengths = lengths_of(name, case)
    (plan,) = plan_step(
        lengths,
        [QWEN2_5_7B.flops(length) for length in lengths],
        replicas=case.replicas,
        minibatches=1,
        max_tokens=MAX_TOKENS[name],
        coupled=case.coupled,
        multiple_of=case.multiple_of,
        stages=case.stages,
    )
    return plan


@cache
def greedy(name: str, case: Case) -> MinibatchPlan:
    """Return the plan of the rule before; empty microbatches at the end where numbers are equal."""
    lengths = lengths_of(name, case)
    bins: list[list[list[int]]] = [[] for _ in range(case.replicas)]
    rooms: list[list[int]] = [[] for _ in range(case.replicas)]
    load = [0] * case.replicas
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        replica = min(range(case.replicas), key=lambda r: (load[r], r))
        load[replica] += lengths[index]
        mine, room, need = bins[replica], rooms[replica], lengths[index]
        fitting = next((b for b, free in enumerate(room) if free >= need), len(mine))
        if fitting == len(mine):
            mine.append([])
            room.append(MAX_TOKENS[name])
        mine[fitting].append(index)
        room[fitting] -= need
    number = -(-max(map(len, bins)) // case.multiple_of) * case.multiple_of
    return MinibatchPlan(
        tuple(
            tuple(map(tuple, mine)) + ((),) * (number - len(mine) if case.coupled else 0)
            for mine in bins
        )
    )


def worth(plan: MinibatchPlan, name: str, case: Case) -> Worth:
    lengths = lengths_of(name, case)
    flops = [
        [sum(QWEN2_5_7B.flops(lengths[i]) for i in indices) for indices in share]
        for share in plan.microbatches
    ]
    loads = [sum(share) for share in flops]
    mean = sum(loads) / len(loads)
    number = sum(map(len, flops))
    least = -(-sum(lengths) // MAX_TOKENS[name])
    unit = case.replicas * case.multiple_of if case.coupled else 1
    places = [max(place) for place in zip_longest(*flops, fillvalue=0.0)]
    return Worth(
        microbatches=number / least,
        of_needed=number / max(case.replicas, -(-least // unit) * unit),
        balance=max(loads) / max(mean, QWEN2_5_7B.flops(max(lengths))),
        time=pipeline_span(places, case.stages) / mean,
    )


def padding(name: str, case: Case) -> int:
    """Return tokens of a replica's packed microbatches that are of no sequence."""
    lengths, surplus = lengths_of(name, case), 0
    for indices in planned(name, case).microbatches[0]:
        sequences = [
            TrainTrajectory(
                token_ids=np.zeros(lengths[i], np.int32),
                loss_mask=np.ones(lengths[i], np.bool_),
                behavior_logprobs=np.zeros(lengths[i], np.float32),
                temperature=1.0,
            )
            for i in indices
        ]
        packed = pack(sequences, torch.device("cpu"))
        surplus += len(packed.token_ids) - sum(lengths[i] for i in indices)
    return surplus


# ---- the arrays --------------------------------------------------------------

NUM_GROUPS, GROUP_SIZE = 512, 8
_SEED = 2_024


def drawn() -> dict[str, Lengths]:
    random = np.random.default_rng(_SEED)
    shape = (NUM_GROUPS, GROUP_SIZE)

    def around(median: Floats | float, deviation: float, each: tuple[int, int]) -> Floats:
        return median * np.exp(random.normal(0, deviation, each))

    each_group = (NUM_GROUPS, 1)
    short = around(90, 0.4, each_group) + np.minimum(
        around(around(480, 0.35, each_group), 0.4, shape), 3_072
    )
    is_right = random.random(shape) < random.beta(2, 3, each_group)
    answers = around(np.where(is_right, 5_500, 16_500), 0.4, shape) * around(1, 0.5, each_group)
    long = np.minimum(around(120, 0.4, each_group) + answers, 32_768)
    turns = np.minimum(around(around(8_400, 0.8, each_group), 0.6, shape), 65_536)
    arrays = {"short_math": short, "long_cot": long, "multi_turn": turns}
    return {name: array.astype(int).flatten().tolist() for name, array in arrays.items()}


# ---- figures -----------------------------------------------------------------


def markdown() -> str:
    """Return the table of docs/performance.md."""
    lines = [
        "| lengths | replicas | microbatches, of needed | balance | time |",
        "|---|---|---:|---:|---:|",
    ]
    for name in MAX_TOKENS:
        for case in CASES:
            ours, before = (worth(rule(name, case), name, case) for rule in (planned, greedy))
            times = f"{ours.time:.3f}; {before.time:.3f}" if case.coupled else "-"
            lines.append(
                f"| {name} | {case.name} | {ours.of_needed:.3f}; {before.of_needed:.3f} "
                f"| {ours.balance:.4f}; {before.balance:.4f} | {times} |"
            )
    return "\n".join(lines)


def measure() -> int:
    bars = Bars()
    for name in MAX_TOKENS:
        figures = {case: worth(planned(name, case), name, case) for case in CASES}
        before = {case: worth(greedy(name, case), name, case) for case in CASES}
        first, first_before = figures[DATA_PARALLEL], before[DATA_PARALLEL]
        print(f"{name}: greedy has {first_before.microbatches:.3f} of ceil(tokens / max_tokens)")
        bars.at_most(
            f"{name} microbatches", first.microbatches, "of ceil(tokens / max)", needs=1.02
        )
        for case, found in figures.items():
            print(f"{name}, {case.name}: greedy has balance {before[case].balance:.4f}")
            bars.at_most(f"{name} balance, {case.name}", found.balance, "of the bound", needs=1.01)
        for case in (EXPERTS, PIPELINE, MANY):
            bars.at_most(
                f"{name} microbatches, {case.name}",
                figures[case].of_needed,
                "of needed",
                needs=1.02,
            )
        for case in (PIPELINE, MANY):
            ratio = figures[case].time / before[case].time
            bars.at_most(f"{name} time, {case.name}", ratio, "of greedy", needs=1.0)
        bars.at_most(f"{name} padding", padding(name, MANY), "tokens", needs=0)
        begin_s = time.process_time()
        planned(name, replace(MANY, coupled=False, stages=1))
        spent_s = time.process_time() - begin_s
        bars.at_most(f"{name} planning, 4,096 over 64", spent_s, "CPU s", needs=1.0)
    return bars.exit_code


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--markdown", action="store_true", help="as it is in docs/performance.md")
    output.add_argument("--draw", action="store_true", help="write the arrays anew")
    arguments = parser.parse_args()
    if arguments.draw:
        RECORDED.write_text(json.dumps(drawn()) + "\n", "utf-8")
    elif arguments.markdown:
        print(markdown())
    else:
        return measure()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
