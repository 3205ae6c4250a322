"""Published recipes, predicted by the same laws as everything else."""

from pathlib import Path

import msgspec
import pytest

from benchmarks.scale.recipes import GB, fewest_gpus, fitted_share, memory_of, recipes, training_of
from slipstream.wire.errors import ConfigError
from tests.support.planned import shape_of

GIVEN = recipes()
RECIPES = {recipe.model: recipe for recipe in GIVEN.recipes}


@pytest.mark.parametrize("name", RECIPES)
def test_the_fewest_gpus_are_the_published_ones(name: str):
    assert fewest_gpus(RECIPES[name], GIVEN) == RECIPES[name].published_gpus


def test_memory_of_671b_on_96_gpus_is_within_10_percent_of_what_is_published():
    recipe = RECIPES["DeepSeek-V3"]
    memory = memory_of(recipe, GIVEN)
    assert memory.gpu / GB == pytest.approx(66, rel=0.1)
    assert memory.median_host / GB == pytest.approx(1500, rel=0.1)
    assert memory.largest_host / GB == pytest.approx(1600, rel=0.1)


def test_parts_of_it_by_hand():
    recipe, hf = RECIPES["Qwen3-30B-A3B"], shape_of("Qwen3-30B-A3B")
    memory = memory_of(recipe, GIVEN)
    engine = 2 * hf.num_parameters / 4
    assert memory.generating == 0.7 * 96 * 2**30
    (host,) = memory.hosts
    # Eight ranks hold all experts once and the rest eight times; its optimizer is divided.
    dense = hf.num_parameters - 48 * 128 * 3 * 2048 * 768
    weights = hf.num_parameters + 7 * dense
    assert host == pytest.approx(16 * hf.num_parameters + 2 * weights + 8 * engine, rel=1e-6)
    assert memory.resharding == pytest.approx(2 * weights / 8 + engine)


def test_hosts_of_less_memory_need_more_gpus():
    recipe = RECIPES["Qwen3-30B-A3B"]
    small = msgspec.structs.replace(GIVEN, host_memory_gb=500.0)
    assert fewest_gpus(recipe, small) == 16
    with pytest.raises(ConfigError, match="no layout of Qwen3-30B-A3B fits on 16 GPUs of H20"):
        fewest_gpus(recipe, msgspec.structs.replace(GIVEN, host_memory_gb=50.0))


def test_the_page_has_what_is_predicted():
    page = (Path(__file__).parents[4] / "docs" / "scale.md").read_text()
    for recipe in GIVEN.recipes:
        memory = memory_of(recipe, GIVEN)
        turns = (memory.training, memory.resharding, memory.generating)
        for text in (
            f"| {memory.gpu / GB:.1f}",
            ", ".join(f"{one / GB:.1f}" for one in turns),
            f"| {memory.median_host / GB:,.0f}",
            f"| {memory.largest_host / GB:,.0f}",
        ):
            assert text in page, (recipe.model, text)


def test_published_layouts_for_more_gpus_fit_and_their_shares_of_the_peak_are_on_the_page():
    page = (Path(__file__).parents[4] / "docs" / "scale.md").read_text()
    first = GIVEN.layouts[0]
    share = fitted_share(first, GIVEN)
    assert training_of(first, GIVEN, share=share).mfu == pytest.approx(first.published_mfu, 0.01)
    for layout in GIVEN.layouts:
        found = training_of(layout, GIVEN, share=share)
        assert found.gpu < 96 * 2**30
        row = f"| {layout.model} | {layout.gpus} | {layout.tensor}, {layout.pipeline}, "
        figures = f"| {found.gpu / GB:.1f} | {found.seconds:,.0f} | {found.mfu:.2f} |"
        (line,) = (line for line in page.splitlines() if line.startswith(row))
        assert figures in line
        if layout.published_mfu is not None and layout is not first:
            assert line.endswith(f" {found.mfu / layout.published_mfu - 1:+.0%} |")
