"""The engine that needs no model answers like one."""

import asyncio

from slipstream.generators.engine import Completion, SamplingParams
from tests.support.scripted_engine import ScriptedEngine

END = 2


def answers(most: int) -> list[Completion]:
    async def sampled() -> list[Completion]:
        engine = ScriptedEngine(vocabulary=9, end_token_id=END, mean_tokens=8.0)
        params = SamplingParams(max_new_tokens=most, temperature=1.0, top_p=1.0)
        return await engine.sample([1, 3], params, count=60, seeds=range(60))

    return asyncio.run(sampled())


def test_an_answer_ends_with_the_end_token_or_at_its_limit():
    found = answers(most=12)
    assert {one.finish_reason for one in found} == {"stop", "length"}
    for one in found:
        assert one.token_ids.count(END) == (one.finish_reason == "stop")
        assert len(one.token_ids) == len(one.logprobs) <= 12
        if one.finish_reason == "stop":
            assert one.token_ids[-1] == END
        else:
            assert len(one.token_ids) == 12


def test_answers_are_those_of_their_seeds():
    assert [one.token_ids for one in answers(12)] == [one.token_ids for one in answers(12)]
    assert len({tuple(one.token_ids) for one in answers(12)}) > 40
