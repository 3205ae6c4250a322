"""Log-probabilities and entropy from logits against what verl and slime compute."""

import itertools
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from docs.generate.evidence import proves
from slipstream.algos.logprobs.linear_logprobs import TokenLogprobs, linear_logprobs
from slipstream.algos.logprobs.sampling import OutputLayer
from slipstream.algos.reduce import Rule, reduced
from tests.support.golden import MASKS, RULES, SLIME, VERL, Layout, denominators_of, golden, layout


def computed(logits: Tensor, tokens: Tensor) -> TokenLogprobs:
    """The logprobs of a layer that returns its input. Shapes [N, L, V], [N, L] -> [N * L]."""
    weight = torch.eye(logits.shape[-1], dtype=logits.dtype)
    return linear_logprobs(logits.flatten(0, 1), OutputLayer(weight=weight), tokens.flatten())


@cache
def of_verls_logits() -> tuple[Tensor, TokenLogprobs]:
    """Return verl's logits, and what is computed of them; a backward pass can be repeated.

    Triton's interpreter takes a second for it.
    """
    file = golden(VERL, "entropy")
    logits = file.input("logits").requires_grad_()
    return logits, computed(logits, file.input("tokens"))


def reduced_entropy(at: Layout, rule: Rule) -> Tensor:
    entropy = of_verls_logits()[1].entropy.view(golden(VERL, "entropy").input("tokens").shape)
    return reduced(at.pack(entropy), at.packing, denominators_of(at.packing), rule)


@proves("log-probabilities", "entropy", against=VERL)
def test_logprobs_and_entropy_of_tokens_are_those_of_verl():
    file, (_, ours) = golden(VERL, "entropy"), of_verls_logits()
    assert_close(ours.logprobs, file.out("logp_from_logits").flatten(), rtol=1e-9, atol=1e-12)
    assert_close(ours.entropy, file.out("token_entropy").flatten(), rtol=1e-9, atol=1e-12)


@proves("log-probabilities", "entropy", against=SLIME)
def test_logprobs_and_entropy_of_tokens_are_those_of_slime():
    """slime computes in float32: 1e-6 nats."""
    file = golden(SLIME, "logprob_entropy")
    ours = computed(file.input("logits"), file.input("tokens"))
    assert_close(ours.logprobs, file.out("logp").flatten(), rtol=1e-5, atol=2e-6)
    assert_close(ours.entropy, file.out("entropy").flatten(), rtol=1e-5, atol=2e-6)


@proves("entropy", against=VERL, what="reduced value")
@pytest.mark.parametrize(("mask", "name"), [*itertools.product(MASKS, RULES)])
def test_the_reduced_entropy_is_that_of_verl(mask: str, name: str):
    file, at = golden(VERL, "entropy"), layout(mask)
    ours = reduced_entropy(at, RULES[name])
    assert_close(ours, file.out(f"entropy__{mask}__{name}"), rtol=1e-9, atol=1e-12)


@proves("entropy", against=VERL, what="gradient by logits")
@pytest.mark.parametrize("mask", MASKS)
def test_the_gradient_of_the_mean_entropy_is_that_of_verl(mask: str):
    file, at = golden(VERL, "entropy"), layout(mask)
    entropy = reduced_entropy(at, "token-mean")
    (gradient,) = torch.autograd.grad(entropy, of_verls_logits()[0], retain_graph=True)
    assert_close(gradient, file.out(f"grad_logits__{mask}__token-mean"), rtol=1e-7, atol=1e-12)
