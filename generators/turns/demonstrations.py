"""From demonstrations to token ids, with the tokens that are the policy's own.

What the policy is given before a turn, and what the turn is with the mark that ends it, is what the
chat template writes: it renders the messages before the turn with the prompt for a reply, and the
same with the turn. Where a template writes earlier messages otherwise than before (Qwen3's leaves
out their reasoning), the next turn begins a branch with all that the policy is given there.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from slipstream.generators.text.codec import TextCodec
from slipstream.generators.turns.requests import normalized
from slipstream.wire.messages.trajectory import Json, Prompt, Turn

_THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # names of it in files and templates


@dataclass(frozen=True, slots=True)
class DemonstratedTokens:
    """The tokens of a demonstration. Shapes: T tokens of all branches."""

    token_ids: list[int]  # [T]
    turns: tuple[Turn, ...]  # the policy's own, each with what ends it
    branches: tuple[int, ...]  # first tokens of the second and further branches
    texts: tuple[str, ...]  # context before the first turn, then each turn


def text_tokens(codec: TextCodec, prompt: str, reply: str) -> DemonstratedTokens:
    """Return the tokens of a text, which a token ends; without prompt the first one is context.

    Raises:
        ValueError: nothing is left of it, or the model has no token that ends a response.
    """
    end = codec.closing_token_id
    if end is None:
        raise ValueError("the model has no token that ends a response: set sampling.stop_token_ids")
    if prompt:
        given, whole = _begun(codec, prompt), _begun(codec, prompt + reply)
        keeps = whole[: len(given)] == given  # else a token spans both
        ids = whole if keeps else given + codec.text_ids(reply)
        first = len(given)
    else:
        ids, first = _begun(codec, reply), 1
    if ids[-1] not in codec.end_token_ids:
        ids = [*ids, end]
    turns = (Turn(first, len(ids) - first),)
    return DemonstratedTokens(ids, turns, (), (prompt, reply))


def _begun(codec: TextCodec, text: str) -> list[int]:
    """Return the tokens of a text, which may begin with the token that the tokenizer puts there."""
    ids, written = codec.tokens(Prompt(prompt=text)), codec.text_ids(text)
    is_doubled = len(ids) > len(written) and ids[:2] == written[:1] * 2
    return ids[1:] if is_doubled else ids


def conversation_tokens(
    codec: TextCodec,
    messages: Sequence[Mapping[str, Json]],
    tools: Sequence[Json] | None = None,
    *,
    num_given: int = 0,
    variables: Mapping[str, Json] | None = None,
) -> DemonstratedTokens:
    """Return the tokens of a conversation.

    Args:
        codec: tokenizer and chat template of the policy.
        messages: messages as of OpenAI's chat API.
        tools: tools that the template lists; None is without.
        num_given: messages at the beginning without turns to train.
        variables: inputs of the template, before those of the run.

    Raises:
        ValueError: the template refuses the messages, or does not tell a turn from what surrounds
            it; the error says what it writes.
    """
    if codec.template is None:
        raise ValueError("the model has no chat template: set sampling.chat_template")
    plain = [_complete(message) for message in messages]
    branches: list[list[str]] = []  # each of context and turn, one after the other
    for number, message in enumerate(plain):
        if message["role"] != "assistant" or number < num_given:
            continue
        try:
            before, after = (
                codec.template.text(
                    plain[:end], tools, prompts_reply=end == number, variables=variables
                )
                for end in (number, number + 1)
            )
        except ValueError as error:
            why = f"the chat template refuses turn {number}, or those before it: {error}"
            raise ValueError(f"{why} (sampling.chat_template)") from error
        turn = _turn(codec, before, after, message, number)
        known = "".join(branches[-1]) if branches else ""
        if known and before.startswith(known) and before != known:
            branches[-1] += [before[len(known) :], turn]
        else:
            branches.append([before, turn])
    return _laid_out(codec, branches)


def _complete(message: Mapping[str, Json]) -> dict[str, Json]:
    """Return a message as templates take it, with keys that some of them read alone."""
    return {name: value for name, value in message.items() if value} | normalized(message)


def _turn(
    codec: TextCodec, before: str, after: str, message: Mapping[str, Json], number: int
) -> str:
    """Return the text of a turn with the mark that ends it.

    Args:
        codec: knows what ends a response.
        before: the text that prompts for the turn.
        after: the text of the same messages and the turn.
        message: the turn.
        number: its place among the messages.
    """
    if not message["content"] and not message.get("tool_calls"):
        raise ValueError(f"turn {number} is the policy's own, and empty")
    if not after.startswith(before):
        same = next(i for i, letter in enumerate(before) if after[i : i + 1] != letter)
        raise ValueError(
            f"the chat template prompts for turn {number} with {before[same:][:100]!r}, and writes "
            f"{after[same:][:100]!r} where the turn is there (sampling.chat_template, "
            "sampling.chat_template_kwargs)"
        )
    written = after[len(before) :]
    ends = {codec.token_text(token_id) for token_id in codec.end_token_ids} - {""}
    for end in ends:
        if end in str(message):
            raise ValueError(f"turn {number} holds {end!r}, which ends a response")
    stops = [written.find(end) + len(end) for end in ends if end in written]
    if not stops:
        raise ValueError(
            f"the chat template closes turn {number} with {written[-40:]!r}, where no token ends a "
            f"response ({', '.join(sorted(ends))}): the policy would not learn to end "
            "(sampling.stop_token_ids)"
        )
    turn = written[: min(stops)]
    for what, text in _parts(message):
        if text not in turn:
            raise ValueError(
                f"the chat template leaves {what} out of turn {number} (sampling.chat_template)"
            )
    return turn


def _parts(message: Mapping[str, Json]) -> Iterator[tuple[str, str]]:
    """Yield what a template must write of a turn: the name of a field, and text of it."""
    for name in _THOUGHTS:
        if isinstance(thought := message.get(name), str):
            yield name, thought.strip()
    for call in message.get("tool_calls") or ():
        yield "tool_calls", call["function"]["name"]


def _laid_out(codec: TextCodec, branches: Sequence[Sequence[str]]) -> DemonstratedTokens:
    token_ids, turns, firsts = list[int](), list[Turn](), list[int]()
    for branch in branches:
        firsts.append(len(token_ids))
        for place, (piece, ids) in enumerate(zip(branch, codec.ids_of_pieces(branch), strict=True)):
            is_turn = bool(place % 2)
            if not ids or (is_turn and ids[-1] not in codec.end_token_ids):
                what = "is not closed by a token that ends a response" if ids else "has no tokens"
                raise ValueError(f"{piece[-100:]!r} {what}")
            if is_turn:
                turns.append(Turn(len(token_ids), len(ids)))
            token_ids += ids
    texts = [text for branch in branches for text in branch[1::2]]
    return DemonstratedTokens(token_ids, tuple(turns), tuple(firsts[1:]), (branches[0][0], *texts))
