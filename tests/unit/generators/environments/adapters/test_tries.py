import asyncio

import pytest

from slipstream.generators.environments.adapters.reasoning_gym import Tries
from slipstream.generators.environments.sdk import Reply, Step
from slipstream.wire.messages.trajectory import Prompt
from tests.support.gym_prompts import prompts


def steps(environment: Tries, *answers: str) -> list[Step]:
    async def test() -> list[Step]:
        await environment.reset(prompts("chain_sum")[0])
        return [await environment.step(Reply(f"<answer>{one}</answer>")) for one in answers]

    return asyncio.run(test())


def test_a_right_answer_ends_it_and_counts_less_for_each_before():
    right = str(prompts("chain_sum")[0].ground_truth)
    first, second = steps(Tries(tries=3, discount=0.5), "no", right)
    assert (first.done, first.reward) == (False, 0.0)
    assert first.messages == "That is not right. Try again: 2 more."
    assert (second.done, second.reward, second.messages) == (True, 0.5, ())
    assert second.parts == {"tries": 2.0, "score": 1.0}


def test_the_last_try_ends_it_with_the_score_that_it_has():
    first, second = steps(Tries(tries=2, feedback="{score:g} {left}"), "no", "no")
    assert first.messages == "0 1"
    assert (second.done, second.reward) == (True, 0.0)


def test_enough_may_be_less_than_all():
    (only,) = steps(Tries(enough=0.0), "no")
    assert (only.done, only.reward) == (True, 0.0)


def test_options_and_prompts_that_do_not_fit_are_refused():
    for options in ({"tries": 0}, {"discount": 0.0}, {"discount": 1.1}):
        with pytest.raises(ValueError, match="expected"):
            Tries(**options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="holds no reasoning_gym and entry"):
        asyncio.run(Tries().reset(Prompt(prompt="x")))
