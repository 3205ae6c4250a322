"""Pure: the mean staleness of an asynchronous run in closed form, beside which simulations stand.

Applied Compute ("Staleness in fully async RL", 2026), where engines are the slower side (rho < 1):

    C M / B + rho

C samples under way, B a batch's, M = E[longest of a group] / E[length], rho the engines' rate over
the learner's. A group's first token is C M / B batches old when its last answer ends; until its
batch is complete another version is made in the share rho of cases. Ours counts each token from
when it was generated, so that those of a sample are E[L^2] / (2 E[L]^2) lengths younger than its
first in the mean:

    C (M - (1 + spread^2) / 2) / B + rho

Where the learner is the slower side, theirs has a queue that drops or fills; ours grants no more
work than the bound allows, and what is under way follows from it (Little's law).
"""


def oldest_staleness(concurrency: float, batch: float, rho: float, tail: float) -> float:
    """Return the mean staleness of groups' first tokens, in learner steps.

    Args:
        concurrency: samples under way.
        batch: samples of a learner step.
        rho: rate of the engines over the learner's, at most 1.
        tail: mean of a group's longest answer over the mean answer.
    """
    if not 0 <= rho <= 1:
        raise ValueError(f"rho is {rho:g}, expected within [0, 1]: the engines are the slower side")
    return concurrency * tail / batch + rho


def token_staleness(
    concurrency: float, batch: float, rho: float, tail: float, spread: float
) -> float:
    """Return the mean staleness of tokens, in learner steps.

    Args:
        concurrency: samples under way.
        batch: samples of a learner step.
        rho: rate of the engines over the learner's, at most 1.
        tail: mean of a group's longest answer over the mean answer.
        spread: standard deviation of answers' lengths over their mean.
    """
    younger = concurrency * (1 + spread**2) / 2 / batch
    return oldest_staleness(concurrency, batch, rho, tail) - younger
