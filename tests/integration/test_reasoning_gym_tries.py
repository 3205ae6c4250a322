"""Problems of reasoning-gym, answered more than once."""

from typing import Any

import pytest

from slipstream.generators.environments.host import EnvironmentFailedError
from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.trajectory import Prompt
from tests.support.gym_prompts import prompts
from tests.support.playing import heard, hosted, play, played

pytestmark = pytest.mark.integration
NAME = "slipstream.generators.environments.adapters.reasoning_gym:Tries"


async def test_an_answer_is_tried_again_until_it_is_right():
    first, second = prompts("chain_sum")[:2]
    right = f"so it is <answer>{first.ground_truth}</answer>"
    async with hosted(NAME, {"tries": 3, "discount": 0.5}) as host:
        found = await play(host, first, "<answer>no</answer>", right)
        assert heard(found)[0] == first.text.removeprefix("user: ")
        assert heard(found)[1] == "That is not right. Try again: 2 more."
        assert found.rewards == [0.0, 0.5]
        assert found.parts == {"tries": 2.0, "score": 1.0}
        at_once = await play(host, second, str(second.ground_truth))
        assert (at_once.reward, at_once.parts["tries"]) == (1.0, 1.0)


async def test_after_the_last_try_the_score_is_that_of_its_answer():
    (asked, *_) = prompts("chain_sum")
    options = {"tries": 2, "feedback": "{score:.2f}, {left} left"}
    found = await played(NAME, asked, "<answer>x</answer>", "<answer>y</answer>", options=options)
    assert heard(found)[1].endswith(", 1 left")
    assert found.ended_by == "environment"
    assert found.parts["tries"] == 2.0
    assert found.reward == found.parts["score"] < 1.0


async def test_a_prompt_of_another_source_fails_with_the_reason():
    with pytest.raises(EnvironmentFailedError, match=r"data\.sources\.NAME\.reasoning_gym"):
        await played(NAME, Prompt(prompt="1 + 1"), "2", options={})


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"tries": 0}, "tries: expected 1 or more"),
        ({"discount": 1.5}, "discount: expected more than 0"),
        ({"feedback": "{answer}"}, "KeyError: 'answer'"),
    ],
)
async def test_wrong_options_are_refused_at_the_start(options: dict[str, Any], why: str):
    with pytest.raises(ConfigError, match=why):
        async with hosted(NAME, options):
            pass
