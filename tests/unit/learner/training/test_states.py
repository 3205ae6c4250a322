"""The output layer meets the states that chose a token, and no others."""

import numpy as np
import pytest
import torch

from slipstream.algos.logprobs.sampling import OutputLayer
from slipstream.learner.batches.packing import KeptTokens, TrainTrajectory, empty_microbatch, pack
from slipstream.learner.model.context import TokenSplit
from slipstream.learner.training.states import Share, token_logprobs, token_squares

CPU = torch.device("cpu")
VOCAB, HIDDEN = 7, 4
END = (2, 5)


def trajectory(mask: str, seed: int, *, truncates: bool) -> TrainTrajectory:
    """Return a trajectory with a mask such as "..xx.x"; its sampler kept the chosen token and 3."""
    chosen = np.array([letter == "x" for letter in mask])
    ids = np.random.default_rng(seed).integers(0, VOCAB, len(mask), dtype=np.int32)
    ids[ids == 3] = 4
    counts = np.where(chosen, 2, 0)
    kept = KeptTokens(counts, np.stack([ids[chosen], np.full(chosen.sum(), 3)], 1).ravel())
    return TrainTrajectory(
        token_ids=ids,
        loss_mask=chosen,
        behavior_logprobs=np.zeros(len(mask), np.float32),
        temperature=1.0 + seed / 4,
        end_barred=chosen & (np.arange(len(mask)) % 2 == 0),
        end_token_ids=END,
        kept=kept if truncates else None,
    )


@pytest.mark.parametrize("truncates", [False, True])
def test_figures_are_those_of_the_formula_whatever_states_the_context_has(truncates: bool):
    trajectories = [
        trajectory(mask, seed, truncates=truncates and seed != 1)
        for seed, mask in enumerate(["..xx.x", ".x", "...xxxx.x"])
    ]
    batch = pack(trajectories, CPU)
    count = len(batch.token_ids)
    draw = torch.Generator().manual_seed(0)
    states = torch.randn(count, HIDDEN, generator=draw)
    weight = torch.randn(VOCAB, HIDDEN, generator=draw, requires_grad=True)
    chosen = batch.loss_mask.nonzero().squeeze(-1)
    hidden = torch.full_like(states, torch.nan)
    hidden[chosen - 1] = states[chosen - 1]
    hidden.requires_grad_()
    layer = OutputLayer(weight=weight, barred_ids=END)
    share = Share(batch, TokenSplit(count, count), hidden)

    found = token_logprobs(share, layer)
    squares = token_squares(share, layer)

    logits = states @ weight.detach().T
    expected = torch.zeros(3, count)
    starts = batch.cu_trajectories.tolist()
    for number, packed in enumerate(trajectories):
        places = np.flatnonzero(packed.loss_mask)
        for at in places.tolist():
            row = logits[starts[number] + at - 1].clone()
            if packed.end_barred is not None and packed.end_barred[at]:
                row[list(END)] = -torch.inf
            if packed.kept is not None:
                left_out = set(range(VOCAB)) - {3, int(packed.token_ids[at])}
                row[list(left_out)] = -torch.inf
            p = (row / packed.temperature).softmax(-1)
            entropy = -(p * p.log()).nan_to_num().sum()
            values = torch.stack([p[int(packed.token_ids[at])].log(), entropy, (p * p).sum()])
            expected[:, starts[number] + at] = values
    is_possible = expected[0].isfinite()  # an end that was barred there is not
    logprobs = torch.where(is_possible, found.logprobs, expected[0])
    torch.testing.assert_close(logprobs, expected[0])
    torch.testing.assert_close(found.entropy, expected[1])
    torch.testing.assert_close(squares, expected[2])

    found.logprobs[is_possible].sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert weight.grad.isfinite().all()
    moved = hidden.grad.ne(0).any(-1).nonzero().squeeze(-1)
    assert set(moved.tolist()) <= set((chosen - 1).tolist())
    assert len(moved)


def test_a_microbatch_without_tokens_has_no_figures():
    share = Share(empty_microbatch(CPU), TokenSplit(0, 0), torch.zeros(0, HIDDEN))
    found = token_logprobs(share, OutputLayer(weight=torch.zeros(VOCAB, HIDDEN)))
    assert found.logprobs.shape == found.entropy.shape == (0,)


def test_a_rank_without_a_chosen_token_gives_every_weight_a_gradient_of_zero():
    """Context parallelism can leave it a prompt alone, and others wait for its gradients."""
    batch = pack([trajectory("...", 0, truncates=False)], CPU)
    hidden = torch.ones(3, HIDDEN, requires_grad=True)
    weight = torch.full((VOCAB, HIDDEN), 0.5, requires_grad=True)
    found = token_logprobs(Share(batch, TokenSplit(3, 3), hidden), OutputLayer(weight=weight))
    assert found.logprobs.tolist() == found.entropy.tolist() == [0.0] * 3
    (found.logprobs + found.entropy).sum().backward()
    for leaf in (hidden, weight):
        assert leaf.grad is not None
        assert not leaf.grad.any()
