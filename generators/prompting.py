"""From the text of a prompt to token ids and back."""

from pathlib import Path

from tokenizers import Tokenizer

from wire.errors import ConfigError


class TextCodec:
    """The policy's tokenizer."""

    def __init__(self, model_folder: Path, *, max_prompt_tokens: int) -> None:
        path = model_folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"no tokenizer.json in {model_folder} (run.model)")
        self._tokenizer: Tokenizer = Tokenizer.from_file(str(path))
        self._max_prompt_tokens = max_prompt_tokens

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
