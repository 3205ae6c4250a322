"""Every clip, gate and threshold against its formula, stated anew one token at a time.

Each test states which of its tokens lie beyond which bound, by the statement and not by the code
under test, and ``test_evidence`` demands that every bound there is has tokens on both sides: a
comparison in which a gate never acts proves nothing of the gate.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from docs.generate.evidence import DEFINITION, Flags, proves, straddles
from slipstream.algos.compose import Algorithm, RightAnswers
from slipstream.algos.config import choice_of
from slipstream.algos.corrections import (
    ClipCovOptions,
    Correction,
    CorrectionInputs,
    ImportanceSamplingOptions,
    KlCovOptions,
    M2poOptions,
    OpsmOptions,
    RejectionOptions,
    VetoOptions,
    clip_cov,
    importance_sampling,
    kl_cov,
    m2po,
    opsm,
    rejection,
    veto,
)
from slipstream.algos.critic import value_loss
from slipstream.algos.diagnostics import Sums
from slipstream.algos.kl import MAX_LOW_VAR, kl_estimate
from slipstream.algos.packing import Packing
from slipstream.algos.returns import GaeOptions, TokenOutcomes, gae
from slipstream.algos.section import AlgoSection
from slipstream.algos.shaping import overlong_penalty, scaled
from slipstream.algos.surrogates import (
    CispoOptions,
    DppoKlOptions,
    DppoTvOptions,
    DrpoOptions,
    GmpoOptions,
    GspoOptions,
    PpoOptions,
    ToprOptions,
    cispo,
    dppo_kl,
    dppo_tv,
    drpo,
    gmpo,
    gspo,
    ppo_clip,
    topr,
)
from tests.unit.algos.microbatch import correction_inputs, microbatch_loss, packed, surrogate_inputs

LENGTHS = (5, 3, 8, 1, 6, 4, 7, 2)


@dataclass(frozen=True)
class Batch:
    """Sequences of two policies that are far from each other, as lists of numbers."""

    lengths: tuple[int, ...]
    current: list[float]
    anchor: list[float]
    advantages: list[float]  # equal within a sequence

    def packing(self) -> Packing:
        mask = torch.ones(len(self.current), dtype=torch.bool)
        return Packing.of(mask, torch.tensor([0, *self.lengths]).cumsum(0))

    def sequences(self) -> Iterator[range]:
        end = 0
        for length in self.lengths:
            end += length
            yield range(end - length, end)

    @property
    def log_ratios(self) -> list[float]:
        return [c - a for c, a in zip(self.current, self.anchor, strict=True)]


def batch(seed: int = 0, spread: float = 0.8) -> Batch:
    random = np.random.default_rng(seed)
    count = sum(LENGTHS)
    current = -3.0 * random.random(count) - 0.01
    anchor = np.minimum(current + spread * random.normal(size=count), -0.001)
    advantages = np.repeat(random.normal(size=len(LENGTHS)), LENGTHS)
    return Batch(LENGTHS, current.tolist(), anchor.tolist(), advantages.tolist())


BATCH = batch()


def tensor(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# ---- surrogates ----

# What a statement gives for each token: its loss, the slope of the batch's sum by its log pi, and
# whether it is beyond each bound.
Stated = tuple[list[float], list[float], dict[str, list[bool]]]


def stated_ppo(given: Batch, low: float, high: float, dual: float) -> Stated:
    losses, slopes = [], []
    flags: dict[str, list[bool]] = {"clip_low": [], "clip_high": [], "clip_dual": []}
    for log_r, a in zip(given.log_ratios, given.advantages, strict=True):
        r = math.exp(log_r)
        above, below, beyond = a > 0 and r > 1 + high, a < 0 and r < 1 - low, a < 0 and r > dual
        losses.append(-(1 + high) * a if above else -(1 - low) * a if below else -r * a)
        slopes.append(0.0 if above or below else -r * a)
        if beyond:
            losses[-1], slopes[-1] = -dual * a, 0.0
        for name, flag in zip(flags, (below, above, beyond), strict=True):
            flags[name].append(flag)
    return losses, slopes, flags


def stated_gspo(given: Batch, low: float, high: float) -> Stated:
    losses, slopes = [0.0] * len(given.current), [0.0] * len(given.current)
    flags = {name: [False] * len(given.current) for name in ("clip_low", "clip_high")}
    for sequence in given.sequences():
        s = math.exp(sum(given.log_ratios[t] for t in sequence) / len(sequence))
        for t in sequence:
            a = given.advantages[t]
            above, below = a > 0 and s > 1 + high, a < 0 and s < 1 - low
            losses[t] = -(1 + high) * a if above else -(1 - low) * a if below else -s * a
            slopes[t] = 0.0 if above or below else -s * a
            flags["clip_high"][t], flags["clip_low"][t] = above, below
    return losses, slopes, flags


def stated_cispo(given: Batch, low: float, high: float) -> Stated:
    weights, losses = [], []
    flags: dict[str, list[bool]] = {"clip_low": [], "clip_high": []}
    for log_r, log_pi, a in zip(given.log_ratios, given.current, given.advantages, strict=True):
        r = math.exp(log_r)
        weights.append(-a * (1 - low if r < 1 - low else min(r, 1 + high)))
        losses.append(weights[-1] * log_pi)
        flags["clip_low"].append(r < 1 - low)
        flags["clip_high"].append(r > 1 + high)
    return losses, weights, flags


def stated_gmpo(given: Batch, low: float, high: float) -> Stated:
    losses, slopes = [0.0] * len(given.current), [0.0] * len(given.current)
    flags = {name: [False] * len(given.current) for name in ("clip_low", "clip_high")}
    for sequence in given.sequences():
        clipped = []
        for t in sequence:
            a, log_r = given.advantages[t], given.log_ratios[t]
            flags["clip_high"][t] = a > 0 and log_r > high
            flags["clip_low"][t] = a < 0 and log_r < -low
            clipped.append(min(log_r, high) if a > 0 else max(log_r, -low))
        of_sequence = math.exp(sum(clipped) / len(sequence))
        for t in sequence:
            losses[t] = -given.advantages[t] * of_sequence
            stopped = flags["clip_high"][t] or flags["clip_low"][t]
            slopes[t] = 0.0 if stopped else losses[t]
    return losses, slopes, flags


def stated_dppo(
    given: Batch, far: Callable[[float, float], float], low: float, high: float, cap: float
) -> Stated:
    """State DPPO with a divergence of (pi, anchor) that is a number >= 0."""
    losses, slopes = [], []
    flags: dict[str, list[bool]] = {"clip_low": [], "clip_high": [], "max_weight": []}
    for log_pi, log_a, a in zip(given.current, given.anchor, given.advantages, strict=True):
        pi, anchor = math.exp(log_pi), math.exp(log_a)
        above = a > 0 and pi > anchor and far(pi, anchor) > high
        below = a <= 0 and pi < anchor and far(pi, anchor) > low
        slopes.append(0.0 if above or below else -min(pi / anchor, cap) * a)
        losses.append(slopes[-1] * log_pi)
        flags["clip_low"].append(below)
        flags["clip_high"].append(above)
        flags["max_weight"].append(pi / anchor > cap and not (above or below))
    return losses, slopes, flags


def total_variation(pi: float, anchor: float) -> float:
    return abs(pi - anchor)


def two_coins(pi: float, anchor: float) -> float:
    return anchor * math.log(anchor / pi) + (1 - anchor) * math.log((1 - anchor) / (1 - pi))


def stated_drpo(given: Batch, width: float) -> Stated:
    losses, slopes = [], []
    flags: dict[str, list[bool]] = {"width": []}
    for log_pi, log_a, a in zip(given.current, given.anchor, given.advantages, strict=True):
        pi, anchor = math.exp(log_pi), math.exp(log_a)
        r = pi / anchor
        losses.append(-a * r + abs(a) * anchor * (r - 1) ** 2 / (2 * width))
        slopes.append(-a * r * (1 - math.copysign(1, a * (r - 1)) * abs(pi - anchor) / width))
        flags["width"].append(a * (r - 1) > 0 and abs(pi - anchor) > width)
    return losses, slopes, flags


def stated_topr(given: Batch, level: str, high: float) -> Stated:
    losses, slopes = [0.0] * len(given.current), [0.0] * len(given.current)
    flags = {"high": [False] * len(given.current)}
    for sequence in given.sequences():
        total = sum(given.log_ratios[t] for t in sequence)
        for t in sequence:
            a = given.advantages[t]
            mean = total / len(sequence)
            logs = {"sequence": total, "token": given.log_ratios[t], "geometric": mean}
            ratio = math.exp(logs[level])
            slopes[t] = -a if a > 0 else -min(ratio, high) * a
            losses[t] = slopes[t] * given.current[t]
            flags["high"][t] = a < 0 and ratio > high
    return losses, slopes, flags


SURROGATES: dict[str, tuple[Any, Any, Callable[[], Stated]]] = {
    "ppo-clip": (
        ppo_clip,
        PpoOptions(clip_low=0.2, clip_high=0.28, clip_dual=1.5),
        lambda: stated_ppo(BATCH, 0.2, 0.28, 1.5),
    ),
    "gspo": (gspo, GspoOptions(clip_low=0.1, clip_high=0.2), lambda: stated_gspo(BATCH, 0.1, 0.2)),
    "cispo": (
        cispo,
        CispoOptions(clip_low=0.4, clip_high=0.7),
        lambda: stated_cispo(BATCH, 0.4, 0.7),
    ),
    "gmpo": (gmpo, GmpoOptions(clip_low=0.3, clip_high=0.5), lambda: stated_gmpo(BATCH, 0.3, 0.5)),
    "dppo-tv": (
        dppo_tv,
        DppoTvOptions(clip_low=0.15, clip_high=0.1, max_weight=1.3),
        lambda: stated_dppo(BATCH, total_variation, 0.15, 0.1, 1.3),
    ),
    "dppo-kl": (
        dppo_kl,
        DppoKlOptions(clip_low=0.06, clip_high=0.03, max_weight=1.3),
        lambda: stated_dppo(BATCH, two_coins, 0.06, 0.03, 1.3),
    ),
    "drpo": (drpo, DrpoOptions(width=0.1), lambda: stated_drpo(BATCH, 0.1)),
    "topr": (topr, ToprOptions(high=0.8), lambda: stated_topr(BATCH, "sequence", 0.8)),
    "topr-token": (
        topr,
        ToprOptions(level="token", high=0.8),
        lambda: stated_topr(BATCH, "token", 0.8),
    ),
    "topr-geometric": (
        topr,
        ToprOptions(level="geometric", high=0.8),
        lambda: stated_topr(BATCH, "geometric", 0.8),
    ),
}


def flags_of_surrogates() -> Flags:
    return {
        f"surrogate.{name}.{bound}": flags
        for name, (_, _, stated) in SURROGATES.items()
        for bound, flags in stated()[2].items()
    }


@straddles(flags_of_surrogates)
@proves(*(part for part, _, _ in SURROGATES.values()), against=DEFINITION, what="value, gradient")
@pytest.mark.parametrize("name", SURROGATES)
def test_a_surrogate_and_its_slope_are_those_of_the_formula_on_both_sides(name: str):
    part, options, stated = SURROGATES[name]
    current = tensor(BATCH.current).requires_grad_()
    anchor, advantages = tensor(BATCH.anchor), tensor(BATCH.advantages)
    terms = part(surrogate_inputs(current, anchor, advantages, BATCH.packing()), options)
    (gradient,) = torch.autograd.grad(terms.per_token.sum(), current)
    losses, slopes, flags = stated()
    torch.testing.assert_close(terms.per_token.detach(), tensor(losses), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(gradient, tensor(slopes), rtol=1e-6, atol=1e-9)
    none = [False] * len(losses)
    if name == "drpo":
        out = flags["width"]
        expected = [
            [o and a > 0 for o, a in zip(out, BATCH.advantages, strict=True)],
            [o and a < 0 for o, a in zip(out, BATCH.advantages, strict=True)],
        ]
    else:
        expected = [flags.get("clip_high", flags.get("high", none)), flags.get("clip_low", none)]
    assert terms.clipped_up.tolist() == expected[0]
    assert terms.clipped_down.tolist() == expected[1]
    assert terms.clipped_dual.tolist() == flags.get("clip_dual", none)


# ---- corrections ----


def inputs_of(given: Batch = BATCH) -> CorrectionInputs:
    values = (tensor(one) for one in (given.current, given.anchor, given.advantages))
    return correction_inputs(*values, given.packing())


Measure = Literal["ratio", "k1", "k2", "k3", "tv", "binary-kl"]
Level = Literal["token", "sequence", "geometric", "sequence-mean", "sequence-max"]
LEVELS: dict[str, Callable[[list[float]], float]] = {
    "sequence": sum,
    "sequence-mean": lambda values: sum(values) / len(values),
    "sequence-max": max,
}


def measured(measure: str, level: str) -> list[float]:
    """Return what rejection measures at each token of BATCH."""
    q, mu = ([math.exp(x) for x in xs] for xs in (BATCH.current, BATCH.anchor))
    of_token = {
        "ratio": [a / b for a, b in zip(q, mu, strict=True)],
        "k1": [-x for x in BATCH.log_ratios],
        "k2": [x**2 / 2 for x in BATCH.log_ratios],
        "k3": [math.expm1(x) - x for x in BATCH.log_ratios],
        "tv": [abs(a - b) for a, b in zip(q, mu, strict=True)],
        "binary-kl": [two_coins(a, b) for a, b in zip(q, mu, strict=True)],
    }[measure]
    if level == "token":
        return of_token
    result = [0.0] * len(of_token)
    for sequence in BATCH.sequences():
        values = [of_token[t] for t in sequence]
        if measure == "ratio" and level in {"sequence", "geometric"}:
            product = math.prod(values)
            value = product if level == "sequence" else product ** (1 / len(values))
        else:
            value = LEVELS[level](values)
        for t in sequence:
            result[t] = value
    return result


REJECTIONS: list[tuple[Measure, Level, float, float]] = [
    ("ratio", "token", 0.6, 1.5),
    ("ratio", "sequence", 0.4, 2.0),
    ("ratio", "geometric", 0.8, 1.2),
    ("ratio", "sequence-mean", 0.8, 1.3),
    ("ratio", "sequence-max", 1.2, 3.0),
    ("k1", "token", -0.5, 0.5),
    ("k1", "sequence", -1.0, 1.0),
    ("k1", "sequence-mean", -0.2, 0.2),
    ("k1", "sequence-max", 0.3, 1.0),
    ("k2", "token", 0.01, 0.3),
    ("k2", "sequence", 0.5, 2.0),
    ("k2", "sequence-mean", 0.1, 0.4),
    ("k2", "sequence-max", 0.3, 1.0),
    ("k3", "token", 0.01, 0.3),
    ("k3", "sequence", 0.5, 2.0),
    ("k3", "sequence-mean", 0.1, 0.4),
    ("k3", "sequence-max", 0.3, 1.5),
    ("tv", "token", 0.01, 0.15),
    ("tv", "sequence", 0.2, 0.8),
    ("tv", "sequence-mean", 0.05, 0.15),
    ("tv", "sequence-max", 0.15, 0.4),
    ("binary-kl", "token", 0.001, 0.05),
    ("binary-kl", "sequence", 0.1, 0.5),
    ("binary-kl", "sequence-mean", 0.02, 0.08),
    ("binary-kl", "sequence-max", 0.05, 0.2),
]


def flags_of_rejections() -> Flags:
    flags: Flags = {}
    for measure, level, low, high in REJECTIONS:
        values = measured(measure, level)
        flags[f"rejection {measure} {level} low"] = [value < low for value in values]
        flags[f"rejection {measure} {level} high"] = [value > high for value in values]
    flags["correction.rejection.low"] = flags["rejection ratio token low"]
    flags["correction.rejection.high"] = flags["rejection ratio token high"]
    return flags


@straddles(flags_of_rejections)
@proves(rejection, against=DEFINITION)
def test_what_is_out_of_bounds_is_rejected_by_each_measure_and_level():
    for measure, level, low, high in REJECTIONS:
        options = RejectionOptions(measure=measure, level=level, low=low, high=high)
        kept = rejection(inputs_of(), options).keep
        assert kept.tolist() == [low <= value <= high for value in measured(measure, level)]


def stated_weights(level: str, low: float, high: float) -> list[float]:
    return [min(max(value, low), high) for value in measured("ratio", level)]


def flags_of_weights() -> Flags:
    values = measured("ratio", "token")
    return {
        "correction.importance-sampling.low": [value < 0.7 for value in values],
        "correction.importance-sampling.high": [value > 1.4 for value in values],
    }


@straddles(flags_of_weights)
@proves(importance_sampling, against=DEFINITION)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_weights_are_bounded_ratios_and_have_mean_1_where_they_are_normalized(
    level: Literal["token", "sequence", "geometric"], normalize: bool
):
    expected = stated_weights(level, 0.7, 1.4)
    if normalize:
        firsts = [sequence[0] for sequence in BATCH.sequences()]
        among = expected if level == "token" else [expected[t] for t in firsts]
        mean = sum(among) / len(among)
        expected = [weight / mean for weight in expected]
    options = ImportanceSamplingOptions(level=level, low=0.7, high=1.4, normalize=normalize)
    assert ("whole_minibatch" in options.needs) == normalize
    assert importance_sampling(inputs_of(), options).weights.tolist() == pytest.approx(expected)


def far_from_support() -> list[bool]:
    ratios = measured("ratio", "token")
    result = [False] * len(ratios)
    for sequence in BATCH.sequences():
        for t in sequence:
            result[t] = min(ratios[i] for i in sequence) < 0.3
    return result


@straddles(lambda: {"correction.veto.threshold": far_from_support()})
@proves(veto, against=DEFINITION)
def test_a_sequence_goes_with_its_least_likely_token():
    kept = veto(inputs_of(), VetoOptions(threshold=0.3)).keep
    assert kept.tolist() == [not far for far in far_from_support()]


def failed_and_far() -> list[bool]:
    means = measured("k1", "sequence-mean")
    return [mean > 0.05 and a < 0 for mean, a in zip(means, BATCH.advantages, strict=True)]


@straddles(lambda: {"correction.opsm.max_kl": failed_and_far()})
@proves(opsm, against=DEFINITION)
def test_what_failed_is_dropped_where_the_policy_has_left_it():
    kept = opsm(inputs_of(), OpsmOptions(max_kl=0.05)).keep
    assert kept.tolist() == [not far for far in failed_and_far()]


def kept_by_algorithm_1(log_ratios: list[float], advantages: list[float], tau: float) -> list[bool]:
    """Return what M2PO keeps: algorithm 1 of arXiv 2510.01161, as it is written there.

    T <- the trust-region tokens; while the mean of M2 over T is above tau, mask the token of T with
    the largest M2 and take it out of T.
    """
    kept = [True] * len(log_ratios)
    trust_region = [
        i
        for i, (log_r, a) in enumerate(zip(log_ratios, advantages, strict=True))
        if (a > 0 and math.exp(log_r) > 1) or (a < 0 and math.exp(log_r) < 1)
    ]
    while trust_region and np.mean([log_ratios[i] ** 2 for i in trust_region]) > tau:
        worst = max(trust_region, key=lambda i: log_ratios[i] ** 2)
        kept[worst] = False
        trust_region.remove(worst)
    return kept


def dropped_by_m2po() -> list[bool]:
    """Return which tokens are dropped, of the trust-region tokens alone."""
    kept = kept_by_algorithm_1(BATCH.log_ratios, BATCH.advantages, 0.1)
    return [
        not keep
        for keep, log_r, a in zip(kept, BATCH.log_ratios, BATCH.advantages, strict=True)
        if a * log_r > 0
    ]


@straddles(lambda: {"correction.m2po.threshold": dropped_by_m2po()})
@proves(m2po, against=DEFINITION)
@pytest.mark.parametrize("threshold", [0.04, 0.1])
@pytest.mark.parametrize("spread", [0.05, 0.25, 0.5, 0.8, 2.0])
def test_m2po_keeps_what_algorithm_1_keeps_however_far_the_policies_are(
    spread: float, threshold: float
):
    assert M2poOptions().threshold == 0.04
    for seed in range(8):
        given = batch(seed, spread)
        kept = m2po(inputs_of(given), M2poOptions(threshold=threshold)).keep
        assert kept.tolist() == kept_by_algorithm_1(given.log_ratios, given.advantages, threshold)


def covariances() -> list[float]:
    mean_q, mean_a = np.mean(BATCH.current), np.mean(BATCH.advantages)
    return [
        float((q - mean_q) * (a - mean_a))
        for q, a in zip(BATCH.current, BATCH.advantages, strict=True)
    ]


def flags_of_covariance() -> Flags:
    values = covariances()
    return {
        "correction.clip-cov.low": [value > 0.1 for value in values],
        "correction.clip-cov.high": [value < 0.6 for value in values],
        "correction.clip-cov.share": [not keep for keep in drawn_out(0.1).keep.tolist()],
        "correction.kl-cov.share": [value >= sorted(values)[-3] for value in values],
    }


def drawn_out(share: float) -> Correction:
    return clip_cov(inputs_of(), ClipCovOptions(share=share, low=0.1, high=0.6))


@straddles(flags_of_covariance)
@proves(clip_cov, against=DEFINITION)
@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
def test_clip_cov_drops_so_many_of_the_tokens_between_its_bounds(share: float):
    between = {t for t, value in enumerate(covariances()) if 0.1 < value < 0.6}
    dropped = {t for t, keep in enumerate(drawn_out(share).keep.tolist()) if not keep}
    assert dropped <= between
    number = max(1, int(share * len(BATCH.current)))
    assert len(dropped) == min(number, len(between))


def test_clip_cov_draws_by_the_token_and_not_by_its_neighbors():
    drawn = drawn_out(0.1).keep
    order = [t for sequence in reversed(list(BATCH.sequences())) for t in sequence]
    moved = Batch(
        LENGTHS[::-1],
        *([values[i] for i in order] for values in (BATCH.current, BATCH.anchor, BATCH.advantages)),
    )
    again = clip_cov(inputs_of(moved), ClipCovOptions(share=0.1, low=0.1, high=0.6)).keep
    assert again.tolist() == drawn[order].tolist()
    # the draw has nothing to do with the size of what it is drawn from
    between = [t for t, value in enumerate(covariances()) if 0.1 < value < 0.6]
    dropped = [t for t in between if not drawn[t]]
    extremes = {
        tuple(sorted(sorted(between, key=lambda t: values[t])[: len(dropped)]))
        for values in (BATCH.current, BATCH.anchor, covariances())
    }
    assert tuple(sorted(dropped)) not in extremes


@proves(kl_cov, against=DEFINITION)
def test_kl_cov_holds_the_tokens_of_largest_covariance():
    share = 3.5 / len(BATCH.current)
    result = kl_cov(inputs_of(), KlCovOptions(share=share, coefficient=0.7))
    largest = sorted(covariances())[-3]
    assert result.penalty is not None
    assert result.penalty.tolist() == [0.7 if v >= largest else 0.0 for v in covariances()]
    assert result.keep.all()
    assert (result.weights == 1.0).all()


@proves(kl_cov, against=DEFINITION, what="in the loss")
def test_what_kl_cov_holds_is_charged_with_the_distance_from_the_anchor():
    with_penalty, without = (
        Algorithm(
            choice_of(
                AlgoSection(preset="m2po", correction={"m2po": False, **extra}, reduce="token-sum")
            ),
            max_response_tokens=8,
        )
        for extra in ({"kl-cov": {"share": 0.1, "coefficient": 0.7}}, {})
    )
    losses = []
    for chosen in (with_penalty, without):
        current = tensor(BATCH.current).requires_grad_()
        loss, _ = loss_of(chosen, current)
        losses.append((loss, torch.autograd.grad(loss, current)[0]))
    held = kl_cov(inputs_of(), KlCovOptions(share=0.1, coefficient=0.7)).penalty
    assert held is not None
    distance = tensor([abs(x) for x in BATCH.log_ratios])
    torch.testing.assert_close(losses[0][0] - losses[1][0], (held * distance).sum())
    signs = tensor([math.copysign(1.0, x) for x in BATCH.log_ratios])
    torch.testing.assert_close(losses[0][1] - losses[1][1], held * signs)


def loss_of(chosen: Algorithm, current: Tensor, **more: Any) -> tuple[Tensor, Sums]:  # noqa: ANN401 as LossInputs
    return microbatch_loss(
        chosen,
        current=current,
        proximal=current.detach(),
        behavior=tensor(BATCH.anchor),
        advantages=tensor(BATCH.advantages),
        entropy=torch.zeros_like(current),
        packing=BATCH.packing(),
        denominators=chosen.denominators(float(len(current)), float(len(LENGTHS))),
        **more,
    )


# ---- bounds outside of parts ----


def kl_distances() -> list[float]:
    return [-4.0, -3.0, -2.5, -1.0, 0.0, 1.0, 3.0]


@straddles(
    lambda: {"kl.name = low-var": [math.expm1(-d) + d > MAX_LOW_VAR for d in kl_distances()]}
)
@proves("kl.name = low-var", against=DEFINITION, what="value, gradient")
def test_low_var_stops_at_its_bound_and_so_does_its_slope():
    current = tensor(kl_distances()).requires_grad_()
    value = kl_estimate(
        "low-var",
        current=current,
        reference=torch.zeros_like(current),
        mask=torch.ones(len(current), dtype=torch.bool),
    )
    value.sum().backward()
    expected = [math.expm1(-d) + d for d in kl_distances()]
    assert value.tolist() == pytest.approx([min(k3, 10.0) for k3 in expected])
    assert current.grad is not None
    slopes = [1 - math.exp(-d) for d in kl_distances()]
    bounded = [s if k3 <= 10.0 else 0.0 for k3, s in zip(expected, slopes, strict=True)]
    assert current.grad.tolist() == pytest.approx(bounded)


VALUES = [0.0, 0.5, 1.0, 1.1, 1.5, 3.0]
RETURNS = [2.0, 0.2, 1.4, 2.0, 2.0, 1.2]
BEFORE = [1.0, 0.5, 1.2, 1.0, 1.0, 1.0]


def stated_critic(clip: float, huber: float) -> tuple[list[float], dict[str, list[bool]]]:
    def l(error: float) -> float:  # noqa: E743 as the page has it
        return error**2 / 2 if abs(error) <= huber else huber * (abs(error) - huber / 2)

    losses = []
    flags: dict[str, list[bool]] = {"critic.clip": [], "critic.huber": []}
    for v, r, before in zip(VALUES, RETURNS, BEFORE, strict=True):
        near = min(max(v, before - clip), before + clip)
        losses.append(max(l(v - r), l(near - r)))
        flags["critic.clip"].append(l(near - r) > l(v - r))
        flags["critic.huber"].append(abs(v - r) > huber)
    return losses, flags


@straddles(lambda: stated_critic(0.2, 0.7)[1])
@proves("critic.clip", "critic.huber", against=DEFINITION)
def test_the_critics_loss_is_clipped_and_linear_far_out():
    per_token, clipped = value_loss(
        tensor(VALUES), tensor(RETURNS), tensor(BEFORE), clip=0.2, huber=0.7
    )
    losses, flags = stated_critic(0.2, 0.7)
    assert per_token.tolist() == pytest.approx(losses)
    assert clipped.tolist() == flags["critic.clip"]


REWARDS = [-3.0, -0.5, 0.0, 0.4, 2.0]
TOKENS = [1, 60, 80, 81, 90, 100, 120]


def flags_of_rewards() -> Flags:
    return {
        "data.clip": [abs(2 * (r + 0.5)) > 1.0 for r in REWARDS],
        "data.overlong_buffer": [length > 80 for length in TOKENS],
    }


@straddles(flags_of_rewards)
@proves("data.clip", "data.scale", "data.bias", against=DEFINITION)
@proves("data.overlong_buffer", "data.overlong_penalty", against=DEFINITION)
def test_rewards_are_limited_and_long_answers_charged():
    found = scaled(tensor(REWARDS), scale=2.0, bias=0.5, clip=1.0)
    assert found.tolist() == [min(max(2 * (r + 0.5), -1.0), 1.0) for r in REWARDS]
    charged = overlong_penalty(torch.tensor(TOKENS), max_tokens=100, buffer_tokens=20, factor=0.5)
    expected = [-0.5 * min(max((n - 80) / 20, 0.0), 1.0) for n in TOKENS]
    assert charged.tolist() == pytest.approx(expected)


def adaptive_decays(alpha: float) -> list[float]:
    return [1 - 1 / (alpha * length) for length in LENGTHS]


@straddles(lambda: {"advantage.gae.length_alpha": [d < 0 for d in adaptive_decays(0.25)]})
@proves("gae: length_adaptive", against=DEFINITION)
def test_lambda_by_length_is_never_below_0():
    packing = BATCH.packing()
    rewards = torch.where(packing.is_last, 1.0, 0.0).double()
    options = GaeOptions(length_adaptive=True, length_alpha=0.25)
    zeros = torch.zeros(len(BATCH.current), dtype=torch.float64)
    found = gae(TokenOutcomes(rewards=rewards, values=zeros, packing=packing), options).advantages
    expected = [0.0] * len(BATCH.current)
    for sequence, decay in zip(BATCH.sequences(), adaptive_decays(0.25), strict=True):
        for t in sequence:
            expected[t] = max(decay, 0.0) ** (sequence[-1] - t)
    assert found.tolist() == pytest.approx(expected)


TEACHER = [-0.5 * x - 0.1 for x in range(sum(LENGTHS))]


def taught() -> list[float]:
    return [t - q for t, q in zip(TEACHER, BATCH.current, strict=True)]


@straddles(lambda: {"teacher.clip": [abs(x) > 2.0 for x in taught()]})
@proves("teacher.coefficient", "teacher.clip", against=DEFINITION)
def test_a_teacher_adds_how_much_likelier_it_finds_the_token():
    section = AlgoSection(preset="distill", teacher={"coefficient": 0.3, "clip": 2.0})
    chosen = Algorithm(choice_of(section), max_response_tokens=8)
    found = chosen.taught(tensor(BATCH.current), tensor(TEACHER), BATCH.packing().mask)
    assert found.tolist() == pytest.approx([0.3 * min(max(x, -2.0), 2.0) for x in taught()])


SCORES = [0.0, 1.0, 0.5, 2.0, 1.0, -1.0, 0.9, 1.0]
COPIES = [1, 2, 1, 0, 1, 1, 1, 1]


@straddles(lambda: {"likelihood.least_reward": [score >= 1.0 for score in SCORES]})
@proves("likelihood.coefficient", "likelihood.least_reward", against=DEFINITION, what="in the loss")
def test_right_answers_are_imitated_by_the_mean_over_their_tokens():
    chosen, without = (
        Algorithm(
            choice_of(AlgoSection(preset="m2po", correction="none", likelihood=likelihood)),
            max_response_tokens=8,
        )
        for likelihood in ({"coefficient": 0.1}, {})
    )
    is_right = [score >= chosen.choice.likelihood.least_reward for score in SCORES]
    counts = [c if right else 0 for c, right in zip(COPIES, is_right, strict=True)]
    total = sum(c * length for c, length in zip(counts, LENGTHS, strict=True))
    losses = []
    for one in (chosen, without):
        current = tensor(BATCH.current)
        right = RightAnswers(is_right=torch.tensor(is_right), num_tokens=float(total))
        more = {"right": right} if one is chosen else {}
        losses.append(loss_of(one, current, copies=torch.tensor(COPIES), **more)[0])
    nll = -sum(
        count * BATCH.current[t]
        for count, sequence in zip(counts, BATCH.sequences(), strict=True)
        for t in sequence
    )
    assert float(losses[0] - losses[1]) == pytest.approx(0.1 * nll / total)


def test_a_certain_token_whose_logprob_was_rounded_above_zero_is_measured_as_certain():
    for measure in ["tv", "binary-kl"]:
        rounded = torch.tensor([5e-4, -1.0], dtype=torch.float64)
        certain = rounded.clamp(max=0.0)
        for proximal, behavior in [(rounded, certain), (certain, rounded), (rounded, rounded)]:
            inputs = correction_inputs(proximal, behavior, torch.ones(2, dtype=torch.float64))
            options = RejectionOptions(level="token", measure=measure, low=None, high=1e-9)
            assert rejection(inputs, options).keep.tolist() == [True, True]


def test_a_distance_that_is_the_width_does_not_pull_back_yet():
    """From a certain token to one half, of which both are exact numbers."""
    half = torch.tensor([math.log(0.5)], dtype=torch.float64)
    assert half.exp().item() == 0.5
    inputs = surrogate_inputs(half, torch.zeros(1, dtype=torch.float64), tensor([-1.0]))
    for width, is_beyond in ((0.5, False), (0.49, True)):
        assert drpo(inputs, DrpoOptions(width=width)).clipped_down.tolist() == [is_beyond]
        assert drpo(inputs, DrpoOptions(width=width)).clipped_up.tolist() == [False]


def test_a_ratio_on_its_bound_is_not_clipped():
    """Bounds of 0 lie at a ratio of 1, which every floating point number has exactly."""
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64)
    inputs = surrogate_inputs(logprobs, logprobs, tensor([1.0, -1.0]), packed(1, 1))
    for terms in (
        cispo(inputs, CispoOptions(clip_low=0.0, clip_high=0.0)),
        ppo_clip(inputs, PpoOptions(clip_low=0.0, clip_high=0.0)),
        gspo(inputs, GspoOptions(clip_low=0.0, clip_high=0.0)),
    ):
        assert terms.clipped_up.tolist() == [False, False]
        assert terms.clipped_down.tolist() == [False, False]
