"""From messages to token ids, without rendering replies of the policy again.

A reply is kept as the tokens that were chosen. The tokens after it, of new messages and the prompt
for the next reply, are those that the chat template writes after a reply; a check once for each
template shows that they do not depend on earlier messages. Changes that a template makes to earlier
replies (Qwen3's leaves out their reasoning) are therefore not made. A reply that was cut off is
closed as the template closes a reply: those tokens are context.
"""

import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TypeAlias

from slipstream.generators.text.chat_template import ChatTemplate
from slipstream.generators.turns.requests import content_text
from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.trajectory import Json

Message: TypeAlias = Mapping[str, Json]  # message of OpenAI's chat API
_ELSE = "something else 9z8y"
_USER: Message = {"role": "user", "content": "a question 7g8h"}
_SYSTEM: Message = {"role": "system", "content": "rules"}
_RESULT: Message = {"role": "tool", "tool_call_id": "a1b2c3d4e", "content": "4 7 1"}
_TOOL = {
    "type": "function",
    "function": {
        "name": "tool_3k4l",
        "description": "a tool 1m2n",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}


class TemplateNotAppendOnlyError(ConfigError):
    """The text that a chat template writes after a reply depends on earlier messages."""


class MessageRendering:
    """The token ids of messages, by one chat template and tokenizer."""

    def __init__(
        self,
        template: ChatTemplate | None,
        encode: Callable[[str], list[int]],
        token_text: Callable[[int], str],
        end_token_ids: Collection[int],
    ) -> None:
        """Use a tokenizer: ``encode`` adds no special tokens.

        Args:
            template: Template of the model; without one texts of messages are joined unchanged.
            encode: Turns text into token ids.
            token_text: Returns the text of one token, special ones included.
            end_token_ids: Tokens that end a reply.
        """
        self._template = template
        self._encode = encode
        self._token_text = token_text
        self._ends = frozenset(end_token_ids)
        self._marker = f"reply {secrets.token_hex(12)} 5e6f"  # no message contains it

    def check(self, *, uses_tools: bool = False) -> None:
        """Refuse a template whose text after a reply depends on earlier messages.

        Raises:
            TemplateNotAppendOnlyError: it does, or takes no conversation of several turns.
        """
        if self._template is None:
            if uses_tools:
                raise TemplateNotAppendOnlyError(
                    "the model has no chat template, which tools need: set sampling.chat_template"
                )
            return
        for new in ([_USER], [_RESULT], [_RESULT, _RESULT])[: 3 if uses_tools else 1]:
            histories: tuple[list[Message], ...] = (
                [],
                [_USER, {"role": "assistant", "content": _ELSE}],
            )
            try:
                texts = {self._after(new, history) for history in histories}
                texts.update(self._after_optional_parts(new, uses_tools=uses_tools))
            except ValueError as error:
                what = " with tools" if new[0] is _RESULT else ""
                raise TemplateNotAppendOnlyError(
                    f"the chat template takes no conversation of several turns{what}: {error} "
                    "(sampling.chat_template)"
                ) from error
            if len(texts) > 1:
                first, second, *_ = sorted(texts)
                raise TemplateNotAppendOnlyError(
                    f"after a reply the chat template writes {first[:200]!r} or {second[:200]!r}, "
                    "depending on what was said before, tools and system messages included: the "
                    "tokens of a conversation cannot be kept as they were sampled "
                    "(sampling.chat_template)"
                )

    def _after_optional_parts(self, new: Sequence[Message], *, uses_tools: bool) -> Iterator[str]:
        """Yield the text after a reply with tools, and with a system message if that is accepted.

        Templates that write either before the newest question cannot be appended to.
        """
        if uses_tools:
            yield self._after(new, tools=[_TOOL])
        with suppress(ValueError):
            yield self._after(new, [_SYSTEM])

    def why_no_tools(self) -> str:
        """Return why the prompt does not list the tools; empty if it does.

        A template may leave them out on purpose: prompts of a data set may describe them.
        """
        if self._template is None:
            return "the model has no chat template"
        try:
            listed, plain = self.text([_USER], [_TOOL]), self.text([_USER])
        except ValueError as error:
            return f"the chat template {self._template.origin} refuses tools: {error}"
        same = f"the chat template {self._template.origin} writes the same with tools and without"
        return same if listed == plain else ""

    @cached_property
    def opening(self) -> str:
        """What the template writes between the last message and a reply to it."""
        with suppress(ValueError):
            return self.text([_USER]).rpartition(str(_USER["content"]))[2]
        return ""

    def first(self, messages: Sequence[Message], tools: Sequence[Json] | None = None) -> list[int]:
        """Return the prompt of a conversation that begins with these messages.

        Raises:
            ValueError: the template refuses them.
        """
        return self._encode(self.text(messages, tools))

    def following(self, reply_ids: Sequence[int], new: Sequence[Message]) -> list[int]:
        """Return the tokens between a reply and the next one.

        Args:
            reply_ids: Tokens of the reply, as they were sampled.
            new: Messages since then, without replies.

        Raises:
            ValueError: the template refuses them.
        """
        text = self._after(new)
        if reply_ids and reply_ids[-1] in self._ends:
            # The template closes a reply with the token that ended it, which is there already.
            end = self._token_text(reply_ids[-1])
            before, closing, after = text.partition(end) if end else ("", "", "")
            if closing and not before.strip():
                text = after
        return self._encode(text)

    def _after(
        self,
        new: Sequence[Message],
        history: Sequence[Message] = (),
        tools: Sequence[Json] | None = None,
    ) -> str:
        """Return the text that the template writes after a reply, for ``new`` messages."""
        reply: Message = {"role": "assistant", "content": self._marker}
        text = self.text([*history, _USER, reply, *new], tools)
        _, marker, after = text.rpartition(self._marker)
        if not marker:
            raise ValueError("it does not repeat a reply")
        return after

    def text(self, messages: Sequence[Message], tools: Sequence[Json] | None = None) -> str:
        """Return the text that the template writes for messages, with the prompt for a reply.

        Raises:
            ValueError: it refuses them.
        """
        if self._template is None:
            return "".join(content_text(message["content"]) for message in messages)
        return self._template.text(messages, tools)
