"""A kernel over rows, in blocks with a masked rest; prints its largest difference from torch."""

import sys

import torch
import triton
import triton.language as tl

_ROWS, _COLUMNS, _BLOCK = 3, 300, 128


@triton.jit
def log_sum_exp(rows, sums, columns, BLOCK: tl.constexpr):  # noqa: ANN001, N803 of Triton
    """Write the log of the sum of the exponentials of a row, its running maximum taken out."""
    row = tl.program_id(0)
    largest = -float("inf")
    total = 0.0
    for start in range(0, columns, BLOCK):
        places = start + tl.arange(0, BLOCK)
        x = tl.load(rows + row * columns + places, mask=places < columns, other=-float("inf"))
        larger = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(x - larger), 0)
        largest = larger
    tl.store(sums + row, largest + tl.log(total))


def main() -> None:
    rows = torch.randn(_ROWS, _COLUMNS, generator=torch.Generator().manual_seed(1)) * 4
    sums = torch.empty(_ROWS)
    log_sum_exp[(_ROWS,)](rows, sums, _COLUMNS, BLOCK=_BLOCK)
    expected = rows.double().logsumexp(1)
    sys.stdout.write(f"{(sums.double() - expected).abs().max().item()}\n")


if __name__ == "__main__":
    main()
