"""docs/settings.md and the structs name the same settings with the same defaults."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from algos.config import AlgoSection
from broker.config import BrokerSection, DataSection, RewardSection
from deploy.config import DeploySection
from generators.config import GeneratorsSection
from learner.config import LearnerSection
from weightbus.config import WeightBusSection
from wire.run_settings import EvalSection, RunSection, SamplingSection
from wire.settings import SECTIONS

DOCUMENT = Path(__file__).parents[2] / "docs" / "settings.md"
STRUCTS: dict[str, type[msgspec.Struct]] = {
    "run": RunSection,
    "data": DataSection,
    "sampling": SamplingSection,
    "broker": BrokerSection,
    "generators": GeneratorsSection,
    "reward": RewardSection,
    "learner": LearnerSection,
    "algo": AlgoSection,
    "weightbus": WeightBusSection,
    "eval": EvalSection,
    "deploy": DeploySection,
}
ROW = re.compile(r"^\| *`([a-z_0-9.]+)` *\| *([^|]*?) *\|", re.MULTILINE)


def settings_of(struct: msgspec.Struct, where: str) -> Iterator[tuple[str, object]]:
    for field in msgspec.structs.fields(struct):
        name, value = f"{where}.{field.encode_name}", getattr(struct, field.name)
        if isinstance(value, msgspec.Struct):
            yield from settings_of(value, name)
        else:
            yield name, value


DEFAULTS = {
    name: default
    for section, kind in STRUCTS.items()
    for name, default in settings_of(kind(), section)
}


def documented() -> dict[str, str]:
    return dict(ROW.findall(DOCUMENT.read_text("utf-8")))


def test_every_section_that_a_file_may_have_is_compared_here():
    assert set(STRUCTS) == set(SECTIONS)


def test_the_document_names_exactly_the_settings_there_are():
    assert sorted(documented()) == sorted(DEFAULTS)


def test_no_setting_is_described_twice():
    names = [name for name, _ in ROW.findall(DOCUMENT.read_text("utf-8"))]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", sorted(DEFAULTS))
def test_the_documented_default_is_the_default(name: str):
    default = DEFAULTS[name]
    cell = documented()[name]
    if default is None:
        assert cell == "not set"
        return
    _, text, _ = cell.split("`")  # the value, then perhaps how it comes about
    assert tomllib.loads(f"value = {text}")["value"] == default
