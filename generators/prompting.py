"""From the text of a prompt to token ids and back."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from wire.errors import ConfigError


class TextCodec:
    """The policy's tokenizer."""

    def __init__(self, model_folder: Path, *, max_prompt_tokens: int) -> None:
        path = model_folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"no tokenizer.json in {model_folder} (run.model)")
        self._tokenizer: Tokenizer = Tokenizer.from_file(str(path))
        self.end_token_ids = self._end_token_ids(model_folder)
        self._max_prompt_tokens = max_prompt_tokens

    def _end_token_ids(self, folder: Path) -> tuple[int, ...]:
        """Return the tokens that end a response, as the engine collects them."""
        ids: set[int] = set()
        for name in ("config.json", "generation_config.json"):
            ids.update(_ids(_read(folder / name).get("eos_token_id")))
        eos = _read(folder / "tokenizer_config.json").get("eos_token")
        text = eos.get("content") if isinstance(eos, dict) else eos
        token_id = self._tokenizer.token_to_id(str(text)) if text else None
        return tuple(sorted(ids | ({token_id} if token_id is not None else set())))

    def encode(self, prompt: str) -> list[int]:
        """Return a prompt's token ids.

        Raises:
            ValueError: it is empty or too long.
        """
        ids: list[int] = self._tokenizer.encode(prompt).ids
        if not ids:
            raise ValueError(f"prompt {prompt!r} has no tokens")
        if len(ids) > self._max_prompt_tokens:
            raise ValueError(
                f"prompt has {len(ids)} tokens, sampling.max_prompt_tokens is "
                f"{self._max_prompt_tokens}"
            )
        return ids

    def decode(self, token_ids: list[int]) -> str:
        """Return a response's text, without special tokens."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON (run.model): {error}") from error
    return content


def _ids(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]
