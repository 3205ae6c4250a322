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


def test_what_is_no_whole_file_is_refused_by_name_and_size_among_whole_ones(tmp_path: Path):
    for content in [
        safetensors(7, stated=9),
        safetensors(7)[:-2],
        safetensors(7)[:20],
        safetensors(7) + b"more",
        b"",
        b"\xff" * 8,
        b"\x05" + b"\x00" * 7 + b"{oops",
    ]:
        (tmp_path / "1.safetensors").write_bytes(safetensors(7))
        (tmp_path / "2.safetensors").write_bytes(content)
        why = rf"2\.safetensors(:| \({len(content)} bytes\) is no whole weight file)"
        with pytest.raises(EngineError, match=why):
            check_weight_files(tmp_path)


def test_a_folder_without_files_or_that_is_none_is_refused(tmp_path: Path):
    for folder in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(EngineError, match="holds no safetensors file"):
            check_weight_files(folder)
