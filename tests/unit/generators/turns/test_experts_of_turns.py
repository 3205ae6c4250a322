"""Experts of long trajectories are recorded once, whatever the number of turns."""

import asyncio

import numpy as np

from slipstream.generators.engine import Completion, ExpertLayers, SamplingParams
from slipstream.generators.text.chat_template import ChatTemplate
from slipstream.generators.turns.calls import TrajectoryCalls
from slipstream.generators.turns.conversation import Conversation
from slipstream.generators.turns.rendering import MessageRendering
from slipstream.generators.turns.replies import ParsedReply
from slipstream.generators.turns.requests import TextRequest
from slipstream.wire.messages.trajectory import Json
from slipstream.wire.messages.versions import PolicyVersion

TURNS, NEW, REPLY = 40, 1_000, 250
VERSION, LAYERS = PolicyVersion(1, 0), ExpertLayers(4, 0)


class Engine:
    """Answers with the experts that it is asked for, which tell their token and their call."""

    def __init__(self) -> None:
        self.num_rows: list[int] = []

    async def sample(self, prompt_ids: list[int], params: SamplingParams) -> Completion:
        tokens = np.arange(params.experts_from, len(prompt_ids) + REPLY - 1)
        experts = np.empty((len(tokens), LAYERS.total, 2), np.int32)
        experts[..., 0], experts[..., 1] = tokens[:, None], len(self.num_rows)
        self.num_rows.append(len(tokens))
        return Completion(
            token_ids=[7] * REPLY,
            logprobs=[-1.0] * REPLY,
            version_starts=[(0, VERSION)],
            finish_reason="stop",
            experts=experts,
        )


async def parse(text: str, _tools: object) -> ParsedReply:
    return ParsedReply("", text, list[dict[str, Json]]())


def calls_of(engine: Engine) -> TrajectoryCalls:
    template = ChatTemplate("{{ messages }}", {}, origin="test")
    return TrajectoryCalls(
        sample=engine.sample,
        params=SamplingParams(temperature=1.0, max_new_tokens=REPLY, experts_of=LAYERS),
        rendering=MessageRendering(template, lambda _text: [1], lambda _token: "", set()),
        conversation=Conversation(max_turns=99, max_tokens=200_000),
        encode=lambda _text: [1],
        decode=lambda _ids: "",
        parse=parse,
    )


def test_forty_turns_of_50000_tokens_record_each_token_once():
    engine = Engine()
    calls = calls_of(engine)

    async def run() -> None:
        prompt: list[int] = []
        for _ in range(TURNS):
            prompt = [*prompt, *[3] * NEW]
            reply = await calls.complete(TextRequest(model="policy", prompt=prompt))
            calls.keep(reply)
            prompt += reply.completion.token_ids
        calls.keep(await calls.complete(TextRequest(model="policy", prompt=[9] * NEW)))

    asyncio.run(run())
    total = TURNS * (NEW + REPLY)
    first, *others, of_another = engine.num_rows
    assert (first, of_another) == (NEW + REPLY - 1, NEW + REPLY - 1)
    assert set(others) == {NEW + REPLY}
    experts = calls.conversation.experts
    assert experts is not None
    assert sum(engine.num_rows) == len(experts), "what is kept is what was asked for"
    assert experts[: total - 1, 0, 0].tolist() == list(range(total - 1))
    turns = [0] + [(token + 1) // (NEW + REPLY) for token in range(1, total - 1)]
    assert experts[: total - 1, 3, 1].tolist() == turns
