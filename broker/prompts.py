"""Prompt files: JSONL, one prompt a line, taken in a seeded order that a cursor remembers."""

import random
from pathlib import Path

import msgspec

from wire.errors import ConfigError
from wire.trajectory import Prompt

_decoder = msgspec.json.Decoder(Prompt)


def load_prompts(path: Path, setting: str) -> list[Prompt]:
    """Return all rows of a JSONL file.

    Raises:
        ConfigError: no such file, an empty file, or a row that is not a prompt.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read {setting} = {path}: {error.strerror}") from error
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompts.append(_decoder.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{setting}: row {number} of {path} is not a prompt: {error}"
            ) from error
    if not prompts:
        raise ConfigError(f"{setting} = {path} holds no prompts")
    return prompts


class PromptSource:
    """Rows in an order that depends on the seed and the cursor alone; epochs are reshuffled."""

    def __init__(self, prompts: list[Prompt], *, seed: int) -> None:
        self._prompts = prompts
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []

    def at(self, cursor: int) -> Prompt:
        """Return the prompt at a position of the endless sequence of epochs."""
        epoch, index = divmod(cursor, len(self._prompts))
        if epoch != self._epoch:
            self._order = list(range(len(self._prompts)))
            random.Random(f"{self._seed}/{epoch}").shuffle(self._order)  # noqa: S311 not for secrets
            self._epoch = epoch
        return self._prompts[self._order[index]]
