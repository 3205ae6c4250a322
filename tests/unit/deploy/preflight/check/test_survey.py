import pytest

from slipstream.deploy.preflight.check.model import judge_models
from slipstream.deploy.preflight.check.survey import uses_collectives
from slipstream.weightbus.config import WeightBusSection


@pytest.mark.parametrize(
    ("kind", "bus", "is_so"),
    [
        ("generator", {}, False),
        ("generator", {"transport": "collective"}, False),  # weightbus.host is loopback
        ("generator", {"transport": "collective", "host": "10.0.0.1"}, True),
        ("generator", {"transport": "disk"}, False),
        ("learner", {"transport": "tcp"}, True),
    ],
)
def test_tensors_go_to_another_host_in_a_collective_or_not(
    kind: str, bus: dict[str, str], *, is_so: bool
):
    assert uses_collectives(frozenset({kind}), WeightBusSection(**bus)) is is_so


def test_another_model_on_a_host_is_named_by_its_part():
    ours = {"config.json": "a" * 12, "weights": "b" * 12, "tokenizer": "c" * 32}
    assert judge_models(ours, dict(ours)).outcome == "ok"
    other = judge_models(ours, ours | {"weights": "d" * 12})
    assert other.line == (
        "fail same model: weights is dddddddddddd here, bbbbbbbbbbbb on the learner's (run.model)"
    )
    assert "tokenizer is missing here" in judge_models(ours, {"config.json": "a" * 12}).found
