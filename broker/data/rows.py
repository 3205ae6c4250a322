"""Pure: one row of a file becomes one prompt. Rows are our own or verl's, as they are."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from slipstream.broker.data.image_places import TakeImage, no_image, place_images
from slipstream.broker.data.plain import BadRowError, kind_of, plain
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


class RowRules(msgspec.Struct, frozen=True, kw_only=True):
    """Rules that make prompts of the rows of one source."""

    data_source: str  # default for rows without one
    prompt_column: str = "prompt"
    ground_truth_column: str = TRUTH_COLUMN
    as_chat: bool = False  # ask text as one turn of a user
    system_prompt: str = ""  # first turn, where a row has none
    image_columns: tuple[str, ...] = ()  # columns with images; the first that has any is taken
    max_images: int = 16  # most images of a prompt

    @property
    def columns(self) -> set[str]:
        """Names of the columns that are read."""
        own = {self.prompt_column, self.ground_truth_column, *self.image_columns}
        return own | {*_OTHER_COLUMNS}


def prompt_from_row(
    row: Mapping[str, Any], rules: RowRules, *, number: int, take_image: TakeImage = no_image
) -> Prompt:
    """Return the prompt of a row.

    Our columns are prompt, ground_truth, images, data_source, ability and extra_info. verl's
    differ in that the truth is in ``reward_model["ground_truth"]``. A row without a truth, or with
    null, has None. Further columns are left out.

    Args:
        row: Values by column.
        rules: Rules of its source.
        number: Number of the row in its file.
        take_image: Keeps an image and returns its facts.

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
        prompt=_asked(row, rules, take_image),
        ground_truth=_ground_truth(row, rules.ground_truth_column),
        data_source=_text(row, "data_source") or rules.data_source,
        ability=_text(row, "ability"),
        extra_info=extra_info or {},
        row=number,
    )


def _asked(
    row: Mapping[str, Any], rules: RowRules, take_image: TakeImage
) -> str | tuple[ChatMessage, ...]:
    column, images = _images(row, rules)
    value = row[rules.prompt_column]
    if isinstance(value, str):
        if not value:
            raise BadRowError(f"{rules.prompt_column} is empty")
        if not rules.as_chat:
            if rules.system_prompt:
                raise BadRowError("a system prompt needs a conversation: set data.as_chat = true")
            if images:
                raise BadRowError(
                    "images need a conversation: set data.as_chat = true, or leave them out by "
                    'data.image_column = ""'
                )
            return str(plain(value, rules.prompt_column))
        turns: list[tuple[str, Any]] = [("user", plain(value, rules.prompt_column))]
    else:
        listed = _listed(value)
        if listed is None:
            raise BadRowError(
                f"{rules.prompt_column} must be text or a list of turns, got {kind_of(value)}"
            )
        turns = [_turn(number, turn) for number, turn in enumerate(listed)]
        if not turns:
            raise BadRowError(f"{rules.prompt_column} has no turns")
    if rules.system_prompt and turns[0][0] != SYSTEM:
        turns.insert(0, (SYSTEM, rules.system_prompt))
    return place_images(turns, images, column, take_image, most=rules.max_images)


def _images(row: Mapping[str, Any], rules: RowRules) -> tuple[str, list[Any]]:
    """Return the column with a row's images, and those."""
    for column in rules.image_columns:
        value = row.get(column)
        listed = _listed(value)
        if listed is None:
            listed = [] if value is None or value == "" else [value]
        if listed:
            return column, listed
    return rules.image_columns[0] if rules.image_columns else "no column", []


def _listed(value: Any) -> list[Any] | None:  # noqa: ANN401 anything that a file holds
    """Return the items of a list, also of numpy or arrow; None of another value."""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview):
        return list(value)
    convert = getattr(value, "tolist", None)
    return _listed(convert()) if callable(convert) else None


def _turn(number: int, turn: Any) -> tuple[str, Any]:  # noqa: ANN401 anything that a file holds
    """Return the role and the content of a turn: text, or a list of parts."""
    if not isinstance(turn, Mapping):
        turn = plain(turn, f"turn {number}")
    if not isinstance(turn, Mapping):
        raise BadRowError(f"turn {number} must be an object, got {kind_of(turn)}")
    role, content = turn.get("role"), turn.get("content")
    if not isinstance(role, str):
        raise BadRowError(f"role of turn {number} must be text, got {kind_of(role)}")
    parts = _listed(content)
    if not isinstance(content, str) and parts is None:
        raise BadRowError(f"content of turn {number} must be text, got {kind_of(content)}")
    extra = [key for key, value in turn.items() if key not in _TURN_KEYS and value is not None]
    if extra:
        raise BadRowError(f"turn {number} has {', '.join(extra)}; only role and content are known")
    if not role:
        raise BadRowError(f"role of turn {number} is empty")
    return str(role), plain(content, "content") if parts is None else parts


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
    return "are a conversation as text, asked as it is" if _TURNS_AS_TEXT.match(last.text) else ""


def _text(row: Mapping[str, Any], column: str) -> str:
    value = row.get(column)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise BadRowError(f"{column} must be text, got {kind_of(value)}")
    return value
