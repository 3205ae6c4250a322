from pathlib import Path

from slipstream.wire.settings.places import line_of, with_place

TEXT = """\
# a run
[run]
name = "a"
steps = "ten"  # wrong

[algo.surrogate]
clip_low = 2.0
[data]
sources = { mine = { file = "x", weight = "y" } }
"with-dash" = 1
[learner]
adam.beta1 = 3
"""


def test_a_setting_has_a_line():
    for setting, line in [
        ("run.steps", 4),
        ("algo.surrogate.clip_low", 7),
        ("algo.surrogate", 6),
        ("data.sources.mine.weight", 9),
        ("data.with-dash", 10),
        ("learner.adam.beta1", 12),
        ("run.model", 0),
        ("eval.file", 0),
    ]:
        assert line_of(TEXT, setting) == line


def test_a_message_gets_the_place_of_the_setting_that_somebody_wrote(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text(TEXT)
    message = "run.group_size = 8 does not go with run.steps = ten"
    assert with_place(message, file) == f"{message} ({file}, line 4)"
    assert with_place(message, file, ["run.group_size=8"]) == f"{message} (on the command line)"
    assert with_place("run.model is missing", file) == "run.model is missing"
    assert with_place("no setting", None) == "no setting"


def test_a_file_that_cannot_be_read_gives_no_place(tmp_path: Path):
    assert with_place("run.steps is wrong", tmp_path / "gone.toml") == "run.steps is wrong"
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    assert with_place("run.steps is wrong", binary) == "run.steps is wrong"
