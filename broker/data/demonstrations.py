"""Pure: one row of a file becomes one demonstration. Rows are verl's, TRL's or our own."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from slipstream.broker.data.image_places import is_image
from slipstream.broker.data.plain import BadRowError, kind_of, plain
from slipstream.broker.data.rows import SYSTEM, TRUTH_COLUMN, RowRules
from slipstream.wire.messages.trajectory import Json

POLICY = "assistant"  # role of the policy's own turns
_ASKED = ("prompt", "question")
_REPLIES = ("completion", "response", "answer")
_VARIABLES = ("chat_template_kwargs", "enable_thinking")
_FORMS = (
    "messages, prompt and completion (or response), question and answer (of extra_info, too), or "
    "text"
)


class Demonstration(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation, or a text: what the policy should have written, and what it follows.

    Of a conversation the policy's own turns after the first ``num_given`` messages are trained, of
    a text all that follows the prompt; without a prompt, all that follows its first token.
    """

    messages: list[dict[str, Json]] = []  # messages of OpenAI's chat API; empty for a text
    num_given: int = 0
    tools: list[Json] | None = None
    variables: dict[str, Json] = {}  # inputs of the chat template
    prompt: str = ""
    reply: str = ""


def demonstration_columns(rules: RowRules) -> set[str]:
    """Return the names of the columns that are read."""
    pairs = {*_names(rules.prompt_column, _ASKED), *_replies(rules)}
    return {"messages", "tools", "text", "extra_info", *pairs, *_VARIABLES}


def demonstration_from_row(
    row: Mapping[str, Any], rules: RowRules, *, is_columnar: bool
) -> Demonstration:
    """Return the demonstration of a row.

    A columnar file (parquet) has every key of any row's objects in each, with null for what is
    absent: tools and arguments of calls with nulls are refused, as they may not be what was meant.

    Raises:
        BadRowError: the row holds no demonstration; the error says why.
    """
    found = _found(row, rules)
    if is_columnar and (_holds_null(found.tools) or _holds_null(_arguments(found.messages))):
        raise BadRowError(
            "tools or arguments of a call hold null, which parquet fills in for keys that other "
            "rows have: write them as JSON in text"
        )
    return found


def _found(row: Mapping[str, Any], rules: RowRules) -> Demonstration:
    if row.get("messages") is not None:
        return _conversation(row, _turns(row, "messages"), 0, rules)
    extra = row.get("extra_info")
    for place in (row, extra if isinstance(extra, Mapping) else {}):
        asked = _first(place, _names(rules.prompt_column, _ASKED))
        reply = _first(place, _replies(rules))
        if asked and reply:
            return _answered(row, place, asked, reply, rules)
    if row.get("text") is not None:
        return Demonstration(reply=_text(row, "text"))
    held = ", ".join(name for name, value in row.items() if value is not None) or "no values"
    raise BadRowError(f"no demonstration: expected {_FORMS}, got {held}")


def _answered(
    row: Mapping[str, Any], place: Mapping[str, Any], asked: str, reply: str, rules: RowRules
) -> Demonstration:
    """Return the demonstration of a question and the reply to it, in columns with these names."""
    is_chat = not isinstance(place[asked], str)
    if not is_chat and not isinstance(place[reply], str):
        raise BadRowError(f"{asked} is text and {reply} is not: expected text or turns in both")
    if not is_chat and not rules.as_chat:
        if rules.system_prompt:
            raise BadRowError("a system prompt needs a conversation: set data.as_chat = true")
        return Demonstration(prompt=_text(place, asked), reply=_text(place, reply))
    given = _turns(place, asked) if is_chat else [{"role": "user", "content": _text(place, asked)}]
    if isinstance(place[reply], str):
        new: list[dict[str, Json]] = [{"role": POLICY, "content": _text(place, reply)}]
    else:
        new = _turns(place, reply)
    return _conversation(row, [*given, *new], len(given), rules)


def _conversation(
    row: Mapping[str, Any], messages: list[dict[str, Json]], num_given: int, rules: RowRules
) -> Demonstration:
    roles = dict.fromkeys(str(turn.get("role")) for turn in messages[num_given:])
    if POLICY not in roles:
        raise BadRowError(f"no turn of the policy's own ({POLICY}), only of {', '.join(roles)}")
    if rules.system_prompt and messages[0].get("role") not in {SYSTEM, "developer"}:
        messages = [{"role": SYSTEM, "content": rules.system_prompt}, *messages]
        num_given += num_given > 0
    variables = plain(row.get("chat_template_kwargs"), "chat_template_kwargs") or {}
    if not isinstance(variables, dict):
        raise BadRowError(f"chat_template_kwargs must be an object, got {kind_of(variables)}")
    if row.get("enable_thinking") is not None:
        variables["enable_thinking"] = plain(row["enable_thinking"], "enable_thinking")
    return Demonstration(
        messages=messages, num_given=num_given, tools=_tools(row), variables=variables
    )


def _arguments(messages: list[dict[str, Json]]) -> list[Json]:
    calls = [call for turn in messages for call in turn.get("tool_calls") or ()]
    functions = [call.get("function") for call in calls if isinstance(call, dict)]
    return [function.get("arguments") for function in functions if isinstance(function, dict)]


def _holds_null(value: Json) -> bool:
    """Return True if an object in a value, at any depth, has a null."""
    if isinstance(value, dict):
        return any(inner is None or _holds_null(inner) for inner in value.values())
    return isinstance(value, list) and any(map(_holds_null, value))


def _turns(place: Mapping[str, Any], column: str) -> list[dict[str, Json]]:
    turns = plain(place[column], column)
    if not isinstance(turns, list):
        raise BadRowError(f"{column} must be a list of turns, got {kind_of(turns)}")
    if not turns:
        raise BadRowError(f"{column} has no turns")
    for number, turn in enumerate(turns):
        if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
            raise BadRowError(f"turn {number} of {column} must be an object with a role")
        parts = turn.get("content")
        if isinstance(parts, list) and any(is_image(part) for part in parts):
            raise BadRowError(f"turn {number} of {column} has an image: demonstrations have none")
    return turns


def _tools(row: Mapping[str, Any]) -> list[Json] | None:
    """Return the tools of a row: a list, also as JSON in text; null means no tools."""
    tools = plain(row.get("tools"), "tools")
    if isinstance(tools, str):
        try:
            tools = msgspec.json.decode(tools) if tools else None
        except msgspec.DecodeError as error:
            raise BadRowError(f"tools is text, but not JSON: {error}") from error
    if tools is not None and not isinstance(tools, list):
        raise BadRowError(f"tools must be a list, got {kind_of(tools)}")
    return tools or None


def _text(place: Mapping[str, Any], column: str) -> str:
    text = place[column]
    if not isinstance(text, str):
        raise BadRowError(f"{column} must be text, got {kind_of(text)}")
    if not text:
        raise BadRowError(f"{column} is empty")
    return text


def _names(first: str, others: Iterable[str]) -> list[str]:
    return list(dict.fromkeys((first, *others)))


def _replies(rules: RowRules) -> list[str]:
    own = rules.ground_truth_column
    return list(_REPLIES) if own == TRUTH_COLUMN else _names(own, _REPLIES)


def _first(place: Mapping[str, Any], names: Iterable[str]) -> str:
    """Return the first of some columns that has a value; empty if none has."""
    return next((name for name in names if place.get(name) is not None), "")
