"""docs/results.md has the figures and pictures of what benchmarks recorded."""

from pathlib import Path

from benchmarks.learning_vs_trl import Point
from benchmarks.parts import Run
from benchmarks.recording import append
from benchmarks.vs_trl import OURS
from docs.generate.results import IMAGES, PAGE, PARTS, RECORDED, ROOT, page, shown


def test_the_page_is_up_to_date():
    texts, pictures = shown(RECORDED)
    text = PAGE.read_text("utf-8")
    assert page(text, texts) == text, "run `make docs`"
    kept = {file.name: file.read_text("utf-8") for file in IMAGES.glob("results-*.svg")}
    assert kept == pictures, "run `make docs`"


def test_the_readme_shows_the_picture_that_there_is():
    is_shown = "docs/images/results-learning.svg" in (ROOT / "README.md").read_text("utf-8")
    assert is_shown == (IMAGES / "results-learning.svg").exists()


def test_what_was_not_measured_is_named_with_its_command(tmp_path: Path):
    texts, pictures = shown(tmp_path)
    assert pictures == {}
    for name, part in PARTS.items():
        assert texts[name] == f"Not measured yet: `{part.command}`\n"
    append(tmp_path / "learning_smollm2.jsonl", Run(OURS, 0, None))
    assert shown(tmp_path) == (texts, pictures)  # begun, but there is nothing to show


def test_a_part_has_command_origin_table_picture_bars_and_what_is_not_there(tmp_path: Path):
    points = [Point(0, 0.0, 0.0, 0.25), Point(5, 60.0, 90.0, 0.5)]
    append(tmp_path / "learning_smollm2.jsonl", Run(OURS, 0, points))
    texts, pictures = shown(tmp_path)
    assert set(pictures) == {"results-learning.svg", "results-learning-against-trl.svg"}
    head, table, image, notes = texts["learning"].split("\n\n")
    assert head.startswith(f"`{PARTS['learning'].command}`: ")
    assert "cores of" in head
    assert table.splitlines()[2].startswith("| slipstream | 0 | 0.250 | 0.500 | 48 | 72 | 60 | 90")
    assert image.endswith("(images/results-learning.svg)")
    assert "bar lowest_gain: 0.250 of 1 seeds (needs >= 0.2): ok" in notes
    assert "not there: slipstream: 1, 2" in notes
    assert "not there: slipstream-lr0: 0" in notes
