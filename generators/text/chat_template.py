"""Chat templates, rendered as transformers renders them."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from msgspec import to_builtins
from typing_extensions import override

from slipstream.generators.text.bounded_templates import BoundedEnvironment
from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.trajectory import ChatMessage, Json

_SPECIAL_TOKENS = tuple(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)
# Errors of a template besides its own: its expressions are Python's.
_RENDERING_ERRORS = (
    *(TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, RecursionError),
    MemoryError,
)


class ChatTemplate:
    """The template of a model, or its replacement."""

    def __init__(self, source: str, variables: Mapping[str, Json], *, origin: str) -> None:
        """Compile a template; ``variables`` are its inputs besides the turns, ``origin`` its file.

        Raises:
            ConfigError: it is not a template.
        """
        environment = BoundedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.bounded(source)
        except (TemplateError, RecursionError) as error:
            raise ConfigError(f"{origin} is not a chat template: {error}") from error
        self._environment = environment
        self._variables = variables
        self.origin = origin

    def render(self, turns: Sequence[ChatMessage]) -> str:
        """Return the text that prompts the model to reply to a conversation.

        Raises:
            ValueError: the template refuses these turns, or does not end.
        """
        return self.text([message_of(turn) for turn in turns])

    def text(
        self,
        messages: Sequence[Mapping[str, Json]],
        tools: Sequence[Json] | None = None,
        *,
        prompts_reply: bool = True,
        variables: Mapping[str, Json] | None = None,
    ) -> str:
        """Return the text that prompts the model to reply to messages, as of OpenAI's chat API.

        ``tools`` are functions with JSON schemas, in the form of that API; None is without. Without
        ``prompts_reply`` the text ends with the last message. ``variables`` go before the run's.

        Raises:
            ValueError: the template refuses these messages, or does not end.
        """
        try:
            return self._environment.text_of(
                self._template,
                {
                    "documents": None,
                    **self._variables,
                    **(variables or {}),
                    "messages": list(messages),
                    "tools": list(tools) if tools else None,
                    "add_generation_prompt": prompts_reply,
                },
            )
        except _RENDERING_ERRORS as error:
            raise ValueError(str(error)) from error


def message_of(turn: ChatMessage) -> dict[str, Json]:
    """Return a turn as a message of OpenAI's chat API; an image is a part of its own type."""
    if isinstance(turn.content, str):
        return {"role": turn.role, "content": turn.content}
    parts: list[Json] = [
        {"type": "text", "text": part.text}
        if part.image is None
        else {"type": "image", "image": to_builtins(part.image)}
        for part in turn.content
    ]
    return {"role": turn.role, "content": parts}


def load_chat_template(
    folder: Path, override_file: str, kwargs: Mapping[str, Json]
) -> ChatTemplate | None:
    """Return the template of a Hugging Face folder, or that of ``override_file``; or None.

    Raises:
        ConfigError: a file that cannot be read, or one that holds no template.
    """
    tokenizer = read_json(folder / "tokenizer_config.json")
    origin = folder / "chat_template.jinja"
    if override_file:
        origin = Path(override_file)
        source: Any = _read(origin)
    elif origin.is_file():
        source = _read(origin)
    else:
        origin = folder / "tokenizer_config.json"
        source = tokenizer.get("chat_template")
        if isinstance(source, list):  # several templates by name
            source = _default_of(source, origin)
    if not source or not isinstance(source, str):
        return None
    variables = {**special_tokens(folder, tokenizer), **kwargs}
    return ChatTemplate(source, variables, origin=f"{origin} (sampling.chat_template)")


def _default_of(templates: list[Any], origin: Path) -> Any:  # noqa: ANN401 JSON
    try:
        return {entry["name"]: entry["template"] for entry in templates}.get("default")
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"{origin}: each entry of chat_template must have a name and a template (run.model)"
        ) from error


def special_tokens(folder: Path, tokenizer: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that have a name, as transformers collects them."""
    named = dict(tokenizer)
    if "added_tokens_decoder" not in tokenizer:  # written by an older transformers
        named |= read_json(folder / "special_tokens_map.json")
    texts = {name: token_text(named.get(name)) for name in _SPECIAL_TOKENS}
    return {name: text for name, text in texts.items() if text is not None}


def token_text(token: Any) -> str | None:  # noqa: ANN401 JSON
    """Return the text of a special token, which is written as text or as an object."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file of a model folder; a missing file is empty.

    Raises:
        ConfigError: it holds something else.
    """
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON (run.model): {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no JSON object (run.model): fetch the file again")
    return content


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read sampling.chat_template = {path}: {error}") from error


class _Generation(Extension):
    """Accepts {% generation %} blocks, which mark replies for training elsewhere."""

    tags = {"generation"}  # noqa: RUF012 as jinja declares it

    @override
    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        block = nodes.CallBlock(self.call_method("_as_it_is"), [], [], body)
        return block.set_lineno(line)

    def _as_it_is(self, caller: Callable[[], str]) -> str:
        return caller()


def _tojson(
    value: Json,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005 a template means the local day
