"""What log-probabilities and entropy cost: in chunks from hidden states, or in the ways of others.

Plain is what autograd makes of logits -> float32 -> log_softmax -> gather, and of the entropy.
Chunked does the same for some tokens at a time, and again in the backward pass. All ways do the
forward and backward pass of mean(logprobs) + mean(entropy), by hidden states and weights. A bar
compares with the better of the other two: the one of less memory, the one of less CPU time.

Each runs in a fresh process with one thread. Memory is the growth of the process's peak
(getrusage, ru_maxrss) over the peak after the inputs were made, gradients included. This process
imports no torch, since a child's peak begins at its parent's. CPU is the best of some rounds.
"""

import argparse
import functools
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.bars import Bars
from benchmarks.weightbus.figures import table

if TYPE_CHECKING:
    from torch import Tensor

NEEDS_MEMORY = 0.35
NEEDS_MEMORY_OF_BEST = 1.0
NEEDS_CPU_OF_BEST = 1.1
CHUNK_TOKENS = 128  # tokens of a chunk in the chunked way
VOCAB_SIZE = 151936  # of Qwen
HIDDEN = (896, 2048, 4096)  # of Qwen2.5-0.5B, Qwen3-1.7B, Qwen3-8B
MIB = 2**20
_EXAMPLES = """examples:
  python -m benchmarks.bench_algos
  python -m benchmarks.bench_algos --tokens 3072 --hidden 4096 --rounds 1"""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    tokens: int
    hidden: int
    dtype: str

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of the output weights, and of their gradient."""
        return VOCAB_SIZE * self.hidden * {"float32": 4, "bfloat16": 2}[self.dtype]


@dataclass(frozen=True, kw_only=True)
class Figures:
    peak_bytes: int
    cpu_s: float
    loss: float
    norms: tuple[float, ...]  # of the gradients by hidden states and weights


def plain(hidden: "Tensor", weight: "Tensor", target: "Tensor") -> "tuple[Tensor, Tensor]":
    all_logprobs = (hidden @ weight.t()).float().log_softmax(-1)
    chosen = all_logprobs.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    return chosen, -(all_logprobs.exp() * all_logprobs).sum(-1)


def chunked(hidden: "Tensor", weight: "Tensor", target: "Tensor") -> "tuple[Tensor, Tensor]":
    import torch
    from torch.utils.checkpoint import checkpoint

    parts = zip(hidden.split(CHUNK_TOKENS), target.split(CHUNK_TOKENS), strict=True)
    done = [checkpoint(plain, part, weight, chosen, use_reentrant=False) for part, chosen in parts]
    logprobs, entropies = zip(*done, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def ours(hidden: "Tensor", weight: "Tensor", target: "Tensor") -> "tuple[Tensor, Tensor]":
    from slipstream.algos.logprobs.linear_logprobs import linear_logprobs
    from slipstream.algos.logprobs.sampling import OutputLayer

    computed = linear_logprobs(hidden, OutputLayer(weight=weight), target)
    return computed.logprobs, computed.entropy


WAYS: dict[str, Callable[..., "tuple[Tensor, Tensor]"]] = {
    "plain": plain,
    "chunked": chunked,
    "ours": ours,
}


def measure(way: str, sizes: Sizes, rounds: int) -> Figures:
    """Measure one way, in the process that calls it."""
    import torch

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    normal = functools.partial(
        torch.randn, generator=generator, dtype=getattr(torch, sizes.dtype), requires_grad=True
    )
    hidden, weight = normal(sizes.tokens, sizes.hidden), normal(VOCAB_SIZE, sizes.hidden)
    with torch.no_grad():
        weight.mul_(2.0 * sizes.hidden**-0.5)  # logits of standard deviation 2
    target = torch.randint(VOCAB_SIZE, (sizes.tokens,), generator=generator)
    before, seconds, loss = _peak_bytes(), [], torch.zeros(())
    for _ in range(rounds):
        hidden.grad = weight.grad = None
        began_s = time.process_time()
        logprobs, entropy = WAYS[way](hidden, weight, target)
        loss = logprobs.mean() + entropy.mean()
        loss.backward()
        seconds.append(time.process_time() - began_s)
        del logprobs, entropy
    return Figures(
        peak_bytes=_peak_bytes() - before,
        cpu_s=min(seconds),
        loss=loss.item(),
        norms=tuple(tensor.grad.double().norm().item() for tensor in (hidden, weight)),
    )


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measured(way: str, sizes: Sizes, rounds: int) -> Figures:
    """Measure one way in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, way, sizes, rounds).result()


def differences(one: Figures, other: Figures) -> float:
    """Return the largest relative difference of loss and gradient norms."""
    pairs = zip((one.loss, *one.norms), (other.loss, *other.norms), strict=True)
    return max(abs(a - b) / abs(b) for a, b in pairs)


def shares(one: Figures, base: Figures) -> tuple[float, float]:
    """Return memory and CPU time as parts of another's."""
    return one.peak_bytes / base.peak_bytes, one.cpu_s / base.cpu_s


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_algos",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tokens", type=int, default=1024, help="of a microbatch")
    parser.add_argument("--hidden", type=int, action="append", default=[], help="may be repeated")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    bars = Bars()
    rows = []
    for hidden in arguments.hidden or HIDDEN:
        sizes = Sizes(tokens=arguments.tokens, hidden=hidden, dtype=arguments.dtype)
        _show(f"{sizes.tokens} tokens, hidden {hidden}, vocabulary {VOCAB_SIZE}, {sizes.dtype}")
        rows += report(bars, sizes, {way: measured(way, sizes, arguments.rounds) for way in WAYS})
    title = ("tokens", "hidden", "type", "way", "peak MiB", "of plain", "CPU s", "of plain")
    print("\n" + table(title, rows))
    return bars.exit_code


def report(bars: Bars, sizes: Sizes, figures: dict[str, Figures]) -> list[tuple[str, ...]]:
    """Print the bars of one size; return the rows of the table, one for each way."""
    for way, one in figures.items():
        _show(
            f"  {way}: {one.peak_bytes / MIB:.0f} MiB, {one.cpu_s:.2f} CPU s, loss {one.loss:.6f}"
        )
    base, peers = figures["plain"], [figures["plain"], figures["chunked"]]
    _show(f"  loss and gradient norms differ by {differences(figures['ours'], base):.1e}")
    # No way of computing them does without the gradient of the weights that it returns.
    _show(f"  that gradient alone is {sizes.weight_bytes / base.peak_bytes:.3f} of plain's memory")
    name, (memory, _) = f"logprobs_memory_{sizes.hidden}", shares(figures["ours"], base)
    bars.at_most(name, memory, "of plain", needs=NEEDS_MEMORY)
    memory, _ = shares(figures["ours"], min(peers, key=lambda peer: peer.peak_bytes))
    bars.at_most(f"{name}_of_best", memory, "of the best other", needs=NEEDS_MEMORY_OF_BEST)
    _, cpu = shares(figures["ours"], min(peers, key=lambda peer: peer.cpu_s))
    bars.at_most(f"logprobs_cpu_{sizes.hidden}", cpu, "of the best other", needs=NEEDS_CPU_OF_BEST)
    rows = []
    for way, one in figures.items():
        memory, cpu = shares(one, base)
        of_memory = (f"{one.peak_bytes / MIB:.0f}", f"{memory:.2f}")
        named = (str(sizes.tokens), str(sizes.hidden), sizes.dtype, way)
        rows.append((*named, *of_memory, f"{one.cpu_s:.1f}", f"{cpu:.2f}"))
    return rows


def _show(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
