"""Templates here behave as those of the field do, each in one respect."""

import re
from collections.abc import Sequence

import pytest

from slipstream.generators.text.chat_template import ChatTemplate
from slipstream.generators.turns.rendering import (
    Message,
    MessageRendering,
    TemplateNotAppendOnlyError,
)

END, STOP = 1_000_000, 1_000_001
SPECIAL = {"<|end|>": END, "<|stop|>": STOP}
PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
REASONING = (  # leaves reasoning out of replies before the newest question
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content.split('</think>')[-1] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
TOOLS = (  # several results are one turn
    "{% if tools %}<|system|>\n{{ tools | tojson }}<|end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.previtem is not defined or loop.previtem.role != 'tool' %}<|user|>{% endif %}"
    "<result>{{ m.content }}</result>"
    "{% if loop.last or loop.nextitem.role != 'tool' %}<|end|>\n{% endif %}"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
NUMBERED = "{% for m in messages %}{{ loop.index }}. {{ m.content }}\n{% endfor %}"
ONE_TURN = "{% if messages | length > 1 %}{{ raise_exception('one message only') }}{% endif %}x"
SILENT = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
NO_TOOLS = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ m.content }}<|end|>{% endfor %}"
)
SPACED = "{% for m in messages %}[{{ m.content }} <|end|>]{% endfor %}"


def encode(text: str) -> list[int]:
    parts = re.split(r"(<\|end\|>|<\|stop\|>)", text)
    return [
        one for part in parts for one in ([SPECIAL[part]] if part in SPECIAL else map(ord, part))
    ]


def token_text(token_id: int) -> str:
    if token_id < 0:  # an image
        return f"[{-token_id}]"
    return {number: text for text, number in SPECIAL.items()}.get(token_id) or chr(token_id)


def decode(token_ids: Sequence[int]) -> str:
    return "".join(map(token_text, token_ids))


def rendering(source: str) -> MessageRendering:
    return MessageRendering(
        ChatTemplate(source, {}, origin="test"), encode, token_text, {END, STOP}
    )


def message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def test_a_conversation_of_increments_is_what_the_template_writes():
    it = rendering(PLAIN)
    it.check()
    question, answer, more = message("user", "2+2?"), "4", message("user", "and 3+3?")
    reply = [*encode(answer), END]
    tokens = it.first([question]) + reply + it.following(reply, [more])
    whole = ChatTemplate(PLAIN, {}, origin="test")
    assert decode(tokens) == whole.text([question, message("assistant", answer), more])


def test_a_reply_that_was_cut_off_is_closed():
    assert decode(rendering(PLAIN).following(encode("and so"), [message("user", "well?")])) == (
        "<|end|>\n<|user|>\nwell?<|end|>\n<|assistant|>\n"
    )


def test_a_reply_that_another_token_ended_is_closed_besides():
    after = rendering(PLAIN).following([*encode("4"), STOP], [message("user", "well?")])
    assert decode(after).startswith("<|end|>\n<|user|>")


def test_a_reply_is_not_closed_twice_where_a_template_writes_a_space_before():
    after = rendering(SPACED).following([*encode("4"), END], [message("user", "well?")])
    assert decode(after) == "][well? <|end|>]"


def test_text_of_a_reply_that_looks_like_the_template_s_is_no_end():
    reply = encode("<|end>\n")
    assert decode(rendering(PLAIN).following(reply, [message("user", "?")])).startswith("<|end|>\n")


def test_what_a_template_does_to_earlier_replies_is_not_done():
    it = rendering(REASONING)
    it.check()
    reply = [*encode("<think>\nhm\n</think>\n\n4"), END]
    assert decode(it.following(reply, [message("user", "sure?")])) == (
        "\n<|user|>\nsure?<|end|>\n<|assistant|>\n"
    )


def test_results_of_several_tools_are_rendered_together():
    it = rendering(TOOLS)
    it.check(uses_tools=True)
    after = it.following([*encode("look, look"), END], [message("tool", "1"), message("tool", "2")])
    assert decode(after) == (
        "\n<|user|><result>1</result><result>2</result><|end|>\n<|assistant|>\n"
    )
    tools = [{"type": "function", "function": {"name": "look"}}]
    assert decode(it.first([message("user", "?")], tools)).startswith("<|system|>\n[{")


LATE_TOOLS = (
    "{% for m in messages %}{% if loop.last and tools %}{{ tools }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
)
LATE_SYSTEM = (
    "{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for m in messages if m.role != 'system' %}{% if loop.last %}{{ system }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
)


def test_templates_that_cannot_be_appended_to_are_refused():
    for source, uses_tools, why in [
        (NUMBERED, False, "depending on what was said before"),
        (ONE_TURN, False, "takes no conversation of several turns: one message only"),
        (SILENT, False, "it does not repeat a reply"),
        (LATE_TOOLS, True, "tools and system messages included"),
        (LATE_SYSTEM, False, "tools and system messages included"),
        (NO_TOOLS, True, "no conversation of several turns with tools: no tools"),
    ]:
        with pytest.raises(TemplateNotAppendOnlyError, match=why):
            rendering(source).check(uses_tools=uses_tools)


def test_a_template_without_tools_serves_environments_without():
    rendering(NO_TOOLS).check()


def test_a_template_that_tells_of_no_tools_is_named():
    assert rendering(TOOLS).why_no_tools() == ""
    assert rendering(PLAIN).why_no_tools() == (
        "the chat template test writes the same with tools and without"
    )
    refusing = "{% if tools %}{{ raise_exception('no tools') }}{% endif %}" + PLAIN
    assert rendering(refusing).why_no_tools() == "the chat template test refuses tools: no tools"
