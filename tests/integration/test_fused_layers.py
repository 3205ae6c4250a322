"""A model's layers with fused operators beside Megatron's own, and what they keep."""

from typing import Any

import pytest

from tests.support.family_models import SHAPE
from tests.support.ranks.run import outputs, reports, start

pytestmark = pytest.mark.integration
HIDDEN, INNER, OF_EXPERT = SHAPE["hidden_size"], SHAPE["intermediate_size"], 32


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    work = tmp_path_factory.mktemp("fused")
    outputs([start(work, "support.ranks.fused", work)])
    (report,) = reports(work, 1)
    return report


@pytest.mark.parametrize("family", ["qwen3", "qwen2_moe", "deepseek_v2"])
@pytest.mark.parametrize("activations", ["kept", "recomputed"])
def test_outputs_and_gradients_are_those_of_megatrons_operators(
    report: dict[str, Any], family: str, activations: str
):
    assert report[f"{family} {activations}"] < 1e-5


def test_an_mlp_keeps_gate_and_up_and_their_product_alone(report: dict[str, Any]):
    assert report["kept"]["mlp"] == [INNER, 2 * INNER]
    *numbers, product, of_first, of_second = report["kept"]["experts"]
    assert product == 2 * OF_EXPERT, "of two experts of a token"
    assert {of_first, of_second} == {2 * HIDDEN, 4 * OF_EXPERT}, "a row of each, and gate and up"
    assert sum(numbers) <= 10, "weights and places"
    assert sum(report["kept"]["Megatron's"]) > 3 * INNER


def test_an_activation_that_the_operator_does_not_compute_is_left_to_megatron(
    report: dict[str, Any],
):
    assert report["clamped is fused"] is False


def test_a_setting_of_megatrons_experts_is_refused_for_a_mixture(report: dict[str, Any]):
    assert report["refused"] == (
        "learner.megatron.moe_permute_fusion = True acts on Megatron's experts, and those of "
        "run.model (qwen2_moe) are computed in groups: remove it"
    )


def test_a_narrow_norm_is_one_operator_of_torch_each_way_where_a_device_has_one(
    report: dict[str, Any],
):
    computing = [name for name in report["norm"] if name not in ("aten::detach", "aten::ones_like")]
    assert computing == ["aten::_fused_rms_norm", "aten::_fused_rms_norm_backward"]
