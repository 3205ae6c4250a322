"""`slipstream scale` and the supervisor's end of it: files in the run folder."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.deploy.commands import scale
from slipstream.wire.errors import ConfigError, PeerLostError
from slipstream.wire.files.run_folder import RUN_LOCK, SETTINGS
from slipstream.wire.files.scale_request import ScaleAnswer, take_request, write_answer
from slipstream.wire.process.processes import locked
from tests.support.commands import call_command


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / SETTINGS).touch()
    with locked(tmp_path / RUN_LOCK, "runs it"):
        yield tmp_path


def answering(folder: Path, refused: str = "") -> threading.Thread:
    def answer() -> None:
        while (request := take_request(folder)) is None:
            pass
        generators = 1 if refused else request.generators
        answered = ScaleAnswer(id=request.id, generators=generators, refused=refused)
        write_answer(folder, answered)

    thread = threading.Thread(target=answer)
    thread.start()
    return thread


def test_a_request_is_taken_once_and_its_answer_shown(
    run: Path, capsys: pytest.CaptureFixture[str]
):
    supervisor = answering(run)
    assert call_command("scale", run, "generators=3") == 0
    supervisor.join()
    assert "3 generators from now on" in capsys.readouterr().out
    assert take_request(run) is None


def test_a_request_that_cannot_be_met_says_why(run: Path):
    supervisor = answering(run, refused="this host has 2 GPUs")
    with pytest.raises(ConfigError, match="keeps 1 generators: this host has 2 GPUs"):
        call_command("scale", run, "generators=30")
    supervisor.join()


def test_a_supervisor_that_does_not_answer_is_named(run: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scale, "ANSWER_S", 0.0)
    with pytest.raises(PeerLostError, match="has not answered for 0 s"):
        call_command("scale", run, "generators=2")


def test_what_is_no_number_of_generators_is_refused(run: Path):
    for words in [
        *("generators", "generators=0", "generators=-1", "learners=2"),
        *("generators=10001", f"generators={'9' * 5000}"),
    ]:
        with pytest.raises(ConfigError, match="expected generators=N"):
            call_command("scale", run, words)


def test_a_folder_without_a_run_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="is not a run folder"):
        call_command("scale", tmp_path, "generators=2")
    (tmp_path / SETTINGS).touch()
    with pytest.raises(ConfigError, match="is not running"):
        call_command("scale", tmp_path, "generators=2")


def test_a_damaged_request_is_passed_over(tmp_path: Path):
    (tmp_path / "scale.json").write_bytes(b"\xff{")
    assert take_request(tmp_path) is None
    assert not (tmp_path / "scale.json").exists()


@pytest.mark.parametrize("count", [0, -5, 10_001, 10**23])
def test_a_request_for_an_impossible_number_is_passed_over(tmp_path: Path, count: int):
    (tmp_path / "scale.json").write_text(f'{{"id": "a", "generators": {count}}}')
    assert take_request(tmp_path) is None
