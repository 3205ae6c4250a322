"""Lines of results say what made them."""

from pathlib import Path

import pytest

from benchmarks.recording import Line, append, lines_of, origin_here, origins


class Figure(Line, frozen=True):
    """A line of a file of results."""

    value: float


def test_a_line_says_where_when_and_with_what_it_was_made(tmp_path: Path):
    file = tmp_path / "folder" / "figures.jsonl"
    assert lines_of(file, Figure) == []
    assert origins([Figure(1.0)]) == ""
    for value in (1.0, 2.0):
        append(file, Figure(value))
    lines = lines_of(file, Figure)
    assert [line.value for line in lines] == [1.0, 2.0]
    made = lines[0].origin
    assert made is not None
    assert "cores of" in made.machine
    assert "CPython" in made.versions
    assert made.commit.startswith("commit ")
    assert origins(lines) == f"{made.machine}; {made.date}; {made.commit}; {made.versions}"


@pytest.mark.parametrize("damage", [b'{"origin": nu', b'{"origin": null}', b'{"value": null}', b""])
def test_a_line_that_cannot_be_read_is_named(tmp_path: Path, damage: bytes):
    file = tmp_path / "figures.jsonl"
    file.touch()
    assert lines_of(file, Figure) == []
    file.write_bytes(b'{"value": 1.0}\n' + damage + b"\n")
    with pytest.raises(ValueError, match=r"figures.jsonl, line 2 cannot be read: "):
        lines_of(file, Figure)


def test_a_package_in_a_further_folder_is_named(tmp_path: Path):
    (tmp_path / "trl-9.8.7.dist-info").mkdir()
    text = "Metadata-Version: 2.1\nName: trl\nVersion: 9.8.7\n"
    (tmp_path / "trl-9.8.7.dist-info" / "METADATA").write_text(text)
    assert "trl 9.8.7" in origin_here(str(tmp_path)).versions
