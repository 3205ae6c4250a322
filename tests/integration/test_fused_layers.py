"""A model's layers with fused operators beside Megatron's own, and what they keep."""

from typing import Any

import pytest

from tests.support.family_models import SHAPE
from tests.support.ranks.run import outputs, reports, start

pytestmark = pytest.mark.integration
INNER, OF_EXPERT = SHAPE["intermediate_size"], 32


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
    assert report["kept"]["expert"] == [1, OF_EXPERT, 2 * OF_EXPERT]
    assert sum(report["kept"]["Megatron's"]) > 3 * INNER


def test_an_activation_that_the_operator_does_not_compute_is_left_to_megatron(
    report: dict[str, Any],
):
    assert report["clamped is fused"] is False


def test_a_narrow_norm_is_one_operator_of_torch_each_way_where_a_device_has_one(
    report: dict[str, Any],
):
    computing = [name for name in report["norm"] if name not in ("aten::detach", "aten::ones_like")]
    assert computing == ["aten::_fused_rms_norm", "aten::_fused_rms_norm_backward"]
