"""Recurrences from the last entry to the first, over all entries at once."""

from torch import Tensor
from torch.nn.functional import pad


def scan_backward(values: Tensor, factors: Tensor) -> Tensor:
    """Return y_t = values_t + factors_t * y_(t+1), with y = 0 after the end. Shapes [T].

    In log2(T) steps over all entries: before each, y_t = values_t + factors_t * y_(t+reach) holds,
    and putting that of t + reach into it doubles the reach.
    """
    reach = 1
    while reach < len(values):
        values = values + factors * pad(values[reach:], (0, reach))
        factors = factors * pad(factors[reach:], (0, reach))
        reach *= 2
    return values
