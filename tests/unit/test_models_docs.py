from pathlib import Path

from docs.generate.models import reference

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def test_the_page_of_model_families_is_that_of_the_code():
    assert PAGE.read_text() == reference(), "run `make docs`"
