from pathlib import Path

import msgspec
import pytest

from slipstream.wire.errors import ConfigError
from slipstream.wire.files.checkpoints import (
    BestCheckpoint,
    best_checkpoint,
    checkpoints_in,
    newest_checkpoint,
    read_checkpoint_info,
    read_ledger,
)
from tests.support.checkpoint_infos import write_checkpoint


def test_the_newest_is_the_highest_version_and_unfinished_ones_do_not_count(tmp_path: Path):
    assert newest_checkpoint(tmp_path) is None
    back = write_checkpoint(tmp_path, 2, 7)
    first, second = write_checkpoint(tmp_path, 1, 5), write_checkpoint(tmp_path, 1, 1_000_000)
    (tmp_path / "checkpoints" / ".step-000009.unfinished").mkdir()
    assert checkpoints_in(tmp_path / "checkpoints") == [first, second, back]
    assert newest_checkpoint(tmp_path) == back
    info = read_checkpoint_info(back)
    assert (info.step, info.version.epoch, info.ranks) == (7, 2, 2)
    assert read_ledger(back) == b"ledger"


def test_the_best_is_the_one_that_the_file_names_while_it_is_there(tmp_path: Path):
    folder = write_checkpoint(tmp_path, 1, 5)
    assert best_checkpoint(tmp_path) is None
    best = tmp_path / "checkpoints" / "best.json"
    marked = BestCheckpoint(checkpoint=folder.name, metric="mean", value=0.5)
    best.write_bytes(msgspec.json.encode(marked))
    assert best_checkpoint(tmp_path) == folder
    best.write_bytes(msgspec.json.encode(msgspec.structs.replace(marked, checkpoint="step-9")))
    assert best_checkpoint(tmp_path) is None


def test_what_is_no_checkpoint_is_refused_with_its_reason(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"is no checkpoint: checkpoint\.json: No such file"):
        read_checkpoint_info(tmp_path)
    (tmp_path / "checkpoint.json").write_text("{}")
    with pytest.raises(ConfigError, match="missing required field `format_revision`"):
        read_checkpoint_info(tmp_path)
    newer = write_checkpoint(tmp_path / "run", 1, 5, revision=9)
    with pytest.raises(ConfigError, match="checkpoint format 9, this version reads 2"):
        read_checkpoint_info(newer)
    whole = (newer / "ledger.bin").read_bytes()
    for damaged in (
        b"",
        whole[:-1],
        whole + b"x",
        b"x" + whole[1:],
        whole[:-1] + bytes([whole[-1] ^ 1]),
        whole[:25] + bytes([whole[25] ^ 1]) + whole[26:],
    ):
        (newer / "ledger.bin").write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"ledger\.bin is damaged"):
            read_ledger(newer)
    (newer / "ledger.bin").unlink()
    with pytest.raises(ConfigError, match=r"ledger\.bin: No such file"):
        read_ledger(newer)
