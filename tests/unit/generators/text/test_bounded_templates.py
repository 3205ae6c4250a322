import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from slipstream.generators.text.chat_template import ChatTemplate
from slipstream.wire.messages.trajectory import ChatMessage

TURNS = [ChatMessage(role="user", content="6 1"), ChatMessage(role="assistant", content="4")]
NESTED = "{% for i in range(9999) %}" * 9 + "{% endfor %}" * 9
LEAVES_OUT = "{% for i in range(9999) if false %}x{% endfor %}"
DOUBLING = (
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
)
DOUBLING_BLOCK = "{% set x %}ab{% endset %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 40
MACRO = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
TREE = "{% for i in [[[1], [2]], [3]] recursive %}{{ loop([i, i]) }}{% endfor %}"


def test_a_template_that_would_not_end_is_refused():
    for source, why in [
        (NESTED, "take more than 100,000 steps"),
        ("{% for a in messages[0].content * 9999 %}" + LEAVES_OUT + "{% endfor %}", "steps"),
        ("{% for a in messages[0].content * 40000 %}{% endfor %}", "take more than 100,000 steps"),
        ("{% for a in range(100001) %}{% endfor %}", "take more than 100,000 steps"),
        ("{{ range(99999999) | list | length }}", "steps"),
        (MACRO, "take more than 100,000 steps"),
        (TREE, "recursion"),
        (DOUBLING, "a variable holds more than 16,777,216 characters"),
        (DOUBLING_BLOCK, "a variable holds more than 16,777,216 characters"),
        ("{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}", "writes more than 16,777,216"),
        ("{{ 'x' * 10 ** 12 }}", r"the result of \* is too long"),
        ("{{ 9 ** 9999 }}", r"the result of \*\* is too long"),
        ("{{ [0] * 99999999 }}", r"the result of \* is too long"),
        ("{{ lipsum(n=200000) | length }}", "undefined"),
        ("{{ '%300000000d' % 1 }}", "a format asks"),
        ("{{ '%*d' % (300000000, 1) }}", "a format asks"),
        ("{{ '{:300000000}'.format(1) }}", "a format asks"),
        ("{{ '%300000000d' | format(1) }}", "a format asks"),
        ("{{ 1 | round(10000000, 'ceil') }}", "has an argument above 100,000"),
        ("{{ 'x' | center(300000000) | length }}", "has an argument above 100,000"),
        ("{{ 'x'.zfill(300000000) | length }}", "has an argument above 100,000"),
        ("{{ 'x'.ljust(width=300000000) | length }}", "has an argument above 100,000|keyword"),
        ("{{ [1] | batch(30000000, 0) | list | length }}", "has an argument above 100,000"),
    ]:
        with pytest.raises(ValueError, match=why):
            ChatTemplate(source, {}, origin="t").render(TURNS)


def test_bounded_template_renders_like_jinja():
    for source in [
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ m.content }}"
        "{% if loop.last %}.{% endif %}{% else %}none{% endfor %}",
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{{ loop.last }}{% endfor %}",
        "{% for m in [] %}{% else %}none{% endfor %}{{ range(3) | list }}{{ 2 ** 10 * 'a' }}",
        "{% macro f(m, end='!') %}{{ m.content }}{{ end }}{{ caller() }}{% endmacro %}"
        "{% for m in messages %}{% call f(m, end='?') %}{{ m.role }}{% endcall %}{% endfor %}",
        "{% set x %}a{{ messages[0].content }}{% endset %}{% set y | upper %}b{% endset %}"
        "{{ x }}{{ y }}",
        "{% set n = namespace(i=0) %}{% for m in messages %}{% set n.i = n.i + 1 %}{% endfor %}"
        "{{ n.i }}{% set a, b = [1, 2] %}{{ a }}{{ b }}",
        "{% for i in [1, [2, [3]]] recursive %}{% if i is sequence %}{{ loop(i) }}"
        "{% else %}{{ i }}{{ loop.depth }}{% endif %}{% endfor %}",
    ]:
        plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        messages = [{"role": turn.role, "content": turn.content} for turn in TURNS]
        expected = plain.from_string(source).render(messages=messages)
        assert ChatTemplate(source, {}, origin="t").render(TURNS) == expected


def test_a_format_reads_no_attribute_that_a_template_may_not():
    for source in ("{{ '{0.__class__}'.format(1) }}", "{{ '{x.__class__}'.format_map({'x': 1}) }}"):
        assert ChatTemplate(source, {}, origin="t").render(TURNS) == ""
    with pytest.raises(
        ValueError, match="access to attribute '__class__' of 'int' object is unsafe"
    ):
        ChatTemplate("{{ '{0.__class__.__mro__}'.format(1) }}", {}, origin="t").render(TURNS)


def test_every_rendering_has_all_steps_for_itself():
    template = ChatTemplate("{% for i in range(40000) %}{% endfor %}a", {}, origin="t")
    assert [template.render(TURNS) for _ in range(4)] == ["a"] * 4


def test_a_long_conversation_is_no_endless_one():
    turns = [ChatMessage(role="user", content="x" * 100)] * 10_000
    source = "{% for m in messages %}{{ m.content }}{% endfor %}" * 3
    assert len(ChatTemplate(source, {}, origin="t").render(turns)) == 3_000_000
