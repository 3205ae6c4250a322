"""docs/coming_from_verl.md: its tables are what `slipstream import-verl` applies."""

import re

import pytest

from docs.generate.page_parts import begin, generated
from docs.generate.settings import SECTION_STRUCTS
from docs.generate.verl import PAGE, PARTS
from slipstream.deploy.interop.verl.hydra import overrides_of
from slipstream.deploy.interop.verl.table import TOPICS
from slipstream.deploy.interop.verl.translate import translate

TEXT = PAGE.read_text("utf-8")


def test_the_page_is_up_to_date():
    assert generated(TEXT, PARTS) == TEXT, "run `make docs`"


def test_a_page_without_a_place_is_refused():
    with pytest.raises(ValueError, match="no place for keys"):
        generated(TEXT.replace(begin("keys"), ""), PARTS)


def test_every_row_is_on_the_page():
    tables = PARTS["keys"]()
    assert sum(line.startswith("| `") for line in tables.splitlines()) == sum(
        len(topic.rows) for topic in TOPICS
    )


def test_there_are_seven_traps_and_each_is_translated_as_it_says():
    section = TEXT.partition("## Seven traps")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    assert len(rows) == 7
    for row in rows:
        verl, _, right = row.strip("| ").split(" | ")
        given = re.findall(r"`([a-z_.]+=[^`]+)`", verl)
        assert given
        found = translate(overrides_of([_whole(key) for key in given]))
        assert not [one for one in found.failed if not one.is_default]
        sections = "|".join(SECTION_STRUCTS)
        for setting in re.findall(rf"`((?:{sections})\.[a-z_.]+)", right):
            if setting != "deploy.hosts":
                assert _has(found.table, setting), f"{given}: {setting}"


def _whole(key: str) -> str:
    """Return a key as a command has it, from the end of it that the page names."""
    name = key.partition("=")[0]
    known = [one for topic in TOPICS for row in topic.rows for one in row.verl]
    order = ("trainer.", "actor_rollout_ref.rollout.", "data.", "algorithm.", "actor_rollout_ref.")
    for prefix in order:
        if f"{prefix}{name}" in known:
            return f"{prefix}{key}"
    raise AssertionError(f"{name} is in no row")


def _has(table: object, setting: str) -> bool:
    for name in setting.split("."):
        if not isinstance(table, dict) or name not in table:
            return False
        table = table[name]
    return True
