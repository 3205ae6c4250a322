"""What the first stage on a borrowed GPU measures, and its bars, on a GPU that is pretended."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.device import stage_mfu
from benchmarks.device.report import Report, Skipped
from benchmarks.device.stage_mfu import Case
from benchmarks.device.suite import DEADLINES_S
from slipstream.wire.models.flops import SequenceCost


def compared(
    monkeypatch: pytest.MonkeyPatch, folder: Path, case: Case, *, mfu: float, gpu: str
) -> dict[str, list[dict[str, object]]]:
    """Return what is reported of a step that reaches a share of an H100's peak."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2**30)
    report = Report("mfu", folder / "mfu.json", deadline_s=60)
    hf = stage_mfu._hf_config(case, folder)
    flops = stage_mfu.flops_of(case, SequenceCost.of(hf))
    stage_mfu._compare(report, case, hf, flops / (mfu * 989e12))
    report.end()
    found: dict[str, list[dict[str, object]]] = json.loads((folder / "mfu.json").read_text())
    return found


def test_flops_are_those_of_the_tokens_that_meet_the_output_layer():
    """Seven of eight are trained."""
    case = Case(shape="1.5B", tokens=8192, microbatches=2, length=2048)
    cost = SequenceCost(linear=10.0, quadratic=1.0, output=4.0)
    assert stage_mfu.flops_of(case, cost) == 8 * (10 * 2048 + 2048**2 - 4 * 256)


def test_it_comes_first_and_its_bars_fit_in_its_time():
    assert next(iter(DEADLINES_S)) == "mfu"
    cases = stage_mfu._CASES
    barred = [case for case in cases if case.names_a_bar]
    assert sum(case.seconds for case in barred[:5]) <= 0.7 * DEADLINES_S["mfu"]
    assert cases[:5] == tuple(barred[:5]), "cases with bars come first, but for the longest"
    assert len({case.label for case in cases}) == len(cases)
    assert {case.microbatches for case in cases if case.shape == "1.5B"} == {1, 4, 16}


@pytest.mark.parametrize(("mfu", "holds"), [(0.46, True), (0.44, False)])
def test_a_step_is_held_to_a_share_of_the_peak(
    mfu: float, holds: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    case = stage_mfu._CASES[0]
    found = compared(monkeypatch, tmp_path, case, mfu=mfu, gpu="NVIDIA H100 80GB HBM3")
    (bar,) = found["bars"]
    assert bar["name"] == "1.5B 4 x 8192 tokens MFU"
    assert bar["value"] == pytest.approx(mfu)
    assert (bar["needs"], bar["ok"]) == (">= 0.45", holds)


def test_prime_rl_is_a_bar_on_the_card_of_its_figures_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    case = next(case for case in stage_mfu._CASES if case.prime_rl == 11_896)
    found = compared(monkeypatch, tmp_path, case, mfu=0.2, gpu="NVIDIA H100 80GB HBM3")
    assert [bar["name"] for bar in found["bars"]] == [f"{case.label} vs prime-rl"]
    found = compared(monkeypatch, tmp_path, case, mfu=0.2, gpu="NVIDIA H200")
    assert found["bars"] == []
    assert f"{case.label} vs prime-rl on an H100" in found["facts"]


def test_a_bar_without_time_is_short(tmp_path: Path):
    report = Report("mfu", tmp_path / "mfu.json", deadline_s=0)
    for case in (stage_mfu._CASES[0], stage_mfu._CASES[5]):
        with pytest.raises(Skipped, match=f"0 s are left, and it takes {case.seconds:g}"):
            stage_mfu._leave_out(report, case)
    assert report.end() == 1
    (bar,) = json.loads((tmp_path / "mfu.json").read_text())["bars"]
    assert (bar["name"], bar["ok"]) == ("1.5B 4 x 8192 tokens", False)
