"""From a prompt to token ids and back."""

import hashlib
from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path

from tokenizers import Tokenizer

from slipstream.generators.text.chat_template import (
    ChatTemplate,
    load_chat_template,
    read_json,
    token_text,
)
from slipstream.generators.text.images import Encoded, ImageMarks
from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.trajectory import ItemKind, Prompt
from slipstream.wire.models.image_law import image_law
from slipstream.wire.settings.sections import SamplingSection

_ALSO_END = ("<|eom_id|>",)  # SGLang ends a response there too
_SEED_BYTES = 8


class OverlongPromptError(ValueError):
    """A prompt has more tokens than sampling.max_prompt_tokens, and such prompts are dropped."""


class BadPromptError(ConfigError):
    """A prompt cannot become tokens, for a reason that lies in its row."""

    def __init__(self, prompt: Prompt, why: str) -> None:
        super().__init__(f"{_name(prompt)}: {why} (data.on_bad_row)")
        self.why = why  # without the name of the row


class TextCodec:
    """The policy's tokenizer and chat template."""

    def __init__(self, model_folder: Path, sampling: SamplingSection) -> None:
        """Read both from a Hugging Face folder.

        Raises:
            ConfigError: a file is missing or does not fit the model, or a setting is wrong.
        """
        path = model_folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                f"no tokenizer.json in {model_folder}, and no other tokenizer that one could be "
                "made from: fetch or save the whole folder (run.model)"
            )
        try:
            self._tokenizer: Tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises nothing more precise
            raise ConfigError(f"{path} is not a tokenizer (run.model): {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size = _vocab_size(self._tokenizer, model_folder, sampling.stop_token_ids)
        """Number of token ids of the model; 0 if config.json has no vocab_size."""
        self._sampling = sampling
        self._law = image_law(model_folder)
        self._template = load_chat_template(
            model_folder, sampling.chat_template, sampling.chat_template_kwargs
        )
        ends = self._named_ids(model_folder, "eos_token", *_ALSO_END) | {*sampling.stop_token_ids}
        self.end_token_ids = tuple(sorted(ends))
        """Tokens that end a response, as the engine collects them."""
        eos = token_text(read_json(model_folder / "tokenizer_config.json").get("eos_token"))
        own = self._tokenizer.token_to_id(eos or "")
        self.closing_token_id: int | None = min(ends, default=None) if own is None else own
        """Token that ends a text without a chat template; None without any."""
        added = self._tokenizer.get_added_tokens_decoder()
        special = {token_id for token_id, token in added.items() if token.special}
        self._silent = special & (ends | self._named_ids(model_folder, "pad_token"))

    def _named_ids(self, folder: Path, name: str, *more: str) -> set[int]:
        """Return the tokens with a name, such as eos_token, in files of a folder, and of texts."""
        found: set[int] = set()
        for file in ("config.json", "generation_config.json"):
            ids = read_json(folder / file).get(f"{name}_id")
            given = ids if isinstance(ids, list) else [] if ids is None else [ids]
            if wrong := [number for number in given if type(number) is not int]:
                raise ConfigError(
                    f"{folder / file}: {name}_id must be a token's number or a list of them, got "
                    f"{wrong[0]!r} (run.model)"
                )
            found.update(number for number in given if number >= 0)  # -1: no token
        named = token_text(read_json(folder / "tokenizer_config.json").get(name))
        known = (self._tokenizer.token_to_id(text) for text in (named or "", *more))
        return found | {token_id for token_id in known if token_id is not None}

    def text(self, prompt: Prompt) -> str:
        """Return the model's input: text as it is, turns through the chat template.

        Raises:
            ConfigError: there is no chat template.
            BadPromptError: it refuses these turns.
        """
        if isinstance(prompt.prompt, str):
            return prompt.prompt
        if self._template is None:
            raise ConfigError(
                f"{_name(prompt)} is a conversation, but the model has no chat template: "
                "set sampling.chat_template"
            )
        try:
            return self._template.render(prompt.prompt)
        except ValueError as error:
            why = f"the chat template refuses it: {error} (sampling.chat_template)"
            raise BadPromptError(prompt, why) from error

    def tokens(self, prompt: Prompt) -> list[int]:
        """Return a prompt's token ids, however many; raises as ``whole`` does."""
        return self.whole(prompt).token_ids

    def whole(self, prompt: Prompt) -> Encoded:
        """Return a prompt's tokens, however many; a template brings its own special tokens.

        Raises:
            ConfigError: there is no chat template, or the model sees no images.
            BadPromptError: the template refuses the prompt, nothing is left of it, or its images
                and the places for them are not as many.
        """
        is_text = isinstance(prompt.prompt, str)
        ids: list[int] = self._tokenizer.encode(self.text(prompt), add_special_tokens=is_text).ids
        if not ids:
            raise BadPromptError(prompt, "no tokens")
        marks = self.image_marks()
        if marks is None:
            if prompt.images:
                raise ConfigError(
                    f"{_name(prompt)} has images, which the model does not see (run.model)"
                )
            return Encoded(ids)
        try:
            return marks.encoded(marks.marked(ids, prompt.images))
        except ValueError as error:
            raise BadPromptError(prompt, str(error)) from error

    def image_marks(self) -> ImageMarks | None:
        """Return the marks of a prompt or trajectory, without an image; None: none are seen."""
        if self._law is None:
            return None
        return ImageMarks(self._law, self._sampling.max_image_pixels)

    def encode(self, prompt: Prompt) -> Encoded:
        """Return a prompt's tokens within sampling.max_prompt_tokens.

        Raises:
            ConfigError: it is too long and sampling.overlong_prompts is error, there is no chat
                template, or the model sees no images.
            BadPromptError: the chat template refuses it, it has no tokens, or its images and the
                places for them are not as many.
            OverlongPromptError: it is too long and sampling.overlong_prompts is drop, or truncate
                and an image would be cut off.
        """
        encoded = self.whole(prompt)
        ids = encoded.token_ids
        limit = self._sampling.max_prompt_tokens
        if len(ids) <= limit:
            return encoded
        problem = f"{_name(prompt)} has {len(ids)} tokens, sampling.max_prompt_tokens is {limit}"
        match self._sampling.overlong_prompts:
            case "error":
                raise ConfigError(
                    f"{problem}; sampling.overlong_prompts = drop or truncate continues"
                )
            case "drop":
                raise OverlongPromptError(problem)
            case "truncate" if encoded.images:
                raise OverlongPromptError(f"{problem}, and prompts with images are not truncated")
            case "truncate":
                return Encoded(ids[-limit:])

    def text_ids(self, text: str) -> list[int]:
        """Return the tokens of a text, without special tokens around it."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def ids_of_pieces(self, pieces: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each piece of a text, without special tokens around it.

        They are the tokens of the whole text, unless one of these spans two pieces: then each
        piece is turned into tokens alone.
        """
        encoding = self._tokenizer.encode("".join(pieces), add_special_tokens=False)
        ids: list[int] = encoding.ids
        starts, ends = [start for start, _ in encoding.offsets], [0]
        for bound in accumulate(map(len, pieces)):
            ends.append(bisect_left(starts, bound, lo=ends[-1]))
            if ends[-1] and encoding.offsets[ends[-1] - 1][1] > bound:
                return [self.text_ids(piece) for piece in pieces]
        ends[-1] = len(ids)
        return [ids[start:end] for start, end in pairwise(ends)]

    def token_text(self, token_id: int) -> str:
        """Return the text of one token, special ones included."""
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token, or its bytes if tokens consist of bytes."""
        return max(map(len, self._tokenizer.get_vocab()), default=0)

    @property
    def template(self) -> ChatTemplate | None:
        """The chat template; None without one."""
        return self._template

    def decode(self, token_ids: list[int]) -> str:
        """Return a response's text, with special tokens as sampling.skip_special_tokens says."""
        shown = [token_id for token_id in token_ids if token_id not in self._silent]
        skip = self._sampling.skip_special_tokens
        text: str = self._tokenizer.decode(shown, skip_special_tokens=skip)
        return text


def sibling_seed(run_seed: int, item: ItemKind, position: int, sibling: int) -> int:
    """Return the 63-bit seed of one response; it depends on nothing else, in any release."""
    name = f"{run_seed}/{item}/{position}/{sibling}".encode()
    digest = hashlib.blake2b(name, digest_size=_SEED_BYTES).digest()
    return int.from_bytes(digest, "little") >> 1


def _vocab_size(tokenizer: Tokenizer, folder: Path, stops: Sequence[int]) -> int:
    """Return a model's number of tokens; refuse a tokenizer with more of them."""
    config = read_json(folder / "config.json")
    size = config.get("vocab_size", (config.get("text_config") or {}).get("vocab_size"))
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if not isinstance(size, int):
        return 0
    if max(stops, default=-1) >= size:
        raise ConfigError(
            f"sampling.stop_token_ids has {max(stops)}, the model has tokens 0 to {size - 1}"
        )
    if largest >= size:
        raise ConfigError(
            f"tokenizer and vocabulary of {folder} disagree (run.model): tokenizer.json has a "
            f"token {largest}, config.json has vocab_size = {size}"
        )
    return size


def _name(prompt: Prompt) -> str:
    if prompt.row >= 0:
        return f"row {prompt.row} of {prompt.data_source}"
    return f"prompt {prompt.text[:40]!r}"
