"""Stage 7: how fast the learner's step is, against the device, transformers and prime-rl."""

import gc
import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.bars import NotRun
from benchmarks.device.experts import OF_30B_A3B, TINY, compared
from benchmarks.device.kernel_groups import intervals_of, seconds_by_group
from benchmarks.device.report import Report, Skipped, run_stage
from benchmarks.learner_bytes import H100, KERNELS, LENGTH, WITH_FLASH_4
from benchmarks.learner_bytes import seconds_by_group as predicted
from benchmarks.shapes import SHAPES
from slipstream.algos.kernels import replaced_calls
from slipstream.learner.batches.packing import TrainTrajectory, pack
from slipstream.learner.batches.plan import MinibatchPlan
from slipstream.learner.config import LearnerSection
from slipstream.learner.model import device
from slipstream.learner.model.cuda_attention import choose_attention, has_flash_4
from slipstream.learner.training.step import train_step
from slipstream.wire.models.flops import SequenceCost, peak_tflops_of
from slipstream.wire.models.hf_config import HfConfig, load_hf_config
from slipstream.wire.process.phases import PhaseClock
from slipstream.wire.settings.lora import LoraSection
from tests.support.ranks.policy import algorithm, random_outcomes

if TYPE_CHECKING:
    from slipstream.learner.model.topology import Topology
    from slipstream.learner.training.policy import Policy

_LONG = 2**16  # tokens of a step that is run less often
_SHARE = 1.0  # of the speed of transformers with FlashAttention
_OF_PRIME_RL = 1.5  # share of its speed
_OFF_BF16 = 1e-2
_OF_SINGLE_EXPERTS = 3.0  # share of the speed of Megatron's experts, one after another


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A learner step, and what it must reach on a GPU."""

    shape: str  # name in benchmarks.shapes
    tokens: int  # size of each microbatch
    microbatches: int
    length: int = LENGTH  # tokens of each sequence
    recompute: Literal["none", "full"] = "none"
    rank: int | None = None  # rank of adapters
    mfu: float | None = None
    prime_rl: float | None = None  # its tokens/s
    seconds: float = 0.0  # what it takes on an H100

    @property
    def label(self) -> str:
        kind = "" if self.rank is None else f" LoRA {self.rank}"
        return f"{self.shape}{kind} {self.microbatches} x {self.tokens} tokens"

    @property
    def names_a_bar(self) -> bool:
        return self.mfu is not None or self.prime_rl is not None


def _as_prime_rl(shape: str, tokens: int, tokens_per_s: float, **more: float) -> Case:
    """Return a row of prime-rl's benchmarks: RL, one H100 80GB HBM3, FlashAttention 3.

    Its file benchmarks/results/BENCHMARKS.md of 2026-02-07, PrimeIntellect-ai/prime-rl: all
    activations computed again, a microbatch of one sequence, two microbatches in an update,
    torch.compile. The tokens/s are of its whole loop; by the step times of its baselines it trains
    16,447 in place of 11,896, and 10,765 in place of 10,147.
    """
    return Case(
        shape=shape,
        tokens=tokens,
        length=tokens,
        microbatches=2,
        recompute="full",
        rank=16 if shape == "Qwen3-4B" else None,
        prime_rl=tokens_per_s,
        **more,
    )


# Those with bars come first; later ones run where time is left.
_CASES = (
    Case(shape="1.5B", tokens=8192, microbatches=4, mfu=0.45, seconds=10),
    Case(shape="0.5B", tokens=8192, microbatches=4, mfu=0.28, seconds=8),
    _as_prime_rl("Qwen3-0.6B", 16384, 11_896, seconds=10),
    _as_prime_rl("Qwen3-4B", 16384, 6_230, seconds=20),
    _as_prime_rl("Qwen3-0.6B", 65536, 10_147, seconds=30),
    Case(shape="1.5B", tokens=8192, microbatches=1, seconds=10),
    Case(shape="0.5B", tokens=8192, microbatches=1, seconds=10),
    Case(shape="1.5B", tokens=8192, microbatches=16, seconds=15),
    Case(shape="0.5B", tokens=8192, microbatches=16, seconds=10),
    _as_prime_rl("Qwen3-4B", 65536, 4_160, seconds=60),
)
_TINY = (
    Case(shape="tiny", length=64, tokens=256, microbatches=4),
    Case(shape="tiny", length=64, tokens=256, microbatches=1),
    Case(shape="tiny", length=128, tokens=128, microbatches=2, recompute="full", rank=4),
)


def work(report: Report, out: Path) -> None:
    device.prepare()
    from slipstream.learner.model.topology import destroy_topology, init_topology

    on_gpu = torch.cuda.is_available()
    topology = init_topology(rank=0, world_size=1, store=HashStore(), seed=1, timeout_s=60.0)
    with report.part("experts"):
        _experts(report, out, on_gpu=on_gpu)
    _free()
    for case in _CASES if on_gpu else _TINY:
        with report.part(case.label):
            if report.left_s < case.seconds:
                _leave_out(report, case)
            ours = _ours(report, case, topology, out)
            _free()
            if case.microbatches == 1:
                theirs = _theirs(report, case)
                if on_gpu:
                    ratio = ours / theirs
                    report.at_least(f"{case.label} vs transformers", ratio, "x", needs=_SHARE)
                else:
                    report.fact(f"{case.label} vs transformers", ours / theirs)
        _free()
    if not on_gpu:
        report.skip("MFU", "a CPU has no peak to compare with")
    destroy_topology()


def _experts(report: Report, out: Path, *, on_gpu: bool) -> None:
    """Compare experts in groups with Megatron's."""
    layer, tokens = (OF_30B_A3B, 4096) if on_gpu else (TINY, 64)
    found = compared(layer, tokens, out / "experts")
    report.at_most("grouped_experts off single ones", found["off"], "relative", needs=_OFF_BF16)
    report.fact(f"experts of {layer}, {tokens} tokens, ms", found)
    ratio = found["one after another"] / found["in groups"]
    if on_gpu:
        report.at_least("grouped_experts", ratio, "x", needs=_OF_SINGLE_EXPERTS)
    else:
        report.fact("grouped_experts", ratio)


def _leave_out(report: Report, case: Case) -> None:
    """Skip a case for want of time; a bar that it has is short."""
    reason = f"{report.left_s:.0f} s are left, and it takes {case.seconds:g}"
    if case.names_a_bar:
        report.at_least(case.label, NotRun(reason), "", needs=case.mfu or _OF_PRIME_RL)
    raise Skipped(reason)


def _ours(report: Report, case: Case, topology: "Topology", out: Path) -> float:
    """Return tokens per second of a learner step of one update."""
    hf = _hf_config(case, out)
    policy, label = _policy(case, hf, topology), case.label
    chosen = choose_attention(hf, device.device(), policy.model.config.params_dtype)
    report.fact(f"{label} attention", chosen)
    count = case.tokens // case.length  # sequences of a microbatch
    sequences = _sequences(case.length, count * case.microbatches)
    places = [tuple(range(first, first + count)) for first in range(0, len(sequences), count)]
    batches = [pack([sequences[i] for i in mine], device.device()) for mine in places]
    plan, data, method = (MinibatchPlan((tuple(places),)), random_outcomes(sequences), algorithm())

    def step() -> None:
        train_step(policy, [batches], [plan], data, method, PhaseClock())
        _wait()

    replaced_calls()
    seconds, tokens = _seconds_of(step, case), case.tokens * case.microbatches
    report.fact(f"{label} parameters", sum(weight.numel() for weight in policy.model.parameters()))
    report.fact(f"{label} tokens/s", round(tokens / seconds, 1))
    _compare(report, case, hf, seconds)
    parts = seconds_by_group(intervals_of(step), seconds)
    report.fact(f"{label} ms by group", _in_ms(parts))
    if case.length == LENGTH and case.recompute == "none" and case.rank is None:
        card = WITH_FLASH_4 if has_flash_4() else H100
        size = {"tokens": case.tokens, "microbatches": case.microbatches}
        report.fact(f"{label} ms by the model", _in_ms(predicted(hf, KERNELS, card, **size)))
    if (replaced := replaced_calls()) or torch.cuda.is_available():
        report.at_most(f"{label} replaced kernels", replaced, "calls", needs=0)
    return tokens / seconds


def _compare(report: Report, case: Case, hf: HfConfig, seconds: float) -> None:
    """Compare the seconds of a step with the GPU's peak, and with prime-rl."""
    if not torch.cuda.is_available():
        return
    gpu, label, tokens = torch.cuda.get_device_name(), case.label, case.tokens * case.microbatches
    facts = None if case.rank is None else LoraSection(rank=case.rank).facts()
    flops = flops_of(case, SequenceCost.of(hf, facts))
    report.fact(f"{label} TFLOP/s", flops / seconds / 1e12)
    report.fact(f"{label} most memory, GiB", torch.cuda.max_memory_allocated() / 2**30)
    peak = peak_tflops_of(gpu)
    if peak is None:
        report.skip(f"{label} MFU", f"the peak of {gpu} is not known")
    elif case.mfu is None:
        report.fact(f"{label} MFU", flops / seconds / 1e12 / peak)
    else:
        share = flops / seconds / 1e12 / peak
        report.at_least(f"{label} MFU", share, f"of {peak:g} TFLOP/s", needs=case.mfu)
    if case.prime_rl is not None:
        ratio = tokens / seconds / case.prime_rl
        if "H100" in gpu:
            report.at_least(f"{label} vs prime-rl", ratio, "x", needs=_OF_PRIME_RL)
        else:
            report.fact(f"{label} vs prime-rl on an H100", ratio)


def flops_of(case: Case, cost: SequenceCost) -> float:
    """Return the FLOPs of a case's step."""
    num_trained = int(_mask(case.length).sum())
    sequences = case.tokens * case.microbatches / case.length
    return sequences * cost.flops_within((0, case.length), num_trained)


def _hf_config(case: Case, out: Path) -> HfConfig:
    folder = out / "mfu-model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[case.shape]))
    return load_hf_config(folder)


def _policy(case: Case, hf: HfConfig, topology: "Topology") -> "Policy":
    """Return a policy of random weights."""
    from slipstream.learner.model.adapters.lora import add_adapters
    from slipstream.learner.model.gpt import build_model
    from slipstream.learner.training.policy import Policy

    section = LearnerSection(recompute=case.recompute)
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    model = build_model(hf, dtype=dtype, extra={}, learner=section)
    if case.rank is not None:
        add_adapters(model, LoraSection(rank=case.rank).facts(), seed=1)
    model.train()
    return Policy(model, section, topology)


def _theirs(report: Report, case: Case) -> float:
    """Return tokens per second of the same model and optimizer in transformers."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    known = {name: value for name, value in SHAPES[case.shape].items() if name != "architectures"}
    model = Qwen2ForCausalLM(Qwen2Config(**known, attn_implementation="sdpa"))
    model = model.to(device.device(), dtype)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=torch.cuda.is_available())
    size = (case.tokens // case.length, case.length)
    rows = torch.randint(3, 500, size, device=device.device())

    def step() -> None:
        for row in rows:  # logits of all tokens at once would not fit
            with _flash_attention():
                loss = model(input_ids=row[None], labels=row[None], use_cache=False).loss
                (loss / len(rows)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        _wait()

    speed = case.tokens / _seconds_of(step, case)
    report.fact(f"{case.label} tokens/s of transformers, a sequence at a time", round(speed, 1))
    return speed


def _flash_attention() -> AbstractContextManager[None]:
    """Have torch take its FlashAttention kernels, and fail if they cannot be taken; on a GPU."""
    if not torch.cuda.is_available():
        return nullcontext()
    chosen: AbstractContextManager[None] = sdpa_kernel(SDPBackend.FLASH_ATTENTION)
    return chosen


def _mask(length: int) -> "np.typing.NDArray[np.bool_]":
    """Return where the policy chose a sequence's tokens."""
    return np.arange(length) >= length // 8


def _sequences(length: int, count: int) -> list[TrainTrajectory]:
    rng, mask = np.random.default_rng(4), _mask(length)
    return [
        TrainTrajectory(
            token_ids=rng.integers(3, 500, length).astype(np.int32),
            loss_mask=mask,
            behavior_logprobs=np.where(mask, -6.0, 0.0).astype(np.float32),
            temperature=1.0,
        )
        for _ in range(count)
    ]


def _seconds_of(step: Callable[[], None], case: Case) -> float:
    """Return the seconds of one step, after others."""
    warm_up, steps = (1, 2) if case.tokens * case.microbatches > _LONG else (2, 3)
    for _ in range(warm_up):
        step()
    began_s = time.monotonic()
    for _ in range(steps):
        step()
    return (time.monotonic() - began_s) / steps


def _in_ms(seconds: dict[str, float]) -> dict[str, float]:
    return {name: round(1e3 * part, 2) for name, part in seconds.items()}


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    run_stage("mfu", work)
