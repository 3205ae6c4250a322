"""Pure: first messages of a trajectory that begins with a library's observation or question."""

import hashlib

from slipstream.generators.environments.sdk import Prompt
from slipstream.wire.messages.trajectory import Json

_SEED_BYTES = 4


def opening(prompt: Prompt, text: str) -> list[dict[str, Json]]:
    """Return the prompt's messages with a text after them, in one message of a user."""
    messages: list[dict[str, Json]] = []
    if not isinstance(prompt.prompt, str):
        messages += [{"role": turn.role, "content": turn.content} for turn in prompt.prompt]
    elif prompt.prompt:
        messages.append({"role": "user", "content": prompt.prompt})
    if messages and messages[-1]["role"] == "user":
        before = str(messages.pop()["content"])
        text = f"{before}\n\n{text}"
    return [*messages, {"role": "user", "content": text}]


def episode_seed(prompt: Prompt) -> int:
    """Return ``extra_info.seed`` of a prompt, else a number from 0 to 2**32 - 1 by its content.

    All trajectories of a group have the same seed, because they are compared with each other.
    """
    named = prompt.extra_info.get("seed")
    if isinstance(named, int):
        return named
    content = f"{prompt.row}\n{prompt.text}\n{prompt.ground_truth!r}"
    return int.from_bytes(hashlib.sha256(content.encode()).digest()[:_SEED_BYTES], "big")
