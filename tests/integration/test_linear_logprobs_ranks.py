"""Log-probabilities of an output layer whose rows are split over two ranks."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.ranks.linear_logprobs import results
from tests.support.ranks.run import outputs, start

pytestmark = pytest.mark.integration

T, H, V = 13, 6, 40  # rows 0 to 19 on the first rank, 20 to 39 on the second
BARRED = (3, 21, 29)


def a_case(*, vocab_size: int, num_tokens: int) -> dict[str, object]:
    generator = torch.Generator().manual_seed(11)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    target = torch.randint(4, min(vocab_size, V), (num_tokens,), generator=generator)
    # Every third token was sampled from five, its own among them, of both ranks or of one.
    rows = torch.arange(num_tokens).view(-1, 1)[::3].expand(-1, 5)
    ids = (target[::3].view(-1, 1) + torch.tensor([0, 1, 2, 11, 19])) % min(vocab_size, V)
    return {
        "hidden": normal(num_tokens, H),
        "weight": normal(V, H),
        "reference_hidden": normal(num_tokens, H),
        "reference_weight": normal(V, H),
        "target": target,
        "kept": (torch.arange(num_tokens) % 3 == 0, rows.flatten(), ids.flatten()),
        "temperature": 0.5 + torch.rand(num_tokens, generator=generator, dtype=torch.float64),
        "barred": torch.rand(num_tokens, generator=generator) < 0.5,
        "mix": normal(3, num_tokens),
        "vocab_size": vocab_size,
        "barred_ids": list(BARRED),
        "chunk_columns": 4,
    }


@pytest.mark.parametrize(
    ("vocab_size", "num_tokens"),
    [
        pytest.param(36, T, id="some-padding"),
        pytest.param(20, T, id="the-second-rank-is-all-padding"),
        pytest.param(V, 0, id="no-tokens"),
    ],
)
def test_two_ranks_compute_what_one_does_and_their_gradients_add_up(
    tmp_path: Path, vocab_size: int, num_tokens: int
):
    case = a_case(vocab_size=vocab_size, num_tokens=num_tokens)
    torch.save(case, tmp_path / "case.pt")
    outputs(
        [start(tmp_path, "support.ranks.linear_logprobs", tmp_path, rank, 2) for rank in range(2)]
    )
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    hidden, weight = (case[name].clone().requires_grad_() for name in ("hidden", "weight"))
    alone = results(case, hidden, weight, case["reference_weight"], chunk_columns=7)
    if num_tokens:
        assert min(part.abs().max() for part in alone["computed"]) > 0.1, "nothing was compared"
    assert torch.equal(first["computed"], second["computed"]), "ranks differ"
    both = first | {"by_weight": torch.cat([first["by_weight"], second["by_weight"]])}
    for name, expected in alone.items():
        assert both[name].shape == expected.shape
        assert torch.allclose(both[name], expected, rtol=0, atol=1e-12), name
