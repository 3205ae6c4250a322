"""Files that the broker writes into the run folder during a run.

summary.json            figures, replaced at every step
metrics.jsonl           figures, one line per learner step and per evaluation
ledger/account.json     where every prompt is, replaced at every step
ledger/dead_letters.json  groups given up, replaced at each change
versions.json           code, packages, seed
eval/results.jsonl      one line per evaluation round
eval/step-000040.jsonl  answers of that round, up to eval.keep_answers
rollouts/batches.trajectories   trained batches whole, if broker.record_batches
"""

import asyncio
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from typing_extensions import override

from slipstream.broker.ledger.groups import Group, as_delivered
from slipstream.broker.report.metrics_file import MetricsFile
from slipstream.broker.report.run_records import Frames, RunRecords
from slipstream.broker.report.summary import write_summary
from slipstream.broker.report.trackers.base import Tracker, eval_figures, step_figures
from slipstream.broker.report.versions_file import write_versions
from slipstream.broker.store.base import StoredTrajectory
from slipstream.wire.errors import ProtocolError
from slipstream.wire.files.replace import replace_file
from slipstream.wire.files.run_folder import (
    ACCOUNT,
    BATCHES,
    DEAD_LETTERS,
    EVAL,
    TRAINED,
    answers_file,
    answers_files,
)
from slipstream.wire.files.trained_rows import cut_rows_from
from slipstream.wire.files.trajectory_file import (
    RecordedGroup,
    TrajectoryFileWriter,
    cut_from_step,
    read_steps,
)
from slipstream.wire.messages.broker import DeadLetters
from slipstream.wire.messages.codec import decode_transcript
from slipstream.wire.messages.ledger_view import LedgerView
from slipstream.wire.messages.status import EvalPoint, RunStatus, StepPoint
from slipstream.wire.messages.trajectory import Prompt, TrajectoryHeader
from slipstream.wire.settings.sections import RunSection

_log = logging.getLogger(__name__)


class FolderRecords(RunRecords):
    """Writes into the run folder and to the trackers."""

    def __init__(
        self,
        run: RunSection,
        tracker: Tracker,
        *,
        keep_answers: int,
        batches: Path | None,
        max_batch_bytes: int = 0,
        known: Sequence[EvalPoint] = (),
        metrics: MetricsFile | None = None,
    ) -> None:
        self._run = run
        self._metrics = metrics
        self._tracker = tracker
        self._keep_answers = keep_answers
        self._batches_file = batches
        self._max_batch_bytes = max_batch_bytes
        self._batches: TrajectoryFileWriter | None = None
        self._open_batches()
        self._points = list(known)  # points before a resume: logged already
        self._num_answers: dict[int, int] = {}  # answers by step, in this life of the run
        self._incomplete: set[int] = set()  # steps already reported
        self._last_step = -1  # the newest whose batch is recorded
        self._folder = run.folder / EVAL
        if known:
            self._write_results(known)

    @property
    @override
    def wants_batches(self) -> bool:
        """True if batches are recorded."""
        return self._batches is not None

    def _open_batches(self) -> None:
        if self._batches_file is not None:
            self._batches = TrajectoryFileWriter(self._batches_file, self._max_batch_bytes)
            self._last_step = last_recorded(self._batches_file)

    def resume_evaluations(self, eval_steps: Iterable[int]) -> None:
        """Append to the answers of evaluations that another broker started."""
        files = answers_files(self._run.folder)
        for step in eval_steps:
            if step in files:
                self._num_answers[step] = len(files[step].read_text().splitlines())

    def end_batches(self) -> None:
        """Record no more batches."""
        if self._batches is not None:
            self._batches.close()
            self._batches = None

    @override
    def packages(self, versions: Mapping[str, str]) -> None:
        """Replace versions.json."""
        with _full_disk_tolerated("versions.json"):
            write_versions(self._run, versions)

    @override
    def step(self, point: StepPoint, status: RunStatus, account: LedgerView) -> None:
        """Log the step and replace the summary."""
        figures = step_figures(point, status)
        self._tracker.log(point.step, figures)
        if self._metrics is not None:
            self._metrics.step(point.step, sum(status.staleness_histogram.values()), figures)
        self._write_figures(status, account)

    @override
    def evaluations(self, points: Sequence[EvalPoint]) -> None:
        """Log the rounds that are new."""
        if len(points) == len(self._points):
            return
        known = {point.step for point in self._points}
        for point in points:
            if point.step not in known:
                figures = eval_figures(point)
                self._tracker.log(point.step, figures)
                if self._metrics is not None:
                    self._metrics.evaluation(point.step, figures)
        self._points = list(points)
        self._write_results(points)

    def _write_results(self, points: Sequence[EvalPoint]) -> None:
        self._folder.mkdir(exist_ok=True)
        lines = b"".join(msgspec.json.encode(point) + b"\n" for point in points)
        with _full_disk_tolerated("eval/results.jsonl"):
            replace_file(self._folder / "results.jsonl", lines, durable=False)

    @override
    def eval_answers(self, group: Group, frames: Mapping[int, StoredTrajectory]) -> None:
        """Write the answers to one problem."""
        step = group.eval_step
        written = self._num_answers.get(step, 0)
        if written >= self._keep_answers:
            return
        self._num_answers[step] = written + group.size
        if len(frames) < group.size and step not in self._incomplete:
            self._incomplete.add(step)
            _log.warning(
                "eval/ does not show every answer of step %d: broker.cache_bytes has no room for "
                "all that wait for their rewards; the figures count them all",
                step,
            )
        self._folder.mkdir(exist_ok=True)
        path = answers_file(self._run.folder, step)
        rows = (json.dumps(_answer(group, sibling, stored)) for sibling, stored in frames.items())
        text = "".join(f"{row}\n" for row in rows)
        with _full_disk_tolerated(str(path)), path.open("a" if written else "w") as file:
            file.write(text)

    @override
    async def batch(self, step: int, groups: Sequence[tuple[Group, Frames]]) -> None:
        """Record a trained batch whole, off the event loop; once, however often it is called."""
        if self._batches is None or step <= self._last_step:
            return
        self._last_step = step
        file = self._batches

        def record() -> bool:
            recorded = [
                RecordedGroup(
                    step=step,
                    group=as_delivered(group),
                    payloads=tuple(bytes(stored.payload) for stored in frames),
                    transcripts=tuple(bytes(stored.transcript) for stored in frames),
                )
                for group, frames in groups
            ]
            return file.append(recorded)

        try:
            reason = "" if await asyncio.to_thread(record) else "broker.max_recorded_bytes"
        except OSError as error:
            reason = str(error) or type(error).__name__
        if reason:
            _log.warning("recording ends at step %d: %s", step, reason)
            self.end_batches()

    @override
    def went_back(self, step: int) -> None:
        """Remove the records of later steps, which are repeated."""
        is_recording = self._batches is not None
        self.end_batches()
        with _full_disk_tolerated("a shorter rollouts/trained.jsonl"):
            forget_after(self._run.folder, step)
        self._points = [point for point in self._points if point.step <= step]
        self._num_answers = {s: n for s, n in self._num_answers.items() if s <= step}
        if self._metrics is not None:
            self._metrics.went_back(step, [point.step for point in self._points])
        if is_recording:
            self._open_batches()

    @override
    def close(self, status: RunStatus, account: LedgerView) -> None:
        """Write the run's outcome. The caller closes the trackers it made."""
        self.evaluations(status.eval)
        self._write_figures(status, account)
        self.end_batches()
        if self._metrics is not None:
            self._metrics.close()

    @override
    def dead_letters(self, letters: DeadLetters) -> None:
        """Replace their file, which is read once the broker is gone."""
        with _full_disk_tolerated("ledger/dead_letters.json"):
            write_letters(self._run.folder, letters)

    def _write_figures(self, status: RunStatus, account: LedgerView) -> None:
        file = self._run.folder / ACCOUNT
        with _full_disk_tolerated("summary.json and ledger/account.json"):
            write_summary(self._run.summary_file, status)
            file.parent.mkdir(exist_ok=True)
            replace_file(file, msgspec.json.encode(account) + b"\n", durable=False)


def write_letters(folder: Path, letters: DeadLetters) -> None:
    """Write the dead letters of a run into its folder."""
    file = folder / DEAD_LETTERS
    file.parent.mkdir(exist_ok=True)
    replace_file(file, msgspec.json.encode(letters) + b"\n", durable=False)


@contextmanager
def _full_disk_tolerated(what: str) -> Iterator[None]:
    """Warn where a file cannot be written: it must not stop the ledger."""
    try:
        yield
    except OSError as error:
        _log.warning("%s was not written: %s", what, error.strerror)


def last_recorded(path: Path) -> int:
    """Return the newest step whose batch a file holds, or -1."""
    return max(read_steps(path), default=-1) if path.exists() else -1


def forget_after(run_folder: Path, step: int) -> None:
    """Remove an abandoned life's records of steps after the resumed one."""
    cut_from_step(run_folder / BATCHES, step)
    for evaluated, path in answers_files(run_folder).items():
        if evaluated > step:
            path.unlink()
    cut_rows_from(run_folder / TRAINED, step)


def _answer(group: Group, sibling: int, stored: StoredTrajectory) -> dict[str, object]:
    replies: tuple[str, ...] = ()
    try:
        transcript = decode_transcript(stored.transcript)
        answer, replies = transcript.response, transcript.replies
    except ProtocolError as error:  # a generator's payload is not read before
        answer = f"({error})"
    header, score = group.headers[sibling], group.scores[sibling]
    return {
        "problem": group.position,
        "sample": sibling,
        "data_source": group.prompt.data_source,
        "prompt": group.prompt.text,
        **_images(group.prompt),
        "answer": answer,
        "ground_truth": group.prompt.ground_truth,
        "reward": score.reward,
        "parts": score.parts,
        "turn_rewards": score.turn_rewards,
        "finish_reason": header.finish_reason,
        "response_tokens": header.num_response_tokens,
        "versions": [version.label for version, _ in header.tokens_by_version()],
        **(_turns(header, replies) if header.turns else {}),
    }


def _images(prompt: Prompt) -> dict[str, object]:
    """Return what there is of images, by digest as files of the run folder."""
    if not prompt.images:
        return {}
    return {"images": [{"digest": image.digest} for image in prompt.images]}


def _turns(header: TrajectoryHeader, replies: tuple[str, ...]) -> dict[str, object]:
    """Return what there is of several turns; where one begins is an index into all tokens."""
    return {
        "replies": replies,
        "turns": [
            {"first_token": turn.first_token, "num_tokens": turn.num_tokens}
            for turn in header.turns
        ],
        "branches": header.branches,
        "version_runs": [
            {"first_token": run.first_token, "version": run.version.label}
            for run in header.version_runs
        ],
    }
