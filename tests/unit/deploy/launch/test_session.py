"""The life of a run over short real processes, without a broker; and how it ends."""

import errno
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from slipstream.deploy.config import RunConfig, run_config
from slipstream.deploy.launch.observer import StatusWatcher
from slipstream.deploy.launch.plan import RolePlan
from slipstream.deploy.launch.session import (
    RunOutcome,
    has_room,
    missing_upload,
    outcome_of,
    run_in_folder,
)
from slipstream.deploy.launch.signals import StopRequestedError
from slipstream.deploy.launch.starters import LocalStarter
from slipstream.wire.errors import ChildDiedError, ConfigError, SlipstreamError
from slipstream.wire.files.checkpoints import UPLOAD_FILE, UploadState
from slipstream.wire.files.scale_request import ScaleRequest, read_answer, write_request
from slipstream.wire.messages.status import RunStatus
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.settings.sections import RunSection
from tests.support.blank_model import write_blank_model
from tests.support.checkpoint_infos import saved_checkpoint
from tests.support.wire_samples import STATUS

SLEEPS = "import signal\nwhile True: signal.pause()"
DEAF = f"import signal; signal.signal(15, signal.SIG_IGN); print('up', flush=True); {SLEEPS}"


@pytest.mark.parametrize(
    ("state", "line"),
    [
        (None, ""),
        (UploadState(url="s3://b/r", step=4, error="an older one cannot be removed"), ""),
        (UploadState(url="s3://b/r", step=2), "step-000004 is not in s3://b/r (checkpoint.upload)"),
        (
            UploadState(url="s3://b/r", step=2, num_failed=3, error="Forbidden"),
            "step-000004 is not in s3://b/r (checkpoint.upload): Forbidden",
        ),
    ],
)
def test_newest_checkpoint_that_is_not_uploaded_is_named(
    tmp_path: Path, state: UploadState | None, line: str
):
    checkpoint, _ = saved_checkpoint(tmp_path, PolicyVersion(1, 4))
    if state is not None:
        (checkpoint.parent / UPLOAD_FILE).write_bytes(msgspec.json.encode(state))
    assert missing_upload(checkpoint) == line


class ScriptedWatcher(StatusWatcher):
    """Has the status that a test sets."""

    status = msgspec.structs.replace(STATUS, steps=0, finished=False)

    @property
    def newest(self) -> RunStatus:
        return self.status

    def start(self, run: RunSection) -> None:
        """Ask nobody."""


class ScriptedRun:
    """A site and a view of a run: each time that it would be drawn, the test's next part runs."""

    def __init__(self, folder: Path, learner: str = SLEEPS, **deploy: object) -> None:
        write_blank_model(folder / "model", hidden=16, layers=1)
        table = {
            "run": {"name": "r", "dir": str(folder / "runs"), "model": str(folder / "model")},
            "data": {"file": "train.jsonl"},
            "generators": {"device": "cpu", "count": 2},
            "deploy": deploy,
        }
        self.config: RunConfig = run_config(table)
        self.run = self.config.run
        self.text = io.StringIO()
        self.console = Console(file=self.text, width=200)
        self.watcher = ScriptedWatcher()
        self.script: list[Callable[[], object]] = []
        self._codes = {"broker": SLEEPS, "learner": learner}
        self._starter = LocalStarter(folder)
        self.start = self._starter.start

    def to_the_end(self, *script: Callable[[], object]) -> int:
        """Run, with a part of the script at each picture; then interrupt it."""
        self.script = [*script, lambda: os.kill(os.getpid(), signal.SIGINT)]
        return run_in_folder(self.run, lambda: self, self, self.watcher)

    def plans(self) -> list[RolePlan]:
        names = ("broker", "learner", "generator-0", "generator-1")
        return [self.generator(name) for name in names]

    def generator(self, name: str) -> RolePlan:
        return RolePlan(name, (sys.executable, "-S", "-c", self._codes.get(name, SLEEPS)))

    def give_back(self, name: str) -> None:
        """Do nothing: no place is reserved."""

    def broker_listens(self) -> bool:
        return True

    def where_to_connect(self) -> str:
        return ""

    def close(self) -> None:
        self._starter.close()

    @contextmanager
    def following(self, _run: RunSection) -> Iterator[Callable[[StatusWatcher], None]]:
        yield lambda _watcher: self.script.pop(0)() and None

    def show_figures(self, status: RunStatus, outcome: str) -> None:
        """Show nothing."""


def test_a_run_over_its_time_limit_fails(tmp_path: Path):
    run = ScriptedRun(tmp_path, time_limit_s=0.01)
    assert run.to_the_end(lambda: None, lambda: None) == 1
    assert "failed: the run took longer than deploy.time_limit_s = 0.01" in run.text.getvalue()


@pytest.mark.parametrize(
    ("fewest", "refused"),
    [(1, ""), (2, "1 is not between deploy.min_generators = 2 and deploy.max_generators = 4")],
)
def test_a_request_for_fewer_generators_than_the_setting_is_refused(
    tmp_path: Path, fewest: int, refused: str
):
    run = ScriptedRun(tmp_path, min_generators=fewest, max_generators=4)
    request = ScaleRequest(id="1f", generators=1)
    assert run.to_the_end(lambda: write_request(run.run.folder, request), lambda: None) == 130
    answer = read_answer(run.run.folder, "1f")
    assert answer is not None
    assert (answer.generators, answer.refused) == (2 if refused else 1, refused)


@pytest.mark.parametrize(("every_s", "is_larger"), [(0.01, True), (1000.0, False)])
def test_waiting_is_measured_over_the_time_of_the_setting(
    tmp_path: Path, every_s: float, is_larger: bool
):
    def status(age_s: float) -> RunStatus:
        kinds = {"learner": 0.0, "generator": 1.0}
        roles = [
            msgspec.structs.replace(STATUS.roles[0], name=kind, role=kind, age_s=age_s, busy=busy)
            for kind, busy in kinds.items()
        ]
        return msgspec.structs.replace(STATUS, finished=False, steps=0, roles=roles, queue={})

    run = ScriptedRun(tmp_path, max_generators=3, scale_every_s=every_s)
    run.watcher.status = status(10.0)
    run.to_the_end(lambda: setattr(run.watcher, "status", status(20.0)), lambda: None)
    line = "generators: 2 -> 3, the learner waited 100%, the generators 0%"
    assert (line in run.text.getvalue()) == is_larger


def test_a_learner_that_does_not_save_is_killed_after_the_time_of_the_setting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    run = ScriptedRun(tmp_path, DEAF, save_timeout_s=0.1)
    run.watcher.status = msgspec.structs.replace(STATUS, steps=3, finished=False)

    def once_up() -> None:
        if "up" not in (run.run.logs / "learner.log").read_text():
            run.script.insert(0, once_up)

    assert run.to_the_end(once_up) == 130
    assert (
        "learner used no CPU and wrote no log for 0.1 s after SIGTERM and is killed" in caplog.text
    )
    assert "no checkpoint of step 3 was saved: steps after 0 are lost" in run.text.getvalue()


@pytest.mark.parametrize(
    ("error", "has_room", "outcome"),
    [
        (StopRequestedError("SIGTERM"), True, RunOutcome("stopped", "SIGTERM", 143)),
        (ConfigError("learner.lr: why"), True, RunOutcome("refused", "learner.lr: why", 2)),
        (ChildDiedError("why"), True, RunOutcome("failed", "why", 1)),
        (
            ChildDiedError("why"),
            False,
            RunOutcome("refused", "No space left on device: f (run.dir)", 2),
        ),
        (
            OSError(errno.ENOSPC, "No space left on device", "x"),
            True,
            RunOutcome("refused", "No space left on device: x (run.dir)", 2),
        ),
    ],
)
def test_an_error_decides_how_a_run_ends(
    error: StopRequestedError | SlipstreamError | OSError, has_room: bool, outcome: RunOutcome
):
    assert outcome_of(error, Path("f"), has_room=has_room) == outcome


def test_a_fault_of_the_program_is_not_taken_for_a_full_disk():
    with pytest.raises(OSError, match="odd"):
        outcome_of(OSError(errno.EBADF, "odd"), Path("f"), has_room=True)
    assert str(RunOutcome("finished", "", 0)) == "finished"


def test_a_folder_that_is_gone_hides_no_other_trouble(tmp_path: Path):
    assert has_room(tmp_path)
    assert has_room(tmp_path / "gone")
