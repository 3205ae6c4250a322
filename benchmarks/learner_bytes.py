"""What a learner step takes on a GPU, by arithmetic: bytes over bandwidth, products over rate.

Bytes are those that the operators of a step read and write, in bfloat16 where nothing else is
stated. Counted for one rank without recomputation; the figures of docs/performance.md are printed.
"""

import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.shapes import SHAPES
from slipstream.wire.models.flops import SequenceCost, num_multiplied_parameters
from slipstream.wire.models.hf_config import HfConfig, load_hf_config

LENGTH = 2048  # tokens of each sequence
PEAK_FLOPS = 989e12
_HEAD = 128  # channels of a head at which attention has its full rate
_ATTENTION = 7 / 6  # products of attention: one of six is computed again in the backward pass
GROUPS = ("products", "logits", "MLP", "attention", "rotary", "norms", "update", "other", "idle")


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU as a learner finds it."""

    bytes_per_s: float = 3.0e12
    flops: float = 780e12  # rate of large matrix products
    attention_flops: float = 209e12  # rate of FlashAttention 2, both passes, heads of 128 channels
    gaps_s: float = 0.020  # idle time of a microbatch; fitted


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that a state of the learner moves."""

    logits: float  # bytes of a token's logit
    mlp: float  # bytes of a token's inner channel in a layer
    rotary: float  # bytes of a token's channel of queries and keys in a layer
    hidden: float  # bytes of a token's hidden channel in a layer: norms, residuals, biases
    update: float  # bytes of a parameter in an update
    gradient: float  # bytes of a parameter in a microbatch: its gradient joins the total


H100 = Card()
WITH_FLASH_4 = replace(H100, attention_flops=358e12)
# Updates: AdamW, then zeros, norm and clipping of gradients and weights in bfloat16; kernels clip
# inside of AdamW. Logits: two passes are products that write them.
OPERATORS = Traffic(logits=29.5 * 4, mlp=20 * 2, rotary=110, hidden=60, update=28 + 22, gradient=10)
KERNELS = Traffic(logits=4.5 * 4, mlp=8 * 2, rotary=8, hidden=60, update=32 + 14, gradient=8)
STATES = (OPERATORS, KERNELS)
# Tokens/s of one microbatch of an update, and the kernels of the 1.5B's, on an H100 with OPERATORS.
MEASURED = {("0.5B", 8192): 48_214, ("0.5B", 32768): 57_426, ("1.5B", 8192): 28_839}
PROFILE = {"products": 0.100, "logits": 0.046, "attention": 0.024}


def seconds_by_group(
    hf: HfConfig, traffic: Traffic, card: Card, *, tokens: int, microbatches: int = 1
) -> dict[str, float]:
    """Return the seconds of a learner step of one update, by group.

    Args:
        hf: shape of the model.
        traffic: bytes that its learner moves.
        card: GPU that it runs on.
        tokens: tokens of a microbatch, in sequences of LENGTH.
        microbatches: microbatches of the update.
    """
    sizes, layers = hf.sizes, hf.num_hidden_layers
    parameters = num_multiplied_parameters(hf)
    output = sizes["vocabulary"] * sizes["hidden"]
    products = 6 * parameters + 2 * output  # logits are computed again in the backward pass
    attention = _ATTENTION * SequenceCost.of(hf).quadratic * LENGTH
    attention_flops = card.attention_flops * min(1.0, hf.kv_channels / _HEAD)
    moved = {
        "logits": traffic.logits * sizes["vocabulary"] * tokens,
        "MLP": traffic.mlp * sizes["inner"] * layers * tokens,
        "rotary": traffic.rotary * (sizes["queries"] + sizes["keys"]) * layers * tokens,
        "norms": traffic.hidden * sizes["hidden"] * layers * tokens,
        "other": traffic.gradient * parameters,
    }
    seconds = {name: amount / card.bytes_per_s for name, amount in moved.items()}
    seconds["products"] = products * tokens / card.flops
    seconds["attention"] = attention * tokens / attention_flops
    seconds["idle"] = card.gaps_s
    seconds = {name: microbatches * part for name, part in seconds.items()}
    seconds["update"] = traffic.update * parameters / card.bytes_per_s
    return {name: seconds[name] for name in GROUPS}


def mfu(hf: HfConfig, traffic: Traffic, card: Card, *, tokens: int, microbatches: int = 1) -> float:
    """Return the share of PEAK_FLOPS that such a step reaches."""
    parts = seconds_by_group(hf, traffic, card, tokens=tokens, microbatches=microbatches)
    flops = SequenceCost.of(hf).flops(LENGTH) * tokens / LENGTH * microbatches
    return flops / sum(parts.values()) / PEAK_FLOPS


def shape_of(name: str) -> HfConfig:
    """Return a model of ``benchmarks.shapes`` by its name."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[name]))
        return load_hf_config(Path(folder))


def measured_mfu(name: str, tokens_per_s: float) -> float:
    """Return the MFU of a learner that trains so many tokens a second."""
    return SequenceCost.of(shape_of(name)).flops(LENGTH) / LENGTH * tokens_per_s / PEAK_FLOPS


def markdown() -> str:
    """Return the table of docs/performance.md."""
    hf = shape_of("1.5B")
    before, after = (seconds_by_group(hf, state, H100, tokens=8192) for state in STATES)
    rows = ["| | measured | operators | kernels |", "|---|---:|---:|---:|"]
    for group in GROUPS:
        known = f"{1e3 * PROFILE[group]:.0f}" if group in PROFILE else ""
        rows.append(f"| {group} | {known} | {1e3 * before[group]:.0f} | {1e3 * after[group]:.0f} |")
    sums = [8192 / MEASURED["1.5B", 8192], sum(before.values()), sum(after.values())]
    rows.append(" | ".join(["| sum, ms", *(f"{1e3 * whole:.0f}" for whole in sums)]) + " |")
    for (name, tokens), speed in MEASURED.items():
        ours = measured_mfu(name, speed)
        share = mfu(shape_of(name), OPERATORS, H100, tokens=tokens)
        known = f"{ours:.3f} | {share:.3f} ({share / ours - 1:+.0%})"
        rows.append(f"| MFU {name}, {tokens:,} | {known} | {_shares(name, tokens, H100)} |")
    for name in ("0.5B", "1.5B"):
        shares = _shares(name, 8192, WITH_FLASH_4)
        rows.append(f"| {name}, FlashAttention 4 | | | {shares} |")
    return "\n".join(rows)


def _shares(name: str, tokens: int, card: Card) -> str:
    """Return the MFU with kernels at 1, 4 and 16 microbatches of an update."""
    hf = shape_of(name)
    found = [mfu(hf, KERNELS, card, tokens=tokens, microbatches=count) for count in (1, 4, 16)]
    return "/".join(f"{share:.3f}" for share in found)


if __name__ == "__main__":
    print(markdown())
