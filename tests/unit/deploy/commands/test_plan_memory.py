import io
from pathlib import Path

import pytest
from rich.console import Console

from slipstream.deploy.commands.plan.memory import (
    print_measured,
    print_stages,
    refuse_too_large,
    with_estimate,
)
from slipstream.deploy.predict.memory.learner_rank import TENSORS, MemoryPart
from slipstream.learner.tools.measure import Measured
from slipstream.wire.errors import ConfigError
from tests.unit.deploy.launch.test_plan import architecture

GIB = 2**30
STAGES = [
    [MemoryPart("weights", 1 * GIB, "4 N"), MemoryPart("logits", 0, "3 chunks")],
    [MemoryPart("weights", 2 * GIB, "4 N"), MemoryPart("logits", GIB / 2, "3 chunks")],
]


def printed(console: Console) -> str:
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_stages_stand_beside_each_other_by_kind_with_the_formula(tmp_path: Path):
    console = Console(file=io.StringIO(), width=120)
    print_stages(architecture("qwen3-8b-16gpu", tmp_path), STAGES, console)
    lines = [line.split() for line in printed(console).splitlines()]
    assert ["weights", "1.000", "2.000", "4", "N"] in lines
    assert ["logits", "0.000", "0.500", "3", "chunks"] in lines
    assert ["in", "all", "1.000", "2.500"] in lines


def test_what_a_host_cannot_hold_is_not_measured():
    needed = 2 * 1 * GIB + 2 * 2.5 * GIB + 4 * 700 * 2**20
    refuse_too_large(STAGES, 4, int(needed))
    with pytest.raises(ConfigError, match=r"about 9\.7 GiB of this host .*= 4, and 1\.0 GiB"):
        refuse_too_large(STAGES, 4, GIB)


def test_what_was_measured_stands_beside_the_estimate_of_its_stage():
    parts = [MemoryPart(what, 10 * 2**20, "") for what in TENSORS]
    found = Measured(
        stage=1,
        tensors={"weights": 10 * 2**20, "gradients": 11 * 2**20, "main weights": 0, "moments": 0},
        rss_before=70 * 2**20,
        rss_after=110 * 2**20,
    )
    parts[2:] = [
        MemoryPart("main weights", 0, ""),
        MemoryPart("moments", 0, ""),
        MemoryPart("optimizer on the host", 10 * 2**20, ""),
    ]
    one = with_estimate(3, found, [[], parts])
    assert one.estimated["process (RSS)"] == 100 * 2**20
    console = Console(file=io.StringIO(), width=120)
    print_measured([one], console)
    lines = [line.split() for line in printed(console).splitlines()]
    assert ["3", "1", "gradients", "10.00", "11.00", "1.100"] in lines
    assert ["3", "1", "moments", "0.00", "0.00", "-"] in lines
    assert ["3", "1", "process", "(RSS)", "100.00", "110.00", "1.100"] in lines
