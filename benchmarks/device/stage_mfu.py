"""Stage 7: how fast the learner's step is, against the device and against transformers."""

import gc
import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.device.report import Report, run_stage
from slipstream.learner.batches.packing import TrainTrajectory, pack
from slipstream.learner.config import LearnerSection
from slipstream.learner.model import device
from slipstream.learner.training.step import train_step
from slipstream.wire.models.flops import SequenceCost, peak_tflops_of
from slipstream.wire.process.phases import PhaseClock
from tests.support.ranks.policy import algorithm, random_outcomes, whole_plan

_WARM_UP, _STEPS = 2, 3
_SHARE = 1.0  # of the speed of transformers with FlashAttention
_MFU = 0.4
_TOP = 12  # kernels
_QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
    "num_key_value_heads": 2,
}
_SHAPES: dict[str, dict[str, object]] = {
    "0.5B": {
        **_QWEN,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
    },
    "1.5B": {
        **_QWEN,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
    },
}
_TINY: dict[str, object] = {
    **_QWEN,
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def work(report: Report, out: Path) -> None:
    device.prepare()
    from slipstream.learner.model.topology import destroy_topology, init_topology

    on_gpu = torch.cuda.is_available()
    topology = init_topology(rank=0, world_size=1, store=HashStore(), seed=1, timeout_s=60.0)
    shapes = _SHAPES if on_gpu else {"tiny": _TINY}
    cases = [(2048, 8192), (2048, 32768)] if on_gpu else [(64, 256)]
    for length, tokens in cases:
        for name, config in shapes.items():
            label = f"{name} {tokens} tokens"
            with report.part(label):
                ours = _ours(report, label, config, topology, length, tokens, out)
                _free()
                theirs = _theirs(report, label, config, length, tokens)
                if on_gpu:
                    report.at_least(f"{label} vs transformers", ours / theirs, "x", needs=_SHARE)
                else:
                    report.fact(f"{label} vs transformers", ours / theirs)
            _free()
    if not on_gpu:
        report.skip("MFU", "a CPU has no peak to compare with")
    destroy_topology()


def _ours(
    report: Report,
    label: str,
    config: dict[str, object],
    topology: object,
    length: int,
    tokens: int,
    out: Path,
) -> float:
    """Return tokens per second of a learner step of one microbatch."""
    from slipstream.learner.model.gpt import build_model
    from slipstream.learner.training.policy import Policy
    from slipstream.wire.models.hf_config import load_hf_config

    folder = out / "mfu-model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    model = build_model(load_hf_config(folder), dtype=dtype, extra={})
    model.train()
    policy = Policy(model, LearnerSection(), topology)  # type: ignore[arg-type]
    sequences = _sequences(length, tokens)
    batch, plan = pack(sequences, device.device()), whole_plan(sequences)
    data, chosen = random_outcomes(sequences), algorithm()

    def step() -> None:
        train_step(policy, [[batch]], [plan], data, chosen, PhaseClock())

    seconds = _seconds_of(step)
    parameters = sum(one.numel() for one in model.parameters())
    report.fact(f"{label} parameters", parameters)
    report.fact(f"{label} tokens/s", round(tokens / seconds, 1))
    if torch.cuda.is_available():
        flops = tokens // length * SequenceCost.of(model.hf_config).flops(length)
        gpu, tflops = torch.cuda.get_device_name(), flops / seconds / 1e12
        report.fact(f"{label} TFLOP/s", tflops)
        peak = peak_tflops_of(gpu)
        if peak is None:
            report.skip(f"{label} MFU", f"the peak of {gpu} is not known")
        else:
            report.at_least(f"{label} MFU", tflops / peak, f"of {peak:g} TFLOP/s", needs=_MFU)
        report.fact(f"{label} most memory, GiB", torch.cuda.max_memory_allocated() / 2**30)
        report.fact(f"{label} kernels", _top_kernels(step))
    return tokens / seconds


def _theirs(
    report: Report, label: str, config: dict[str, object], length: int, tokens: int
) -> float:
    """Return tokens per second of the same model and optimizer in transformers."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    known = {name: value for name, value in config.items() if name != "architectures"}
    model = Qwen2ForCausalLM(Qwen2Config(**known, attn_implementation="sdpa"))
    model = model.to(device.device(), dtype)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=torch.cuda.is_available())
    rows = torch.randint(3, 500, (tokens // length, length), device=device.device())

    def step() -> None:
        for row in rows:  # logits of all tokens at once would not fit
            with _flash_attention():
                loss = model(input_ids=row[None], labels=row[None], use_cache=False).loss
                (loss / len(rows)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    speed = tokens / _seconds_of(step)
    report.fact(f"{label} tokens/s of transformers, a sequence at a time", round(speed, 1))
    return speed


def _flash_attention() -> AbstractContextManager[None]:
    """Have torch take its FlashAttention kernels, and fail if they cannot be taken; on a GPU."""
    if not torch.cuda.is_available():
        return nullcontext()
    chosen: AbstractContextManager[None] = sdpa_kernel(SDPBackend.FLASH_ATTENTION)
    return chosen


def _sequences(length: int, tokens: int) -> list[TrainTrajectory]:
    rng = np.random.default_rng(4)
    mask = np.arange(length) >= length // 8
    return [
        TrainTrajectory(
            token_ids=rng.integers(3, 500, length).astype(np.int32),
            loss_mask=mask,
            behavior_logprobs=np.where(mask, -6.0, 0.0).astype(np.float32),
            temperature=1.0,
        )
        for _ in range(tokens // length)
    ]


def _seconds_of(step: Callable[[], None]) -> float:
    """Return the seconds of one step, after others."""
    for _ in range(_WARM_UP):
        step()
    _wait()
    began_s = time.monotonic()
    for _ in range(_STEPS):
        step()
    _wait()
    return (time.monotonic() - began_s) / _STEPS


def _top_kernels(step: Callable[[], None]) -> list[str]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
        _wait()
    rows = sorted(seen.key_averages(), key=lambda row: -row.self_device_time_total)[:_TOP]
    return [f"{row.key[:60]}: {row.self_device_time_total / 1e3:.2f} ms" for row in rows]


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
