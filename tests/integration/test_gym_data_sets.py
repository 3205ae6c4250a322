"""Every data set of reasoning-gym, by its own verifier."""

import importlib

import pytest

from tests.support.gym_prompts import prompts, scored

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::SyntaxWarning"
)
def test_every_data_set_gives_its_own_answers_1():
    """tests/unit/broker/data/test_gym.py has four of them in every run."""
    prompts("basic_arithmetic")  # imports the library without what it needs for pictures
    unlike = {"composite", "zebra_puzzles"}  # made of others; needs a solver that is not installed
    names = sorted(set(importlib.import_module("reasoning_gym.factory").DATASETS) - unlike)
    assert len(names) > 100
    for name in names:
        for prompt in prompts(name, size=2):
            answer = prompt.extra_info["entry"]["answer"]  # type: ignore[index,call-overload]
            if isinstance(answer, str):
                assert scored(prompt, f"<answer>{answer}</answer>")["score"] > 0.999, name
