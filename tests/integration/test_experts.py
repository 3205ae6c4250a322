"""Experts in groups beside Megatron's, which are computed one after another."""

from typing import Any

import pytest

from tests.support.ranks.experts import MIXTURES, SIZES, WITH_BIASES
from tests.support.ranks.run import outputs, reports, start_ranks

pytestmark = pytest.mark.integration
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "ep2": (2, {"expert_parallel": 2}),
    "tp2-etp2": (2, {"tensor_parallel": 2, "expert_tensor_parallel": 2}),
}
# Forward and backward, by the ranks and by those that share the experts: whole ones, or parts.
OPERATORS = {(1, 1): (22, 31), (2, 2): (47, 37), (2, 1): (55, 38)}


@pytest.fixture(scope="module", params=LAYOUTS)
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    count, learner = LAYOUTS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    program = "support.ranks.experts"
    outputs(start_ranks(program, folder / "models", folder / "work", count, **learner))
    return reports(folder / "work", count)


def test_every_family_computes_what_single_experts_do(ranks: list[dict[str, Any]]):
    for report in ranks:
        shares = report["shared by"] < len(ranks)  # ranks share each expert
        for family in set(MIXTURES) - (WITH_BIASES if shares else set()):
            assert report[f"{family} torch.float32"] < 1e-6
            assert report[f"{family} torch.bfloat16"] < 1e-2


def test_operators_and_waits_do_not_depend_on_the_number_of_experts(ranks: list[dict[str, Any]]):
    few, many = map(str, SIZES)
    for report in ranks:
        forward, backward, waits = report["passes"][few]["grouped"]
        assert report["passes"][many]["grouped"] == [forward, backward, waits]
        assert waits == (0 if len(ranks) == 1 else 1), "numbers of rows for other ranks"
        assert (forward, backward) == OPERATORS[len(ranks), report["shared by"]]
        single = [report["passes"][size]["single"] for size in (few, many)]
        of_rank = (SIZES[1] - SIZES[0]) // report["shared by"]
        assert single[1][0] - single[0][0] == 5 * of_rank, "one by one they are computed by five"
        assert single[0][2] > 2


def test_single_experts_can_be_named_while_weights_are_away(ranks: list[dict[str, Any]]):
    assert all(report["away"] for report in ranks)


def test_a_checkpoint_of_single_experts_is_read_in_groups_and_the_reverse(
    ranks: list[dict[str, Any]],
):
    assert [report["unlike"] for report in ranks] == [[]] * len(ranks)
