"""Bias and variance of gradient estimators on stale data, computed exactly: nothing is sampled.

A policy writes so few tokens that every sequence can be listed with its probability. It starts at
random and is improved by exact gradient ascent. Data is of an earlier version, sampled through an
engine whose logits differ a little from the learner's; the gradient is wanted at the newest one.
Each estimator is an algorithm of algos/, given each sequence x as a batch of its own:

    bias      |E_mu[g(x)] - G| / |G|       G = exact gradient of the expected reward under q
    cosine    of E_mu[g(x)] and G
    variance  (E_mu|g(x)|^2 - |E_mu[g(x)]|^2) / the same on policy (x from q, -A log q)
    error     sqrt(E|b - G|^2) / |G|       b = mean of g(x) over 256 sequences from mu
    direction E[b] G / (|G| sqrt(E|b|^2))  as a cosine of b and G; b's scale does not matter

The advantage is reward - E_mu[reward], losses are summed over tokens, and the gradient is the
first of a learner step: current = proximal = q. Figures are means over problems.

Shapes: S sequences of H tokens, all there are; V tokens to choose from; P logits of a policy.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from slipstream.algos.compose import Algorithm, LossInputs, PolicyOutputs
from slipstream.algos.config import choice_of
from slipstream.algos.corrections import Correction
from slipstream.algos.packing import Packing
from slipstream.algos.reduce import Denominators
from slipstream.algos.section import AlgoSection, Table

HORIZONS = {4: 3, 10: 2}  # H -> V
NUM_PROBLEMS = 10
NUM_TRAJECTORIES = 256  # of the batch whose error is given
_LEARNING_RATE = 1.2
_START_DEVIATION = 1.0  # of the first policy's logits
_SUCCESSES = 0.25  # share of all sequences
_POPULATION = 16_384  # sequences that represent mu where a rule reads a whole minibatch
_UNLIMITED = 1e9
_EXAMPLES = """examples:
  python -m benchmarks.bench_corrections
  python -m benchmarks.bench_corrections --markdown
  python -m benchmarks.bench_corrections --svg docs/images/bench_corrections.svg"""


@dataclass(frozen=True, slots=True)
class Case:
    """Where data comes from."""

    lag: int  # versions between the data's policy and the learner's
    mismatch: float = 0.02  # deviation of the engine's logits from the learner's


CASES = (Case(lag=0), Case(lag=2), Case(lag=8), Case(lag=2, mismatch=1.0))
_NUM_VERSIONS = 1 + max(case.lag for case in CASES)


# ---- estimators --------------------------------------------------------------


def _section(
    surrogate: str,
    correction: Table | None = None,
    anchor: Literal["", "proximal", "behavior"] = "",
) -> AlgoSection:
    """Return a section of these parts alone."""
    return AlgoSection(
        preset="dr-grpo",  # without corrections and without a reference policy
        surrogate=surrogate,
        anchor=anchor or ("" if surrogate == "policy-gradient" else "proximal"),
        correction=correction or {},
        reduce="token-sum",
    )


def _weighted(level: str, high: float) -> AlgoSection:
    return _section("policy-gradient", {"importance-sampling": {"level": level, "high": high}})


DECOUPLED = "decoupled-ppo"
UNCORRECTED = "none"
UNBIASED = "sequence, no cap"
_ICE_POP = {"level": "token", "low": 0.5, "high": 2.0}
ESTIMATORS: dict[str, AlgoSection] = {
    UNCORRECTED: _section("policy-gradient"),
    "token, cap 2": _weighted("token", 2.0),
    "token, cap 5": _weighted("token", 5.0),
    DECOUPLED: AlgoSection(preset=DECOUPLED, reduce="token-sum"),
    "sequence, cap 2": _weighted("sequence", 2.0),
    "sequence, cap 5": _weighted("sequence", 5.0),
    UNBIASED: _weighted("sequence", _UNLIMITED),
    "geometric, cap 2": _weighted("geometric", 2.0),
    "reject token": _section("policy-gradient", {"rejection": _ICE_POP}),
    "reject token, token cap 2": _section(
        "policy-gradient",
        {"rejection": _ICE_POP, "importance-sampling": {"level": "token", "high": 2.0}},
    ),
    "reject geometric": _section(
        "policy-gradient", {"rejection": {"level": "geometric", "low": 0.9, "high": 1.1}}
    ),
    "ppo-clip at mu": _section("ppo-clip", anchor="behavior"),
    "gspo at mu": _section("gspo", anchor="behavior"),
    "cispo at mu": _section("cispo", anchor="behavior"),
    "reinforce-is at mu": _section("reinforce-is", anchor="behavior"),
    "m2po": AlgoSection(preset="m2po", reduce="token-sum"),
    "dppo at mu": _section("dppo-tv", anchor="behavior"),
    "drpo at mu": _section("drpo", anchor="behavior"),
    "topr at mu": _section("topr", anchor="behavior"),
    "staleness-decay": _section("policy-gradient", {"staleness-decay": {"decay": 0.9}}),
    "approximate-proximal": _section(
        "ppo-clip",
        {"approximate-proximal": {}, "importance-sampling": {"level": "token", "high": 5.0}},
    ),
}


# ---- problems ----------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """All sequences, what each is worth, and the policies on the way to the learner's.

    A policy has V logits for each position and token before it. A sequence succeeds, with reward
    1.0 and not 0.0, if its sum of random marks by position, token before and token is in the upper
    quarter: policies can learn it, but not perfectly.
    """

    tokens: Tensor  # [S, H] int64
    rows: Tensor  # [S, H] int64, which V logits decide the token
    rewards: Tensor  # [S] float64
    versions: Tensor  # [versions, rows, V] float64 logits, the last one is the learner's
    noise: Tensor  # [rows, V] float64, what an engine with mismatch 1.0 adds

    def logprobs(self, logits: Tensor) -> Tensor:
        """Return the log-probability of every token. Shapes [rows, V] -> [S, H]."""
        return logits.log_softmax(-1)[self.rows, self.tokens]

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probability of every sequence. Shapes [rows, V] -> [S]."""
        return self.logprobs(logits).sum(-1).exp()

    def expected_reward(self, logits: Tensor) -> Tensor:
        """Return what is maximized. Shapes [rows, V] -> []."""
        return (self.probabilities(logits) * self.rewards).sum()

    def gradient(self, logits: Tensor) -> Tensor:
        """Return the exact gradient of the expected reward. Shapes [rows, V] -> [P]."""
        leaf = logits.detach().clone().requires_grad_()
        (gradient,) = torch.autograd.grad(self.expected_reward(leaf), leaf)
        return gradient.flatten()

    @property
    def proximal(self) -> Tensor:
        """Return the learner's logits, [rows, V]."""
        return self.versions[-1]

    def behavior(self, case: Case) -> Tensor:
        """Return the logits that data is sampled from, [rows, V]."""
        return self.versions[-1 - case.lag] + case.mismatch * self.noise

    def mismatch_kl(self, case: Case) -> float:
        """Return KL(mu || q) of a sequence, in nats."""
        q, mu = self.logprobs(self.proximal).sum(-1), self.logprobs(self.behavior(case)).sum(-1)
        return float((mu.exp() * (mu - q)).sum())

    @cached_property
    def scores(self) -> Tensor:
        """Return the gradient of every token's log q, [S, H, P]: one-hot - q in the token's row."""
        num_rows, width = self.proximal.shape
        one_hot = torch.nn.functional.one_hot
        policy = self.proximal.softmax(-1)[self.rows]
        own_row = one_hot(self.rows, num_rows).double()
        chosen = one_hot(self.tokens, width).double() - policy
        return torch.einsum("shr,shv->shrv", own_row, chosen).flatten(2)


def problem(
    horizon: int, seed: int, *, width: int | None = None, num_versions: int = _NUM_VERSIONS
) -> Problem:
    """Return a random problem of so many tokens.

    Args:
        horizon: tokens of a sequence.
        seed: of the marks, the first policy and the engine.
        width: tokens to choose from; None takes that of HORIZONS.
        num_versions: of the policy, the learner's included.
    """
    width = HORIZONS[horizon] if width is None else width
    tokens = torch.cartesian_prod(*[torch.arange(width)] * horizon)
    before = torch.cat([torch.zeros(len(tokens), 1, dtype=torch.int64), tokens[:, :-1]], 1)
    rows = torch.arange(horizon) * width + before
    random = np.random.default_rng([horizon, seed])
    shape = (horizon * width, width)
    marks, start, noise = (torch.from_numpy(random.standard_normal(shape)) for _ in range(3))
    marked = marks[rows, tokens].sum(-1)
    rewards = (marked > marked.quantile(1.0 - _SUCCESSES)).double()
    empty = Problem(tokens, rows, rewards, torch.empty(0), noise)
    versions = [_START_DEVIATION * start]
    for _ in range(num_versions - 1):
        step = _LEARNING_RATE * empty.gradient(versions[-1]).view(shape)
        versions.append(versions[-1] + step)
    return Problem(tokens, rows, rewards, torch.stack(versions), noise)


# ---- estimates ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Estimate:
    """How an estimator does, as described above."""

    bias: float
    cosine: float
    variance: float
    error: float
    direction: float


def gradients(section: AlgoSection, given: Problem, behavior: Tensor, lag: int) -> Tensor:
    """Return what an algorithm makes of each sequence, as a direction of ascent.

    The loss is a sum over sequences in which none sees another, so that one call does for all: its
    derivative by the log-probability of each token, times that one's gradient.

    Args:
        section: the algorithm.
        given: the problem.
        behavior: [rows, V] logits of the policy that the sequences are from.
        lag: of the sequences, in versions.

    Returns:
        [S, P].
    """
    num_sequences, horizon = given.tokens.shape
    algorithm = Algorithm(choice_of(section), max_response_tokens=horizon)
    mu = given.probabilities(behavior)
    proximal, sampled = given.logprobs(given.proximal), given.logprobs(behavior)
    advantages = given.rewards - (mu * given.rewards).sum()
    seen = _Seen(proximal, sampled, advantages.unsqueeze(-1).expand_as(proximal), lag)
    current = proximal.flatten().requires_grad_()
    packing = _packing(num_sequences, horizon)
    correction = _of_population(algorithm, seen, mu) if algorithm.corrects_before else None
    loss, _ = algorithm.loss(
        LossInputs(
            proximal=current.detach(),
            behavior=sampled.flatten(),
            advantages=seen.advantages.flatten(),
            packing=packing,
            denominators=Denominators(num_tokens=1.0, num_sequences=1.0),
            lags=torch.full_like(packing.sequence, lag),
            correction=correction,
        ),
        PolicyOutputs(current, torch.zeros_like(current)),
    )
    (by_token,) = torch.autograd.grad(loss, current)
    return torch.einsum("sh,shp->sp", -by_token.view(num_sequences, horizon), given.scores)


def estimate(section: AlgoSection, given: Problem, case: Case, *, least: float) -> Estimate:
    """Return how an algorithm does.

    Args:
        section: the algorithm.
        given: the problem.
        case: where the data comes from.
        least: ``on_policy_variance`` of the problem.
    """
    exact = given.gradient(given.proximal)
    size = float(exact.norm())
    behavior = given.behavior(case)
    mean, variance = _moments(
        gradients(section, given, behavior, case.lag), given.probabilities(behavior)
    )
    gain, length = float(mean @ exact) / size, float(mean.norm())
    bias, of_batch = float((mean - exact).norm()) / size, variance / NUM_TRAJECTORIES
    return Estimate(
        bias=bias,
        cosine=gain / length,
        variance=variance / least,
        error=(bias**2 + of_batch / size**2) ** 0.5,
        direction=gain / (length**2 + of_batch) ** 0.5,
    )


def on_policy_variance(given: Problem) -> float:
    """Return the variance of -A log q on sequences of q itself."""
    by_sequence = gradients(ESTIMATORS[UNCORRECTED], given, given.proximal, 0)
    return _moments(by_sequence, given.probabilities(given.proximal))[1]


def _moments(gradients_: Tensor, probabilities: Tensor) -> tuple[Tensor, float]:
    """Return mean and trace of the covariance. Shapes [S, P], [S] -> [P], []."""
    mean = probabilities @ gradients_
    return mean, float(probabilities @ (gradients_ - mean).square().sum(-1))


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a correction sees of each sequence."""

    proximal: Tensor  # [S, H]
    behavior: Tensor  # [S, H]
    advantages: Tensor  # [S, H]
    lag: int


def _packing(num_sequences: int, horizon: int) -> Packing:
    sequence = torch.arange(num_sequences).repeat_interleave(horizon)
    return Packing(torch.ones_like(sequence, dtype=torch.bool), sequence, num_sequences)


def _of_population(algorithm: Algorithm, seen: _Seen, mu: Tensor) -> Correction:
    """Return each sequence's correction within a minibatch that holds all in proportion to mu.

    What a rule for a whole minibatch does to one sequence depends on the others: they are as many
    as in mu, rounded, and at least one of each.
    """
    copies = (mu * _POPULATION).round().long().clamp(min=1)
    horizon = seen.proximal.shape[1]
    index = torch.arange(len(mu)).repeat_interleave(copies)
    packing = _packing(len(index), horizon)
    whole = algorithm.correct(
        proximal=seen.proximal[index].flatten(),
        behavior=seen.behavior[index].flatten(),
        advantages=seen.advantages[index].flatten(),
        lags=torch.full_like(packing.sequence, seen.lag),
        packing=packing,
    )
    first = copies.cumsum(0) - copies
    weights, keep = (v.view(-1, horizon)[first].flatten() for v in (whole.weights, whole.keep))
    return Correction(weights=weights, keep=keep)


# ---- tables ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Figures:
    """Means over all problems."""

    estimates: dict[tuple[int, Case, str], Estimate]  # (horizon, case, estimator)
    kls: dict[tuple[int, Case], float]  # (horizon, case) -> KL(mu || q) of a sequence, nats


def measured() -> Figures:
    """Return the figures of every estimator in every case, at every horizon."""
    estimates: dict[tuple[int, Case, str], Estimate] = {}
    kls: dict[tuple[int, Case], float] = {}
    for horizon in HORIZONS:
        problems = [problem(horizon, seed) for seed in range(NUM_PROBLEMS)]
        least = [on_policy_variance(one) for one in problems]
        for case in CASES:
            kls[horizon, case] = _mean([one.mismatch_kl(case) for one in problems])
            for name, section in ESTIMATORS.items():
                found = [
                    estimate(section, one, case, least=variance)
                    for one, variance in zip(problems, least, strict=True)
                ]
                means = (_mean([getattr(e, f.name) for e in found]) for f in fields(Estimate))
                estimates[horizon, case, name] = Estimate(*means)
    return Figures(estimates, kls)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def table(figures: Figures, case: Case) -> list[list[str]]:
    """Return the cells of one case's table, its heading first."""
    heading = ["estimator"]
    for horizon in HORIZONS:
        heading += [f"{field.name}, H = {horizon}" for field in fields(Estimate)]
    rows = [heading]
    for name in ESTIMATORS:
        found = [figures.estimates[horizon, case, name] for horizon in HORIZONS]
        rows.append([name] + [f"{getattr(e, f.name):.3f}" for e in found for f in fields(Estimate)])
    return rows


def title(figures: Figures, case: Case) -> str:
    """Return what the data of a case is."""
    kls = " and ".join(f"{figures.kls[h, case]:.2g} nats at H = {h}" for h in HORIZONS)
    return f"Lag {case.lag}, mismatch {case.mismatch:g}; KL of a sequence {kls}"


def markdown(figures: Figures) -> str:
    """Return all tables as docs/estimators.md has them."""
    lines = []
    for case in CASES:
        heading, *rows = table(figures, case)
        lines += [f"**{title(figures, case)}**", "", _line(heading)]
        lines += ["|---" + "|---:" * (len(heading) - 1) + "|", *map(_line, rows), ""]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def plain(figures: Figures) -> str:
    """Return all tables for a terminal."""
    lines = []
    for case in CASES:
        lines.append(title(figures, case))
        for first, *rest in table(figures, case):
            lines.append(f"{first:24}" + "".join(f"{cell:>18}" for cell in rest))
        lines.append("")
    return "\n".join(lines)


# ---- picture -----------------------------------------------------------------

_PLOT = (350, 270)  # width and height of a panel's axes, pixels
_PANEL = (620, 400)  # the labels are to the right of the axes
_MARGIN = (64, 44)  # of the axes in their panel, left and top
_LABEL_HEIGHT = 15
_BIASES = (0.0, 0.5, 1.0, 1.5, 2.0)
_VARIANCES = (0.01, 0.1, 1.0, 10.0, 100.0, 1000.0)
_COLORS = {  # by the first part of an estimator's name
    "none": "#000000",
    "token": "#0b62c4",
    DECOUPLED: "#0b62c4",
    "sequence": "#0a7d34",
    "geometric": "#7a7a00",
    "reject": "#b35c00",
}
_OTHER_COLOR = "#b3003c"


def svg(figures: Figures) -> str:
    """Return the longest horizon's bias and variance, one panel per case."""
    horizon = max(HORIZONS)
    width, height = 2 * _PANEL[0], 44 + -(-len(CASES) // 2) * _PANEL[1]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="12" '
        'fill="#1a1a1a">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="24" y="30" font-size="17" font-weight="bold">Bias and variance of gradient '
        f"estimators on stale data, computed exactly ({horizon} tokens)</text>",
    ]
    for number, case in enumerate(CASES):
        left, top = number % 2 * _PANEL[0] + _MARGIN[0], number // 2 * _PANEL[1] + 44 + _MARGIN[1]
        points = {name: figures.estimates[horizon, case, name] for name in ESTIMATORS}
        heading = (
            f"lag {case.lag}, mismatch {case.mismatch:g}: "
            f"KL of a sequence {figures.kls[horizon, case]:.2g} nats"
        )
        lines += _axes(left, top, heading) + _marks(left, top, points)
    return "\n".join([*lines, "</svg>", ""])


def _axes(left: int, top: int, heading: str) -> list[str]:
    """Return frame, grid and scales of a panel."""
    width, height = _PLOT
    bottom = top + height
    lines = [
        f'<text x="{left}" y="{top - 12}" font-size="14" font-weight="bold">{heading}</text>',
        f'<rect x="{left}" y="{top}" width="{width}" height="{height}" fill="none" '
        'stroke="#1a1a1a"/>',
        f'<text x="{left + width // 2}" y="{bottom + 36}" text-anchor="middle">bias</text>',
        f'<text transform="translate({left - 46} {top + height // 2}) rotate(-90)" '
        'text-anchor="middle">variance, 1 = on policy</text>',
    ]
    for bias in _BIASES:
        x = left + _x(bias)
        lines.append(f'<text x="{x}" y="{bottom + 17}" text-anchor="middle">{bias:g}</text>')
        lines.append(f'<path d="M{x} {top}V{bottom}" stroke="#e2e2e2"/>')
    for variance in _VARIANCES:
        y = top + _y(variance)
        lines.append(f'<text x="{left - 7}" y="{y + 4}" text-anchor="end">{variance:g}</text>')
        lines.append(f'<path d="M{left} {y}H{left + width}" stroke="#e2e2e2"/>')
    return lines


def _marks(left: int, top: int, points: dict[str, Estimate]) -> list[str]:
    """Return a dot for each estimator, and its name on a line of its own, in order of height."""
    lines = []
    ordered = sorted(points, key=lambda name: (_y(points[name].variance), _x(points[name].bias)))
    label_x = left + _PLOT[0] + 28
    for number, name in enumerate(ordered):
        x, y = left + _x(points[name].bias), top + _y(points[name].variance)
        label_y = top + 4 + number * _LABEL_HEIGHT
        color = _COLORS.get(name if name in _COLORS else name.split()[0].strip(","), _OTHER_COLOR)
        lines += [
            f'<path d="M{x} {y}L{label_x - 5} {label_y}" stroke="{color}" stroke-opacity="0.3"/>',
            f'<circle cx="{x}" cy="{y}" r="4" fill="{color}" stroke="#ffffff"/>',
            f'<text class="label" x="{label_x}" y="{label_y + 4}" fill="{color}">{name}</text>',
        ]
    return lines


def _x(bias: float) -> int:
    """Return pixels from the left of the axes."""
    share = (min(bias, _BIASES[-1]) - _BIASES[0]) / (_BIASES[-1] - _BIASES[0])
    return round(_PLOT[0] * share)


def _y(variance: float) -> int:
    """Return pixels from the top of the axes, whose scale is logarithmic."""
    low, high = math.log10(_VARIANCES[0]), math.log10(_VARIANCES[-1])
    return round(_PLOT[1] * (high - math.log10(variance)) / (high - low))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--markdown", action="store_true", help="as it is in docs/estimators.md")
    output.add_argument("--svg", type=Path, metavar="FILE", help="write the picture instead")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # tensors are small
    figures = measured()
    if arguments.svg:
        arguments.svg.write_text(svg(figures), "utf-8")
    else:
        sys.stdout.write((markdown if arguments.markdown else plain)(figures) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
