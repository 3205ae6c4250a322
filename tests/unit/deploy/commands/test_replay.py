"""Which recorded batches a command line names."""

from pathlib import Path

import pytest

from slipstream.deploy.commands.replay import other_demonstrations, recorded_file, split_target
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.run_folder import BATCHES


def test_a_word_without_a_value_is_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert split_target(["learner.lr=0", "runs/a"]) == (Path("runs/a"), ["learner.lr=0"])
    assert split_target(["learner.lr=0"]) == (None, ["learner.lr=0"])
    Path("a=b").touch()
    assert split_target(["a=b"]) == (Path("a=b"), [])
    with pytest.raises(ConfigError, match="one RUN or FILE, got runs/a runs/b"):
        split_target(["runs/a", "runs/b"])


def test_a_run_stands_for_its_recorded_batches(tmp_path: Path):
    file = tmp_path / "run" / BATCHES
    file.parent.mkdir(parents=True)
    file.touch()
    assert recorded_file(tmp_path / "run") == recorded_file(file) == file
    with pytest.raises(ConfigError, match=rf"is not a trajectory file and holds no {BATCHES}"):
        recorded_file(tmp_path)


def test_demonstrations_that_changed_since_a_checkpoint_are_told(tmp_path: Path):
    file = tmp_path / "new.trajectories"
    file.write_text("12")
    trained = tmp_path / "run" / "replay" / "demonstrations.trajectories"
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000003"
    assert not other_demonstrations(checkpoint, file)
    trained.parent.mkdir(parents=True)
    trained.write_text("12")
    assert not other_demonstrations(checkpoint, file)
    trained.write_text("13")
    assert other_demonstrations(checkpoint, file) == [trained]
