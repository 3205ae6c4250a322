"""docs/algorithms.md and evidence.md: each name has evidence and a place, and the example works."""

import math
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
import torch

from docs.generate.evidence import (
    COLUMNS,
    GOLDEN,
    PAGE,
    PROPERTY,
    bounds,
    collected,
    figures,
    known,
    reads_golden_files,
    straddled,
    table,
    written,
)
from slipstream.algos.compose import Algorithm
from slipstream.algos.config import PARTS, choice_of
from slipstream.algos.packing import Packing
from slipstream.algos.parts import NEEDS
from slipstream.algos.presets import PRESETS
from slipstream.algos.section import AlgoSection
from slipstream.wire.files.source_files import module_named
from tests.unit.algos.microbatch import microbatch_loss

DOCS = PAGE.parent
TEXT = (DOCS / "algorithms.md").read_text("utf-8")
OWN_PART = re.search(r"^## Writing your own part\n.*?(?=^## )", TEXT, re.DOTALL | re.MULTILINE)


def block(language: str) -> str:
    """Return the one code block of that language under "Writing your own part"."""
    assert OWN_PART is not None
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", OWN_PART[0], re.DOTALL | re.MULTILINE)
    return str(found)


# ---- evidence ----


def test_table_of_the_page_is_generated_from_the_tests():
    assert written(PAGE.read_text("utf-8")) == table(collected()), (
        "run `python -m docs.generate.evidence --write` (never edit the table)"
    )


@pytest.mark.parametrize("name", known())
def test_every_name_is_compared_with_another_system_or_with_its_formula(name: str):
    against = {
        proof.against for test in collected() for proof in test.proofs if name in proof.names
    }
    assert against - {PROPERTY}, f"nothing proves the values of {name}"


def test_nothing_is_proved_of_what_does_not_exist():
    claimed = {name for test in collected() for proof in test.proofs for name in proof.names}
    assert claimed <= set(known())


def test_every_proof_is_of_a_column_and_names_something():
    proofs = [proof for test in collected() for proof in test.proofs]
    assert proofs
    assert {proof.against for proof in proofs} == set(COLUMNS)
    assert all(proof.names for proof in proofs)


def test_proof_against_another_system_reads_its_golden_files():
    for test in collected():
        if any(proof.against in GOLDEN for proof in test.proofs):
            assert reads_golden_files(test.function), test.place
    stated_anew = [test for test in collected() if test.place.startswith("test_papers.py")]
    assert not any(reads_golden_files(test.function) for test in stated_anew)


@pytest.mark.parametrize("bound", sorted({*bounds(), *straddled()}))
def test_every_bound_is_compared_on_both_sides(bound: str):
    flags = straddled().get(bound)
    assert flags is not None, f"no test states which of its data are beyond {bound}"
    assert 0 < sum(flags) < len(flags), f"{sum(flags)} of {len(flags)} are beyond {bound}"


# ---- what the page names ----


@pytest.mark.parametrize("name", [name for parts in PARTS.values() for name in parts])
def test_every_part_has_a_heading_of_its_own(name: str):
    assert re.search(rf"^### `{re.escape(name)}`", TEXT, re.MULTILINE)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_explained(preset: str):
    assert re.search(rf"^\| `{re.escape(preset)}` \|", TEXT, re.MULTILINE)


def test_every_example_of_settings_is_an_algorithm():
    for example in [
        found
        for found in re.findall(r"^```toml\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
        if "my_losses" not in found
    ]:
        section = msgspec.convert(tomllib.loads(example)["algo"], AlgoSection)
        assert choice_of(section).preset == section.preset


def test_needs_that_a_part_can_have_are_listed():
    assert all(f'"{need}"' in TEXT for need in NEEDS)


@pytest.mark.parametrize("page", ["algorithms.md", "coming_from_verl.md"])
def test_every_setting_that_a_page_names_exists(page: str):
    settings = set(re.findall(r"`(algo\.[a-z._-]+)`", (DOCS / "settings.md").read_text()))
    sections = {one.rpartition(".")[0] for one in settings}
    named = set(re.findall(r"`(algo\.[a-z_-]+(?:\.[a-z_-]+)*)", (DOCS / page).read_text()))
    assert named
    assert named <= settings | sections | {"algo"}


def test_every_figure_of_the_losses_is_defined():
    rows = re.findall(r"^\| (`[a-z]+/.*?) \|", TEXT, re.MULTILINE)
    assert set(figures()) <= set(re.findall(r"`([a-z_/]+)`", " ".join(rows)))


# ---- the example ----


@pytest.fixture
def my_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    (tmp_path / "my_losses.py").write_text(block("python"), "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield module_named("my_losses.py")
    sys.modules.pop("my_losses")


def test_the_example_of_a_part_is_short():
    assert len(block("python").splitlines()) < 35


@pytest.mark.usefixtures("my_losses")
def test_example_of_a_part_computes_its_stated_formula():
    section = msgspec.convert(tomllib.loads(block("toml"))["algo"], AlgoSection)
    chosen = Algorithm(choice_of(section, module_named), max_response_tokens=2)
    current = torch.tensor([-1.0, -2.0], requires_grad=True)
    anchor = torch.tensor([-1.5, -2.0])
    packing = Packing.of(torch.ones(2, dtype=torch.bool), torch.tensor([0, 2]))
    loss, _ = microbatch_loss(
        chosen,
        current=current,
        proximal=anchor,
        behavior=anchor,
        advantages=torch.tensor([2.0, 2.0]),
        entropy=torch.zeros(2),
        packing=packing,
        denominators=chosen.denominators(2.0, 1.0),
    )
    loss.backward()
    # strength 0.1, log r = 0.5 and 0
    first = -2.0 * math.exp(0.5) + 0.1 / 2 * 0.25
    assert loss.item() == pytest.approx((first - 2.0) / 2)
    assert current.grad is not None
    slope = -2.0 * math.exp(0.5) + 0.1 * 0.5
    assert current.grad.tolist() == pytest.approx([slope / 2, -1.0])


def test_the_tests_of_the_example_pass(my_losses: ModuleType):
    tests = [found for name, found in vars(my_losses).items() if name.startswith("test_")]
    assert tests
    for test in tests:
        test()
