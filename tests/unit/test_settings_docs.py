"""docs/settings.md is what the structs define, and every setting is explained."""

from pathlib import Path

import msgspec
import pytest

from docs.generate.settings import SECTION_STRUCTS, reference, rows
from slipstream.algos.config import PARTS
from slipstream.wire.settings.load import SECTIONS

DOCUMENT = Path(__file__).parents[2] / "docs" / "settings.md"
ROWS = [row for name, (struct, _) in SECTION_STRUCTS.items() for row in rows(struct, name)]


def test_every_section_that_a_file_may_have_is_in_the_reference():
    assert set(SECTION_STRUCTS) == set(SECTIONS)


def test_settings_document_is_up_to_date():
    assert DOCUMENT.read_text("utf-8") == reference(), "run `make docs`"


@pytest.mark.parametrize(("setting", "meaning"), [(row[0], row[2]) for row in ROWS])
def test_every_setting_is_explained(setting: str, meaning: str):
    text, _, kind = meaning.rpartition(" Type: ")
    assert text.rstrip().endswith((".", ")")), f"{setting} has no sentence under it"
    assert kind


@pytest.mark.parametrize(
    "struct",
    [
        *(struct for struct, _ in SECTION_STRUCTS.values()),
        *(part.options for of_kind in PARTS.values() for part in of_kind.values()),
    ],
    ids=lambda struct: struct.__name__,
)
def test_every_default_is_within_its_own_limits(struct: type[msgspec.Struct]):
    """The constructor does not check them: only values from a file are checked."""
    for field in msgspec.structs.fields(struct):
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        elif field.default is not msgspec.NODEFAULT:
            default = field.default
        else:
            continue
        stated = msgspec.to_builtins(default)
        assert msgspec.convert(stated, field.type) == default, field.name


def test_defaults_limits_and_choices_are_shown():
    page = reference()
    assert "| `run.steps` | `100` | Learner steps to train. Type: integer, at least 1. |" in page
    assert '| `broker.redis.url` | `""` |' in page
    assert "Type: one of `async`, `sync`." in page
    assert "| `eval.sets.NAME.reasoning_gym` |" in page
