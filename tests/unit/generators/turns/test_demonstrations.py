"""Masks of demonstrations, written out: what is trained stands in brackets."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from slipstream.generators.text.codec import TextCodec
from slipstream.generators.turns.demonstrations import (
    DemonstratedTokens,
    conversation_tokens,
    text_tokens,
)
from slipstream.wire.settings.sections import SamplingSection
from tests.support.chat_model import CHATML, write_chat_model

MARKED = (  # by marks of generation; trims, and ends a conversation with a mark of its own
    "{% for m in messages %}{% if m.role == 'assistant' %}A: {% generation %}"
    "{{ m.content | trim }}<|im_end|>{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ m.role }}: {{ m.content | trim }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A: {% else %}<pad>{% endif %}"
)
REASONING = (  # leaves reasoning out of replies before the newest question, as Qwen3's does
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}{% if tools %}{{ tools | length }} tools\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: "
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}"
    "({{ m.reasoning_content or think }}){% endif %}"
    "{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }} {{ call.function.arguments.at }}"
    "{% endfor %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
OPENING = (  # opens a thought that it takes out of replies
    "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<think>{% endif %}"
)
OPEN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def codec(folder: Path, template: str = CHATML) -> TextCodec:
    return TextCodec(write_chat_model(folder / "model", template), SamplingSection())


def shown(codec: TextCodec, tokens: DemonstratedTokens) -> list[str]:
    """Return the text of each branch, with brackets around what is trained."""
    marks = {turn.first_token: "[" for turn in tokens.turns}
    closed = {turn.end: "]" for turn in tokens.turns}
    texts = [
        closed.get(i, "") + marks.get(i, "") + codec.token_text(token_id)
        for i, token_id in enumerate(tokens.token_ids)
    ]
    bounds = [*tokens.branches, len(texts)]
    return [
        "".join(texts[first:end]).removeprefix("]") + closed.get(end, "")
        for first, end in zip([0, *bounds], bounds, strict=False)
    ]


def said(*turns: str) -> list[dict[str, str]]:
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": names[turn[0]], "content": turn[2:]} for turn in turns]


@pytest.mark.parametrize(
    ("template", "turns", "num_given", "branches"),
    [
        (
            CHATML,
            ("s-be brief", "u-1+1?", "a-2"),
            0,
            [
                "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n"
                "<|im_start|>assistant\n[2<|im_end|>]"
            ],
        ),
        (
            CHATML,
            ("u-1?", "a-1", "u-2?", "a-2", "u-thanks"),
            0,
            [
                "<|im_start|>user\n1?<|im_end|>\n<|im_start|>assistant\n[1<|im_end|>]\n"
                "<|im_start|>user\n2?<|im_end|>\n<|im_start|>assistant\n[2<|im_end|>]"
            ],
        ),
        (
            CHATML,
            ("u-1?", "a-1", "u-2?", "a-2", "a-3"),
            3,
            [
                "<|im_start|>user\n1?<|im_end|>\n<|im_start|>assistant\n1<|im_end|>\n"
                "<|im_start|>user\n2?<|im_end|>\n<|im_start|>assistant\n[2<|im_end|>]\n"
                "<|im_start|>assistant\n[3<|im_end|>]"
            ],
        ),
        (
            MARKED,
            ("u- 1? ", "a-1 ", "u-2?", "a-\n2"),
            0,
            ["user: 1?\nA: [1<|im_end|>]\nuser: 2?\nA: [2<|im_end|>]"],
        ),
        (
            REASONING,
            ("u-1?", "a-1", "t-x", "a-2", "u-3?", "a-4"),
            0,
            [
                "user: 1?<|im_end|>assistant: [()1<|im_end|>]tool: x<|im_end|>"
                "assistant: [()2<|im_end|>]",
                "user: 1?<|im_end|>assistant: 1<|im_end|>tool: x<|im_end|>assistant: 2<|im_end|>"
                "user: 3?<|im_end|>assistant: [()4<|im_end|>]",
            ],
        ),
    ],
)
def test_policys_own_turns_are_trained_with_the_mark_that_ends_them(
    tmp_path: Path, template: str, turns: Sequence[str], num_given: int, branches: list[str]
):
    text = codec(tmp_path, template)
    tokens = conversation_tokens(text, said(*turns), num_given=num_given)
    assert shown(text, tokens) == branches


def test_tools_calls_reasoning_and_variables_reach_the_template(tmp_path: Path):
    text = codec(tmp_path, REASONING)
    call = {"id": "1", "function": {"name": "look", "arguments": '{"at": "home"}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "where?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "content": "there"},
        {"role": "assistant", "content": "there"},
    ]
    tokens = conversation_tokens(text, messages, [{"name": "look"}], variables={"think": "!"})
    assert shown(text, tokens) == [
        "1 tools\nuser: where?<|im_end|>assistant: [(hm)look home<|im_end|>]tool: there<|im_end|>"
        "assistant: [(!)there<|im_end|>]"
    ]
    assert tokens.texts[1:] == ("(hm)look home<|im_end|>", "(!)there<|im_end|>")


@pytest.mark.parametrize(
    ("template", "turns", "why"),
    [
        (CHATML, ("u-1?", "a-"), "turn 1 is the policy's own, and empty"),
        (CHATML, ("u-1?", "a-2<|im_end|>3"), r"turn 1 holds '<\|im_end\|>', which ends a response"),
        (OPENING, ("u-1?", "a-2"), "prompts for turn 1 with '<think>', and writes '2<"),
        (
            OPEN,
            ("u-1?", "a-2"),
            r"closes turn 1 with 'assistant: 2\\n', where no token ends .*<\|im_end\|>",
        ),
        (
            "{{ raise_exception('no') }}",
            ("u-1?", "a-2"),
            r"^the chat template refuses turn 1, or those before it: no \(sampling",
        ),
    ],
)
def test_what_cannot_be_told_apart_is_refused(
    tmp_path: Path, template: str, turns: Sequence[str], why: str
):
    with pytest.raises(ValueError, match=why):
        conversation_tokens(codec(tmp_path, template), said(*turns))


def test_variables_of_a_row_do_not_move_what_is_trained(tmp_path: Path):
    text = codec(tmp_path)
    variables = {"add_generation_prompt": False, "messages": [], "tools": [{}]}
    turns = said("u-1?", "a-2")
    expected = conversation_tokens(text, turns)
    assert conversation_tokens(text, turns, variables=variables) == expected


@pytest.mark.parametrize(
    ("template", "field", "value", "found"),
    [
        (REASONING.replace("reasoning_content", "thinking"), "thinking", "hm", "[(hm)2<|im_end|>]"),
        (REASONING, "reasoning_content", " hm\n", "[( hm\n)2<|im_end|>]"),
        (REASONING, "thinking", "hm", "leaves thinking out of turn 1"),
        (CHATML, "reasoning_content", "hm", "leaves reasoning_content out of turn 1"),
        (CHATML, "tool_calls", [{"function": {"name": "look"}}], "leaves tool_calls out of turn 1"),
        (CHATML, "tool_calls", [], "[2<|im_end|>]"),
        (CHATML, "thinking", None, "[2<|im_end|>]"),
    ],
)
def test_a_thought_or_call_is_in_the_turn_or_refused(
    tmp_path: Path, template: str, field: str, value: object, found: str
):
    text = codec(tmp_path, template)
    asked, reply = said("u-1?", "a-2")
    try:
        tokens = conversation_tokens(text, [asked, {**reply, field: value}])  # type: ignore[dict-item]  # as files have it
        told = shown(text, tokens)[0]
    except ValueError as error:
        told = str(error)
    assert found in told


def test_a_text_that_begins_as_the_tokenizer_begins_it_does_not_begin_twice(tmp_path: Path):
    folder = write_chat_model(tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        "<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    text = TextCodec(folder, SamplingSection())
    for prompt in ("1+1=", "<|im_start|>1+1="):
        tokens = text_tokens(text, prompt, "2")
        assert shown(text, tokens) == ["<|im_start|>1+1=[2<|im_end|>]"]
        assert text_tokens(text, "", f"{prompt}2").token_ids == tokens.token_ids


def test_a_text_ends_with_one_token_that_ends_a_response(tmp_path: Path):
    text = codec(tmp_path)
    assert shown(text, text_tokens(text, "1+1=", "2")) == ["1+1=[2<|im_end|>]"]
    assert shown(text, text_tokens(text, "1+1=", "2<|im_end|>")) == ["1+1=[2<|im_end|>]"]
    assert shown(text, text_tokens(text, "", "some text")) == ["s[ome text<|im_end|>]"]


def test_a_token_that_spans_prompt_and_reply_is_cut_there(tmp_path: Path):
    folder = write_chat_model(tmp_path / "model")
    vocabulary = {"<pad>": 0, "<|im_end|>": 1, "a": 2, "b": 3, "ab": 4, "c": 5}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<pad>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    text = TextCodec(folder, SamplingSection())
    assert text_tokens(text, "ca", "b").token_ids == [5, 2, 3, 1]
    assert text_tokens(text, "c", "ab").token_ids == [5, 4, 1]
    assert text.ids_of_pieces(["c", "ab", "<|im_end|>", "ab"]) == [[5], [4], [1], [4]]
    assert text.ids_of_pieces(["ca", "b<|im_end|>"]) == [[5, 2], [3, 1]]
