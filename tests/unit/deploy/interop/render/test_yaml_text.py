"""What is written as YAML is read back as it was."""

import yaml
from hypothesis import given
from hypothesis import strategies as st

from slipstream.deploy.interop.render.yaml_text import documents

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(
    [
        "yes",
        "Null",
        "1e3",
        "0x10",
        "a: b",
        "- x",
        "# no",
        "",
        "line\n",
        "a\n\n b\n",
        "$x 'q' \"d\"\n",
    ]
)
VALUES = st.recursive(
    TEXTS | st.integers(-(2**40), 2**40) | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


@given(VALUES)
def test_any_value_is_read_back(value: object):
    assert yaml.safe_load(documents(value)) == value  # type: ignore[arg-type]


def test_scripts_are_readable_and_documents_apart():
    text = documents({"run": "set -u\n\n  echo 'a'\n", "n": 1}, {"b": []}, head="By hand\n\nno")
    assert text == ("# By hand\n#\n# no\nrun: |\n  set -u\n\n    echo 'a'\n\"n\": 1\n---\nb: []\n")
    assert [*yaml.safe_load_all(text)] == [{"run": "set -u\n\n  echo 'a'\n", "n": 1}, {"b": []}]
