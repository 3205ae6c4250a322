"""What the comparison with TRL decides without running anything."""

from pathlib import Path

from benchmarks.bars import NotRun
from benchmarks.vs_trl import POLICIES, missing_trl


def test_lengths_are_fixed_or_at_most_so_long():
    by_name = {policy.name: policy for policy in POLICIES}
    assert by_name["0.8M"].limits("fixed") == (64, 64)
    assert by_name["0.8M"].limits("long-tailed") == (0, 512)
    assert by_name["smollm2"].limits("fixed") == (32, 32)
    assert by_name["smollm2"].needs == {"fixed": 1.0, "long-tailed": 2.0}


def test_without_trl_nothing_is_run(tmp_path: Path):
    missing = missing_trl(str(tmp_path))
    assert missing == NotRun(f"there is no trl in {tmp_path}: pip install --target DIR, --path DIR")
    (tmp_path / "trl").mkdir()
    assert missing_trl(str(tmp_path)) is None
