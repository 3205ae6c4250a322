import json
from pathlib import Path

import pytest

from slipstream.weightbus.agent.weight_files import check_weight_files
from slipstream.wire.errors import EngineError


def safetensors(num_bytes: int, stated: int | None = None) -> bytes:
    entry = {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, stated or num_bytes]}
    header = json.dumps({"__metadata__": {"format": "pt"}, "a": entry}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(num_bytes)


def test_whole_files_pass_whatever_else_is_in_the_folder(tmp_path: Path):
    (tmp_path / "1.safetensors").write_bytes(safetensors(7))
    (tmp_path / "2.safetensors").write_bytes(safetensors(1))
    (tmp_path / "config.json").write_text("{")
    check_weight_files(tmp_path)


def test_cut_off_file_is_refused_by_name_and_size_among_whole_ones(tmp_path: Path):
    (tmp_path / "1.safetensors").write_bytes(safetensors(7))
    (tmp_path / "2.safetensors").write_bytes(safetensors(7, stated=9))
    with pytest.raises(EngineError, match=r"2\.safetensors \(\d+ bytes\) is no whole weight"):
        check_weight_files(tmp_path)


@pytest.mark.parametrize("change", [slice(0, -2), slice(0, 20)])
def test_file_that_lost_its_end_is_refused(tmp_path: Path, change: slice):
    (tmp_path / "model.safetensors").write_bytes(safetensors(7)[change])
    with pytest.raises(EngineError, match=r"model\.safetensors \(\d+ bytes\) is no whole weight"):
        check_weight_files(tmp_path)


def test_file_that_is_longer_than_its_header_describes_is_refused(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(safetensors(7) + b"more")
    with pytest.raises(EngineError, match="is no whole weight file"):
        check_weight_files(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x05" + b"\x00" * 7 + b"{oops"])
def test_what_has_no_header_is_no_whole_file(tmp_path: Path, content: bytes):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(EngineError, match=r"model\.safetensors"):
        check_weight_files(tmp_path)


def test_a_folder_without_files_or_that_is_none_is_refused(tmp_path: Path):
    for folder in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(EngineError, match="holds no safetensors file"):
            check_weight_files(folder)
