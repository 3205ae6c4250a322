"""Losses, log-probabilities and two steps of tenants are those of transformers, PEFT and torch."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks.run import outputs, start
from tests.support.served_tenants import serving

pytest.importorskip("tinker")
pytestmark = pytest.mark.integration
OF_FIGURES = 2e-5  # of float32 log-probabilities to -5, and relative ones of losses
OF_ADAPTERS = 2e-6  # after two steps that move them by 1e-3
LENGTHS = (9, 5, 12, 7)  # two microbatches, or more where ranks divide them
OPTIONS: dict[str, dict[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.7, "clip_high_threshold": 1.3},
    "cispo": {},
    "dro": {"beta": 0.1},
}
LAYOUTS = [
    pytest.param({}, id="one", marks=pytest.mark.slow),
    pytest.param({"ranks": 4, "tensor_parallel": 2, "pipeline_parallel": 2}, id="tp2-pp2"),
    pytest.param({"ranks": 2}, id="dp2", marks=pytest.mark.slow),
    pytest.param({"ranks": 2, "context_parallel": 2}, id="cp2", marks=pytest.mark.slow),
    pytest.param({"ranks": 2, "tensor_parallel": 2}, id="tp2", marks=pytest.mark.slow),
    pytest.param({"recompute": "full"}, id="recompute", marks=pytest.mark.slow),
]


def data_of(loss: str) -> list[Any]:
    """Return sequences with targets that do not follow from their tokens."""
    found = []
    for number, length in enumerate(LENGTHS):
        tokens = [3 + (number * 5 + place * 7) % 17 for place in range(length)]
        targets = [3 + (number * 3 + place * 11) % 17 for place in range(length)]
        inputs: dict[str, list[float]] = {"target_tokens": targets}
        if loss == "cross_entropy":
            inputs["weights"] = [((number + place) % 4) / 4 for place in range(length)]
        else:
            inputs["logprobs"] = [-2.5 - ((number + place) % 5) / 4 for place in range(length)]
            inputs["advantages"] = [((number * place) % 3 - 1) / 2 for place in range(length)]
        found.append([tokens, inputs])
    return found


@pytest.mark.parametrize("learner", LAYOUTS)
def test_two_steps_of_every_loss(learner: dict[str, Any]):
    settings = {"dtype": "float32", "max_tokens_per_microbatch": 16, **learner}
    with tempfile.TemporaryDirectory(prefix="sp-", dir="/tmp") as name:
        folder = Path(name)
        losses = [[loss, options, data_of(loss)] for loss, options in OPTIONS.items()]
        with serving(folder, "server", "learner", learner=settings) as served:
            found = served.play("trained_losses", key=served.key("alice"), losses=losses)
            versions = folder / "s" / "serve" / "versions"
            cases = [
                {
                    "name": loss,
                    "options": options,
                    "data": data,
                    "figures": found[loss]["figures"],
                    "versions": [
                        str(versions / served.version_of(one)) for one in found[loss]["versions"]
                    ],
                }
                for loss, options, data in losses
            ]
        (folder / "cases.json").write_text(json.dumps(cases))
        program = start(folder, "support.peft_training", served.model, folder / "cases.json")
        (printed,) = outputs([program])
    for loss, apart in json.loads(printed).items():
        assert apart["figures"] < OF_FIGURES, (loss, apart)
        assert apart["adapters"] < OF_ADAPTERS, (loss, apart)
        assert apart["moved"] > 1e-4, loss
