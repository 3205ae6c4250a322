"""The page explains every rule with the words of the diagnosis guide."""

import json
from importlib.resources import files

import pytest

from docs.generate.guide_sections import reference, sections
from slipstream.broker.advisories.advise import RULES


def test_texts_of_the_page_are_those_of_the_guide():
    shipped = (files("slipstream.broker.dashboard") / "page" / "why.json").read_text("utf-8")
    assert shipped == reference(), "run `make docs`"
    assert set(json.loads(shipped)) == set(RULES)
    for section in json.loads(shipped).values():
        paragraphs = section["text"].split("\n\n")
        beginnings = [paragraph.split(":")[0] for paragraph in paragraphs]
        assert beginnings == ["You see", "Why", "Change", "It costs"]
        assert not set("*`[") & set(section["text"])


def test_a_rule_without_a_section_is_named():
    guide = "".join(f"## {rule.replace('-', ' ')}\n\ntext\n\n" for rule in list(RULES)[1:])
    with pytest.raises(KeyError, match=next(iter(RULES))):
        sections(guide)
