"""What a learner step costs against a training step of transformers: CPU seconds on one core.

Both start from the same weights and train the same sequences by the same loss: groups of eight that
begin with one prompt, GRPO's advantages, a clipped ratio to the behavior policy, the mean over all
tokens of answers, one update of AdamW with the gradient clipped at norm 1, float32, attention by
torch's kernel. The learner's side is all of `train_step`: advantages, passes over packed
microbatches, the update, and every figure of a run, entropy and those by version lag included.
transformers' side is given the advantages and computes the loss alone, with logits only before the
tokens of answers (``logits_to_keep``), in each of these ways; the bar is against the cheapest by
median:

    padded    all sequences as one batch, each padded to the longest
    sorted    batches of 8 sequences of like lengths, padded to their longest
    packed    all sequences as one row, with position ids and the block mask that follows
    single    a sequence at a time

Its AdamW is torch's fused one, which its own trainer takes. Each way is a process that has loaded
what it needs and nothing of the others; they take turns, pinned to one core, with one thread. Ways
that take more than twice the cheapest in each of the first rounds have no more of them. CPU seconds
are those of the process's clock. Loss and gradient norm of the first step must agree.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from benchmarks.bars import Bars
from benchmarks.recording import Line, append
from benchmarks.weightbus.figures import table
from slipstream.deploy.examples.addition import SHIPPED_POLICY

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.learner.batches.packing import TrainTrajectory

NEEDS = 1.05
OURS = "learner"
THEIRS = ("padded", "sorted", "packed", "single")
AGREE = 1e-3  # relative difference of loss and gradient norm
SIBLINGS, LAGS, SORTED = 8, 3, 8
FIRST_ROUNDS, GIVEN_UP = 2, 2.0
LR, BETAS, CLIP_NORM = 1e-6, (0.9, 0.95), 1.0
_TOP = 25
_EXAMPLES = """examples:
  python -m benchmarks.bench_learner
  python -m benchmarks.bench_learner --out benchmarks/recorded
  python -m benchmarks.bench_learner --case quickstart --rounds 15
  python -m benchmarks.bench_learner --profile"""


class Case(NamedTuple):
    """A model, and a learner step for it."""

    config: dict[str, object] | None  # None: the policy that ships
    sequences: int
    prompt: tuple[int, int]  # tokens, least and most
    answer: tuple[int, int]


_TIED: dict[str, object] = {
    "hidden_act": "silu",
    "max_position_embeddings": 1_024,
    "tie_word_embeddings": True,
}
CASES = {
    "quickstart": Case(None, sequences=256, prompt=(8, 8), answer=(3, 8)),
    "qwen3_19m": Case(
        {
            **_TIED,
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": 16_384,
            "hidden_size": 384,
            "intermediate_size": 1_024,
            "num_hidden_layers": 8,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
        },
        sequences=16,
        prompt=(24, 48),
        answer=(32, 160),
    ),
    "smollm2_135m": Case(
        {
            **_TIED,
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": 49_152,
            "hidden_size": 576,
            "intermediate_size": 1_536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_theta": 1e5, "rope_type": "default"},
        },
        sequences=8,
        prompt=(24, 48),
        answer=(32, 96),
    ),
}


class Step(NamedTuple):
    """What a training step took and came to."""

    cpu_s: float
    loss: float
    norm: float  # of the gradient, before clipping


class Measured(Line, frozen=True):
    """The steps of each way, warm-up first."""

    case: str
    steps: dict[str, list[Step]]


# ---- the inputs ---------------------------------------------------------------


def model_folder(case: Case, work: Path) -> Path:
    """Return the folder of a case's model, written by transformers if none ships."""
    if case.config is None:
        return SHIPPED_POLICY
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    (work / "config.json").write_text(json.dumps(case.config))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(work))
    model.to(torch.float32).save_pretrained(work)
    return work


def sequences(case: Case, folder: Path) -> "list[TrainTrajectory]":
    """Draw the sequences of a case; behavior log-probabilities are those of a uniform policy."""
    from slipstream.learner.batches.packing import TrainTrajectory

    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    random = np.random.default_rng(7)

    def tokens(least: int, most: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
        return random.integers(3, vocab_size, random.integers(least, most + 1))

    drawn = []
    prompts = [tokens(*case.prompt) for _ in range(-(-case.sequences // SIBLINGS))]
    for number in range(case.sequences):
        prompt = prompts[number // SIBLINGS]
        ids = np.append(prompt, tokens(*case.answer))
        mask = np.arange(len(ids)) >= len(prompt)
        noise = random.normal(0.0, 0.05, len(mask))
        drawn.append(
            TrainTrajectory(
                token_ids=ids.astype(np.int32),
                loss_mask=mask,
                behavior_logprobs=np.where(mask, noise - np.log(vocab_size), 0.0).astype("f4"),
                temperature=1.0,
                version_steps=np.full(len(mask), random.integers(3, 6), np.int32),
            )
        )
    return drawn


def rewards(count: int) -> "np.ndarray[Any, np.dtype[np.float64]]":
    return np.random.default_rng(8).integers(0, 2, count).astype(np.float64)


# ---- in a process of its own: one way to train --------------------------------

_steps: list[Callable[[], Step]] = []


def begin(way: str, name: str, folder: Path) -> None:
    """Load what a way of training needs."""
    import torch

    torch.set_num_threads(1)
    _steps.append((learner_step if way == OURS else _transformers_step)(way, CASES[name], folder))


def one_step() -> Step:
    return _steps[0]()


def profiled(rounds: int) -> str:
    """Return a table of the operators and one of the functions that take most of a step."""
    import cProfile
    import io
    import pstats

    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for _ in range(rounds):
            one_step()
    operators = seen.key_averages().table(sort_by="self_cpu_time_total", row_limit=_TOP)
    with cProfile.Profile() as calls:
        for _ in range(rounds):
            one_step()
    text = io.StringIO()
    pstats.Stats(calls, stream=text).sort_stats("tottime").print_stats(_TOP)
    return f"{operators}\n{text.getvalue()}"


def learner_step(_way: str, case: Case, folder: Path) -> Callable[[], Step]:
    """Return a step of the learner, as a run does it."""
    from slipstream.learner.model import device

    device.prepare()
    import torch
    from torch.distributed import HashStore  # type: ignore[attr-defined]  # not in torch's stubs

    from slipstream.algos.advantages import Outcomes
    from slipstream.algos.section import AlgoSection
    from slipstream.learner.batches.packing import pack
    from slipstream.learner.batches.plan import MinibatchPlan
    from slipstream.learner.config import LearnerSection, LearnerSettings
    from slipstream.learner.model.topology import init_topology
    from slipstream.learner.starting_policy import build_policy
    from slipstream.learner.training.algorithm import algorithm_of
    from slipstream.learner.training.step import train_step
    from slipstream.learner.training.step_data import StepData
    from slipstream.weightbus.config import WeightBusSection
    from slipstream.wire.process.phases import PhaseClock
    from slipstream.wire.settings.sections import RunSection

    topology = init_topology(rank=0, world_size=1, store=HashStore(), seed=1, timeout_s=600.0)
    settings = LearnerSettings(
        run=RunSection(model=str(folder)),
        learner=LearnerSection(lr=LR, adam_beta1=BETAS[0], adam_beta2=BETAS[1]),
        algo=AlgoSection(),
        weightbus=WeightBusSection(),
    )
    algorithm = algorithm_of(settings)
    policy = build_policy(settings, algorithm, topology)
    drawn = sequences(case, folder)
    batch = pack(drawn, device.device(), shares_prompts=settings.shares_prompts)
    plan = MinibatchPlan(((tuple(range(len(drawn))),),))
    data = StepData(
        outcomes=Outcomes(
            rewards=torch.from_numpy(rewards(len(drawn))),
            groups=torch.arange(len(drawn)) // SIBLINGS,
            num_groups=-(-len(drawn) // SIBLINGS),
            lengths=torch.tensor([int(one.loss_mask.sum()) for one in drawn]),
        ),
        is_truncated=torch.zeros(len(drawn), dtype=torch.bool),
        step=5,
        seed=0,
    )

    def step() -> Step:
        began_s = time.process_time()
        figures, _ = train_step(
            policy, [[batch]], [plan], data, algorithm, PhaseClock(), num_lags=LAGS
        )
        policy.end_step()
        spent_s = time.process_time() - began_s
        return Step(spent_s, figures["policy/loss"], figures["policy/grad_norm"])

    return step


def _transformers_step(way: str, case: Case, folder: Path) -> Callable[[], Step]:
    """Return a step as one would write it with transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=BETAS, weight_decay=0.0, fused=True
    )
    drawn = sequences(case, folder)
    grouped = torch.from_numpy(rewards(len(drawn))).view(-1, SIBLINGS)
    centered = grouped - grouped.mean(1, keepdim=True)
    advantages = (centered / (grouped.std(1, keepdim=True) + 1e-6)).flatten().float()
    num_tokens = sum(int(one.loss_mask.sum()) for one in drawn)
    microbatches = [
        inputs_of([drawn[i] for i in part], advantages[part], packed=way == "packed")
        for part in parts_of(way, [len(one.token_ids) for one in drawn])
    ]

    def loss_of(inputs: "dict[str, Tensor]", given: "dict[str, Tensor]") -> "Tensor":
        trained = given["mask"].any(0).nonzero().squeeze(-1)  # columns with an answer's token
        logits = model(**inputs, use_cache=False, logits_to_keep=trained - 1).logits.float()
        chosen = inputs["input_ids"][:, trained].unsqueeze(-1)
        logprobs = logits.log_softmax(-1).gather(-1, chosen).squeeze(-1)
        ratio = (logprobs - given["behavior"][:, trained]).exp()
        advantage = given["advantages"][:, trained]
        clipped = ratio.clamp(0.8, 1.2) * advantage
        per_token = -torch.minimum(ratio * advantage, clipped)
        return (per_token * given["mask"][:, trained]).sum() / num_tokens

    def step() -> Step:
        began_s = time.process_time()
        losses = []
        for inputs, given in microbatches:
            loss = loss_of(inputs, given)
            loss.backward()  # type: ignore[no-untyped-call]  # torch
            losses.append(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        total = float(torch.stack(losses).sum())
        return Step(time.process_time() - began_s, total, float(norm))

    return step


def parts_of(way: str, lengths: Sequence[int]) -> list[list[int]]:
    """Return which sequences are trained together."""
    everything = list(range(len(lengths)))
    if way in {"padded", "packed"}:
        return [everything]
    size = SORTED if way == "sorted" else 1
    by_length = sorted(everything, key=lambda i: lengths[i])
    return [by_length[at : at + size] for at in range(0, len(by_length), size)]


def inputs_of(
    some: "Sequence[TrainTrajectory]", advantages: "Tensor", *, packed: bool
) -> "tuple[dict[str, Tensor], dict[str, Tensor]]":
    """Return the inputs of the model and of the loss: one padded row per sequence, or one row."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    ids = [torch.from_numpy(one.token_ids).long() for one in some]
    mask = [torch.from_numpy(one.loss_mask) for one in some]
    behavior = [torch.from_numpy(one.behavior_logprobs) for one in some]
    of_tokens = [one.expand(len(row)) for one, row in zip(advantages, ids, strict=True)]
    columns = {"mask": mask, "behavior": behavior, "advantages": of_tokens}
    if packed:
        places = torch.cat([torch.arange(len(row)) for row in ids])[None]
        inputs = {"input_ids": torch.cat(ids)[None], "position_ids": places}
        return inputs, {name: torch.cat(values)[None] for name, values in columns.items()}
    given = {name: pad_sequence(values, batch_first=True) for name, values in columns.items()}
    inputs = {"input_ids": pad_sequence(ids, batch_first=True)}
    if len({len(row) for row in ids}) > 1:
        real = [torch.ones_like(row) for row in ids]
        inputs["attention_mask"] = pad_sequence(real, batch_first=True)
    return inputs, given


# ---- measuring ----------------------------------------------------------------


def measure(name: str, rounds: int, *, profile: bool) -> tuple[dict[str, list[Step]], str]:
    """Return the steps of each way, warm-up first, taken by turns; and the learner's profile."""
    with tempfile.TemporaryDirectory(prefix="bench-learner-") as work, ExitStack() as stack:
        context = multiprocessing.get_context("spawn")

        def process() -> ProcessPoolExecutor:
            return stack.enter_context(ProcessPoolExecutor(1, mp_context=context))

        folder = process().submit(model_folder, CASES[name], Path(work)).result()
        pools = {way: process() for way in (OURS, *THEIRS)}
        for way, pool in pools.items():
            pool.submit(begin, way, name, folder).result()
        steps: dict[str, list[Step]] = {way: [] for way in pools}
        for number in range(rounds + 1):
            for way in remaining(steps) if number > FIRST_ROUNDS else pools:
                steps[way].append(pools[way].submit(one_step).result())
        text = pools[OURS].submit(profiled, 3).result() if profile else ""
        return steps, text


def remaining(steps: dict[str, list[Step]]) -> list[str]:
    """Return the ways that may still be the cheapest, and the learner's."""
    least = {
        way: min(step.cpu_s for step in done[1 : FIRST_ROUNDS + 1]) for way, done in steps.items()
    }
    cheapest = min(least[way] for way in THEIRS)
    return [way for way in steps if way == OURS or least[way] <= GIVEN_UP * cheapest]


def report(bars: Bars, name: str, steps: dict[str, list[Step]]) -> str:
    """Print the bars of one case; return a table of its medians."""
    medians = {way: statistics.median(s.cpu_s for s in done[1:]) for way, done in steps.items()}
    cheapest = min(medians[way] for way in THEIRS)
    rows = []
    for way, done in steps.items():
        seconds = [step.cpu_s for step in done[1:]]
        spread = f"{min(seconds):.3f} to {max(seconds):.3f}"
        values = (f"{medians[way]:.3f}", spread, f"{medians[way] / cheapest:.2f}")
        rows.append((way, str(len(seconds)), *values, f"{done[0].loss:.6f}", f"{done[0].norm:.6f}"))
    largest = max(difference(steps[OURS][0], steps[way][0]) for way in THEIRS)
    bars.at_most(f"learner_agrees_{name}", largest, "relative difference", needs=AGREE)
    ratio = medians[OURS] / cheapest
    bars.at_most(f"learner_cpu_seconds_{name}", ratio, "x", needs=NEEDS)
    title = ("way", "rounds", "CPU s", "least to most", "of cheapest", "loss", "norm")
    return table(title, rows)


def difference(one: Step, other: Step) -> float:
    """Return the larger relative difference of loss and gradient norm."""
    pairs = ((one.loss, other.loss), (one.norm, other.norm))
    return max(abs(a - b) / max(abs(a), abs(b), 1e-12) for a, b in pairs)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_learner",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--case", choices=sorted(CASES), action="append", default=[])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, help="folder whose learner.jsonl gets the steps")
    parser.add_argument(
        "--profile", action="store_true", help="print where the learner's time goes"
    )
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    os.environ["OMP_NUM_THREADS"] = "1"
    bars = Bars()
    for name in arguments.case or CASES:
        steps, profile = measure(name, arguments.rounds, profile=arguments.profile)
        print(f"{name}\n{report(bars, name, steps)}", flush=True)
        if arguments.out:
            append(arguments.out / "learner.jsonl", Measured(name, steps))
        if profile:
            print(profile)
    return bars.exit_code


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
