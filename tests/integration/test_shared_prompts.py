"""A prompt that siblings share is computed once, and nothing else differs."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.families import write_family
from tests.support.ranks.run import outputs, reports, start_ranks
from tests.support.ranks.shared_prompts import LENGTHS, NUM_SAVED
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.integration
PROGRAM = "support.ranks.shared_prompts"
NUM_TOKENS = sum(prompt + response for _, prompt, response in LENGTHS) + 5  # a second branch


@pytest.mark.parametrize(
    ("family", "ranks", "layout"),
    [
        ("qwen3_5", 1, {}),  # it has attention, too
        ("qwen3", 2, {"tensor_parallel": 2}),
        ("qwen3", 2, {"pipeline_parallel": 2, "recompute": "full"}),
        ("qwen3_moe", 2, {"tensor_parallel": 2}),
        ("deepseek_v3", 1, {}),
        ("gpt_oss", 2, {"tensor_parallel": 2}),
    ],
    ids=["hybrid", "tp2", "pp2-recompute", "experts", "latent", "windows"],
)
def test_a_step_is_the_same_with_prompts_computed_once(
    tmp_path: Path, family: str, ranks: int, layout: dict[str, Any]
):
    write = write_tiny_model if family in {"qwen3", "qwen3_moe"} else write_family
    model = write(tmp_path / "model", family)
    outputs(start_ranks(PROGRAM, model, tmp_path / "work", ranks, **layout))
    for report in reports(tmp_path / "work", ranks):
        again, once = report["False"], report["True"]
        divided = layout.get("tensor_parallel", 1)  # ranks that share the rows and their padding
        assert once["rows"] == -(-(NUM_TOKENS - NUM_SAVED) // divided)
        assert again["rows"] == -(-NUM_TOKENS // divided)
        for what in ("logprobs", "entropy", "reference", "trained", "values"):
            assert len(once[what]) == NUM_TOKENS
            tolerance = 2e-4 if what == "trained" else 2e-5  # two updates amplify rounding
            assert once[what] == pytest.approx(again[what], abs=tolerance), what
        assert len(set(once["trained"])) > 10
        assert once["trained"] != pytest.approx(once["logprobs"], abs=1e-3), "nothing was trained"
        for mine, right in zip(once["figures"], again["figures"], strict=True):
            assert mine == pytest.approx(right, rel=2e-4, abs=2e-6)
            assert right["policy/grad_norm"] > 1e-3
        assert report["ways"] < 1e-5
