"""docs/parallelism.md has the planned memory of the layouts that it recommends, and they fit."""

from pathlib import Path

import pytest

from benchmarks.layouts import MODELS, ROWS, Row, markdown, planned_gib

DOCS = Path(__file__).parents[2] / "docs"
# Of the 80 GiB of the smallest GPU that the document names a tenth is for what is not planned.
MOST_GIB = 72.0
PARAMETERS = {  # billions, as in the models' names or cards
    "Qwen3-1.7B": 1.72,
    "Qwen3-8B": 8.19,
    "Qwen3-32B": 32.76,
    "Qwen2.5-72B": 72.71,
    "Qwen3-30B-A3B": 30.53,
    "Qwen3-235B-A22B": 235.09,
}


def test_the_document_has_the_program_s_table():
    assert markdown() in (DOCS / "parallelism.md").read_text("utf-8")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.model}-{row.gpus}")
def test_a_recommended_layout_fits(row: Row):
    assert planned_gib(row)["in all"] <= MOST_GIB


def test_models_have_as_many_parameters_as_their_cards_say():
    found = {name: round(hf.num_parameters / 1e9, 2) for name, hf in MODELS.items()}
    assert found == PARAMETERS
