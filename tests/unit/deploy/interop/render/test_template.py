"""Whatever fills a hole is read back as it was, and changes nothing around it."""

import re
from importlib.resources import files

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from slipstream.deploy.interop.render.template import FilledText, filled

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(
    [
        "yes",
        "Null",
        "1e3",
        "0x10",
        "a: b",
        "- x",
        "# no",
        "{{ other }}",
        "}, x: {y: [",
        "---\n",
        "",
        "line\n",
        "a\n\n b\n   \n",
        "$x 'q' \"d\"\n",
        "\x7f\x85\u2028\ufffe\U0001f600",
    ]
)
VALUES = st.recursive(
    TEXTS | st.integers(-(2**40), 2**40) | st.booleans(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)
PLAIN_WORD = re.compile(r"[A-Za-z0-9._/-]+")
PLACES = """\
top: {{ value }}
inner:
  - key: {{ value }}
    next: [{{ value }}, {flow: {{ value }}}]
  - {{ value }}
  - a: {b: {{ value }}, c: 1} # a comment
last: end
"""
TEMPLATES = files("slipstream.deploy.interop.render") / "templates"


@given(VALUES)
def test_any_value_is_read_back_from_every_place(value: object):
    text = filled(PLACES, {"value": value})  # type: ignore[dict-item]
    assert yaml.safe_load(text) == {
        "top": value,
        "inner": [
            {"key": value, "next": [value, {"flow": value}]},
            value,
            {"a": {"b": value, "c": 1}},
        ],
        "last": "end",
    }


@given(TEXTS | st.from_regex(PLAIN_WORD, fullmatch=True))
def test_a_value_within_text_is_a_plain_word_or_refused(value: str):
    template = "a: run-{{ value }}-x\nb: tcp://{{ value }}:5\nc: '({{ value }})'\n"
    if PLAIN_WORD.fullmatch(value):
        expected = {"a": f"run-{value}-x", "b": f"tcp://{value}:5", "c": f"({value})"}
        assert yaml.safe_load(filled(template, {"value": value})) == expected
    else:
        with pytest.raises(ValueError, match="within text only letters"):
            filled(template, {"value": value})


@pytest.mark.parametrize("values", [{}, {"a": 1}, {"a": 1, "b": 2, "c": 3}])
def test_holes_and_values_have_the_same_names(values: dict[str, int]):
    with pytest.raises(ValueError, match=r"without a value, or values without a hole: \['[bac]'"):
        filled("x: {{ a }}\ny: {{ b }}\n", values)


def test_lines_for_nothing_are_left_out_and_texts_indented():
    template = (
        "run:\n- {{ script }}\n{{ more }}\nn: {a: {{ n }}}\n  {{ text }}\nitems: {{ none }}\n"
    )
    inner = FilledText("x:\n\n  y: 1\n")
    values = {"script": "set -u\n\n  echo 'a'\n", "more": ["b", 2], "n": None, "text": inner}
    assert filled(template, {**values, "none": []}) == (
        "run:\n- |\n  set -u\n\n    echo 'a'\n- \"b\"\n- 2\n  x:\n\n    y: 1\nitems: []\n"
    )


def test_every_brace_of_a_template_begins_a_hole_that_is_understood():
    folders = (TEMPLATES, TEMPLATES / "kubernetes")
    texts = [path.read_text() for folder in folders for path in folder.iterdir() if path.is_file()]
    assert len(texts) > 20
    for text in texts:
        holes = [part.partition("}}")[0] for part in text.split("{{")[1:]]
        assert all(hole == f" {hole.strip()} " and hole.strip().isidentifier() for hole in holes)
