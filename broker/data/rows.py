"""Pure: one row of a file becomes one prompt. Rows are our own or verl's, as they are."""

import re
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time
from typing import Any

import msgspec

from slipstream.wire.messages.trajectory import ChatMessage, Json, Prompt

SYSTEM = "system"
TRUTH_COLUMN = "ground_truth"
_OTHER_COLUMNS = ("reward_model", "data_source", "ability", "extra_info")
_OWN_ROLES = frozenset({"assistant", "model", "gpt", "bot"})  # the policy's, as files name it
_TURN_KEYS = ("role", "content")
_TURNS_AS_TEXT = re.compile(  # one turn, a list of them, or an object that holds such a list
    r"""\s*(?:\{\s*['"]\w+['"]\s*:\s*)?\[?\s*\{"""
    r"""(?=.*['"](?:role|from)['"]\s*:\s*['"](?:system|developer|user|human|prompter|assistant"""
    r"""|model|gpt|chatgpt|bot|tool|function)['"])(?=.*['"](?:content|value)['"]\s*:)""",
    re.DOTALL | re.IGNORECASE,
)
_LEAST_INTEGER, _MOST_INTEGER = -(2**63), 2**64 - 1  # limits of MessagePack


class BadRowError(Exception):
    """Raised for a row that is no prompt, or no demonstration, with the reason."""


class RowRules(msgspec.Struct, frozen=True, kw_only=True):
    """Rules that make prompts of the rows of one source."""

    data_source: str  # default for rows without one
    prompt_column: str = "prompt"
    ground_truth_column: str = TRUTH_COLUMN
    as_chat: bool = False  # ask text as one turn of a user
    system_prompt: str = ""  # first turn, where a row has none

    @property
    def columns(self) -> set[str]:
        """Names of the columns that are read."""
        return {self.prompt_column, self.ground_truth_column, *_OTHER_COLUMNS}


def prompt_from_row(row: Mapping[str, Any], rules: RowRules, *, number: int) -> Prompt:
    """Return the prompt of a row.

    Our columns are prompt, ground_truth, data_source, ability and extra_info. verl's differ in
    that the truth is in ``reward_model["ground_truth"]``. A row without a truth, or with null, has
    None. Further columns are left out.

    Raises:
        BadRowError: the row is no prompt, with the reason.
    """
    asked = row.get(rules.prompt_column)
    if asked is None:
        raise BadRowError(f"no {rules.prompt_column}")
    extra_info = plain(row.get("extra_info"), "extra_info")
    if extra_info is not None and not isinstance(extra_info, dict):
        raise BadRowError(f"extra_info must be an object, got {kind_of(extra_info)}")
    return Prompt(
        prompt=_asked(plain(asked, rules.prompt_column), rules),
        ground_truth=_ground_truth(row, rules.ground_truth_column),
        data_source=_text(row, "data_source") or rules.data_source,
        ability=_text(row, "ability"),
        extra_info=extra_info or {},
        row=number,
    )


def _asked(value: Json, rules: RowRules) -> str | tuple[ChatMessage, ...]:
    if isinstance(value, str):
        if not value:
            raise BadRowError(f"{rules.prompt_column} is empty")
        if not rules.as_chat:
            if rules.system_prompt:
                raise BadRowError("a system prompt needs a conversation: set data.as_chat = true")
            return value
        turns = [ChatMessage("user", value)]
    elif isinstance(value, list):
        turns = [_turn(number, turn) for number, turn in enumerate(value)]
        if not turns:
            raise BadRowError(f"{rules.prompt_column} has no turns")
    else:
        raise BadRowError(
            f"{rules.prompt_column} must be text or a list of turns, got {kind_of(value)}"
        )
    if rules.system_prompt and turns[0].role != SYSTEM:
        turns.insert(0, ChatMessage(SYSTEM, rules.system_prompt))
    return tuple(turns)


def _turn(number: int, turn: Json) -> ChatMessage:
    if not isinstance(turn, dict):
        raise BadRowError(f"turn {number} must be an object, got {kind_of(turn)}")
    for key in _TURN_KEYS:
        if not isinstance(turn.get(key), str):
            raise BadRowError(f"{key} of turn {number} must be text, got {kind_of(turn.get(key))}")
    extra = [key for key, value in turn.items() if key not in _TURN_KEYS and value is not None]
    if extra:
        raise BadRowError(f"turn {number} has {', '.join(extra)}; only role and content are known")
    if not turn["role"]:
        raise BadRowError(f"role of turn {number} is empty")
    return ChatMessage(turn["role"], turn["content"])


def _ground_truth(row: Mapping[str, Any], column: str) -> Json:
    own = _or_none(plain(row.get(column), column))
    if own is not None or column != TRUTH_COLUMN:
        return own
    reward_model = plain(row.get("reward_model"), "reward_model")
    if reward_model is None:
        return None
    if not isinstance(reward_model, dict):
        raise BadRowError(
            f"reward_model must be an object with ground_truth, got {kind_of(reward_model)}"
        )
    return _or_none(reward_model.get(TRUTH_COLUMN))


def _or_none(value: Json) -> Json:
    """Return None for NaN: a missing value in a column of floats."""
    return value if value == value else None


def odd_shape(prompt: Prompt) -> str:
    """Return what is odd about a prompt that can be asked; empty if nothing is."""
    asked = prompt.prompt
    last = ChatMessage("", asked) if isinstance(asked, str) else asked[-1]
    if last.role in _OWN_ROLES:
        return f"end with a turn of the policy's own ({last.role}): the answer may stand in it"
    return (
        "are a conversation as text, asked as it is" if _TURNS_AS_TEXT.match(last.text) else ""
    )


def _text(row: Mapping[str, Any], column: str) -> str:
    value = row.get(column)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise BadRowError(f"{column} must be text, got {kind_of(value)}")
    return value


_SCALARS: tuple[type[bool | int | float | str], ...] = (bool, int, float, str)


def plain(value: Any, where: str) -> Json:  # noqa: ANN401 anything that a file holds
    """Return a value as JSON holds it: scalars and arrays of numpy or arrow become Python's.

    Raises:
        BadRowError: it cannot be written as JSON, or is an integer that MessagePack does not hold.
    """
    if isinstance(value, int) and not _LEAST_INTEGER <= value <= _MOST_INTEGER:
        raise BadRowError(f"{where} holds an integer of more than 64 bits: write it as text")
    if value is None or type(value) in _SCALARS:
        return value
    for scalar in _SCALARS:  # subclasses, such as numpy's text and double numbers
        if isinstance(value, scalar):
            return scalar(value)
    if isinstance(value, Mapping):
        return {str(key): plain(inner, where) for key, inner in value.items()}
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, bytes | bytearray):
        return [plain(inner, where) for inner in value]
    for name in ("tolist", "as_py"):  # numpy's arrays and scalars, arrow's scalars
        convert = getattr(value, name, None)
        if callable(convert):
            return plain(convert(), where)
    raise BadRowError(f"{where} holds {kind_of(value)}, which JSON does not know: write it as text")


def kind_of(value: object) -> str:
    """Return what a value is, for messages."""
    names = {type(None): "nothing", str: "text", dict: "an object", list: "a list"}
    return names.get(type(value), type(value).__name__)
