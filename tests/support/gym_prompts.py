"""Prompts of reasoning-gym as a run gets them, and their scores."""

import msgspec

from slipstream.broker.config import DataSection
from slipstream.broker.data.sources import load_training_prompts
from slipstream.broker.rewards.reasoning_gym import score
from slipstream.wire.messages.trajectory import Prompt
from slipstream.wire.settings.load import section


def prompts(name: str, **table: object) -> list[Prompt]:
    sources = {"mine": {"reasoning_gym": name, "size": 4, **table}}
    settings = section({"data": {"sources": sources, "shuffle": False}}, "data", DataSection)
    source = load_training_prompts(settings, seed=0)
    travelled = [msgspec.msgpack.encode(source.at(i)) for i in range(source.num_rows)]
    return [msgspec.msgpack.decode(data, type=Prompt) for data in travelled]


def scored(prompt: Prompt, answer: str) -> dict[str, float]:
    return score(prompt.data_source, answer, prompt.ground_truth, prompt.extra_info)
