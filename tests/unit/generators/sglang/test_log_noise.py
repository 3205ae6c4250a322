"""Known warnings are counted instead of shown; all others, and those not counted, are shown."""

from collections import Counter
from pathlib import Path

import pytest

from slipstream.generators.sglang.log_noise import KNOWN, counted, counting, known_name, told


def shown(counts: Path, text: str, filename: str) -> list[str]:
    seen: list[str] = []
    show = counting(lambda message, *_rest, **_named: seen.append(str(message)), counts)
    show(UserWarning(text), UserWarning, filename, 1, None, line=None)
    return seen


@pytest.mark.parametrize("one", KNOWN)
def test_a_known_one_is_counted_and_not_shown(tmp_path: Path, one: tuple[str, str, str]):
    name, module, says = one
    counts = tmp_path / "left-out.txt"
    for _ in range(2):
        assert shown(counts, f"{says} and so on", f"/site/{module}") == []
    assert counted(counts) == {name: 2}


def test_another_text_or_module_is_shown(tmp_path: Path):
    for text, filename in [
        ("Only CUDA, HIP and XPU support AWQ currently.", "/site/quantization/other.py"),
        ("The weights of this model are damaged", "/site/quantization/awq/awq.py"),
        ("Warning: ORJSONResponse is deprecated", "/site/fastapi/routing.py"),
    ]:
        assert not known_name(text, filename)
        assert shown(tmp_path / "left-out.txt", text, filename) == [text]
        assert counted(tmp_path / "left-out.txt") == {}


def test_what_cannot_be_counted_is_shown(tmp_path: Path):
    _, module, says = KNOWN[0]
    assert shown(tmp_path / "no folder" / "left-out.txt", says, module) == [says]


def test_one_line_tells_how_many_of_each():
    line = told(Counter(megatron=4, awq=1))
    assert line.startswith("[slipstream] 5 known warnings")
    assert "(awq 1, megatron 4)" in line
    assert line.count("\n") == 1
    assert told(Counter()) == ""
