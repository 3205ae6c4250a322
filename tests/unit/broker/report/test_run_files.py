"""What a run leaves in its folder, written by the broker during the run."""

import json
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from slipstream.broker.ledger.commands import Ledger
from slipstream.broker.ledger.groups import Group
from slipstream.broker.ledger.scoring_queue import ScoringQueue
from slipstream.broker.ledger.view import account_of
from slipstream.broker.report.metrics_file import MetricsFile
from slipstream.broker.report.run_files import FolderRecords, forget_after
from slipstream.broker.report.telemetry import Telemetry
from slipstream.broker.report.versions_file import git_commit
from slipstream.broker.startup import open_records, start_trackers
from slipstream.broker.store.base import StoredTrajectory
from slipstream.wire.files.run_folder import BATCHES
from slipstream.wire.files.trajectory_file import cut_from_step, read_groups
from slipstream.wire.messages.codec import encode
from slipstream.wire.messages.ledger_view import LedgerView
from slipstream.wire.messages.status import RunStatus, StepPoint
from slipstream.wire.messages.trajectory import Prompt, Score, Transcript
from slipstream.wire.settings.sections import RunSection
from tests.support.broker_starts import new_ledger, settings_in
from tests.support.ledger_driver import (
    eval_plan,
    generate,
    lease,
    make_ledger,
    make_ready,
    make_rules,
    train_step,
)
from tests.support.memory_store import MemoryStore


class ListTracker:
    """Remembers what was logged."""

    def __init__(self) -> None:
        self.points: list[tuple[int, dict[str, float]]] = []
        self.closed = False

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self.points.append((step, dict(figures)))

    def close(self) -> None:
        self.closed = True


def frames(group: Group) -> list[StoredTrajectory]:
    transcript = Transcript(
        prompt=group.prompt, response="<b>7</b>", num_response_tokens=4, finish_reason="stop"
    )
    return [StoredTrajectory(b"payload", encode(transcript))] * group.size


def status_of(ledger: Ledger, run: RunSection) -> RunStatus:
    return Telemetry(run, now=lambda: 0.0).status(ledger.book, ScoringQueue(lease_s=1.0))


def account(ledger: Ledger) -> LedgerView:
    queue = ScoringQueue(lease_s=1.0)
    return account_of(
        ledger.book,
        queue,
        run_name="run",
        store="memory",
        generation=1,
        issued_at={},
        num_items=3,
        now=0.0,
    )


@pytest.fixture
def run(tmp_path: Path) -> RunSection:
    section = RunSection(name="run", dir=str(tmp_path))
    section.folder.mkdir()
    return section


def evaluated(problems: int) -> tuple[Ledger, list[Group]]:
    """A ledger after an evaluation, and its items as they were when they ended."""
    ledger = make_ledger(make_rules(plan=eval_plan(problems)))
    ledger.training.take_over(0)
    ended = []
    for work in lease(ledger, max_sequences=problems):
        generate(ledger, work)
        group = ledger.book.groups[work.group_id]
        ledger.score(Score(group_id=work.group_id, sibling=0, lease_id=0, reward=1.0))
        ended.append(group)
    return ledger, ended


def test_a_round_goes_to_the_trackers_once_and_into_its_files(run: RunSection):
    tracker = ListTracker()
    records = FolderRecords(run, tracker, keep_answers=2, batches=None)
    ledger, ended = evaluated(problems=3)
    for group in ended:
        records.eval_answers(group, dict(enumerate(frames(group))))
    for _ in range(2):
        records.evaluations(ledger.book.state.eval_points)
    (point,) = tracker.points
    assert point[0] == 0
    assert point[1]["eval/mean@1"] == 1.0
    rows = [json.loads(r) for r in (run.folder / "eval/step-000000.jsonl").read_text().splitlines()]
    assert [(row["problem"], row["answer"], row["reward"]) for row in rows] == [
        (0, "<b>7</b>", 1.0),
        (1, "<b>7</b>", 1.0),
    ]
    results = (run.folder / "eval/results.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in results] == [0]
    records.close(status_of(ledger, run), account(ledger))
    assert json.loads((run.folder / "summary.json").read_text())["eval"][0]["step"] == 0


def test_rounds_of_before_a_resume_are_kept_and_not_logged_again(run: RunSection):
    ledger, _ = evaluated(problems=1)
    tracker = ListTracker()
    records = FolderRecords(
        run, tracker, keep_answers=0, batches=None, known=ledger.book.state.eval_points
    )
    records.evaluations(ledger.book.state.eval_points)
    assert tracker.points == []


def test_steps_and_rounds_go_into_metrics_jsonl(run: RunSection):
    path = run.folder / "metrics.jsonl"
    metrics = MetricsFile(path, step=0, evaluated=[])
    records = FolderRecords(run, ListTracker(), keep_answers=0, batches=None, metrics=metrics)
    ledger, _ = evaluated(problems=1)
    records.evaluations(ledger.book.state.eval_points)
    status = msgspec.structs.replace(status_of(ledger, run), staleness_histogram={"0": 5, "1": 2})
    point = StepPoint(step=1, at_s=3.0, metrics={"reward/mean": 0.5})
    records.step(point, status, account(ledger))
    records.close(status, account(ledger))
    round_row, step_row = (json.loads(line) for line in path.read_text().splitlines())
    assert (round_row["step"], round_row["eval/mean@1"]) == (0, 1.0)
    assert (step_row["step"], step_row["trained_tokens"], step_row["reward/mean"]) == (1, 7, 0.5)
    assert "staleness/mean_per_token" in step_row


async def record_three_steps(records: FolderRecords) -> Ledger:
    ledger = make_ledger()
    ledger.training.take_over(0)
    for step in range(3):
        make_ready(ledger, lease(ledger))
        batch = train_step(ledger)
        await records.batch(step, [(group, frames(group)) for group in batch])
    return ledger


async def test_trained_batches_are_recorded_whole_up_to_a_size(tmp_path: Path):
    settings = settings_in(
        tmp_path,
        "logging.trackers=[]",
        "broker.record_batches=true",
        "broker.max_recorded_bytes=2500",
    )
    path = settings.run.folder / BATCHES
    trackers = await start_trackers(settings)
    records = await open_records(settings, new_ledger(settings), trackers, MemoryStore(), {})
    await record_three_steps(records)
    recorded = list(read_groups(path))
    assert [group.step for group in recorded] in ([0, 0], [0, 0, 1, 1]), "half a step"
    assert path.stat().st_size <= 2500
    first = recorded[0]
    assert (first.step, first.payloads) == (0, (b"payload", b"payload"))
    assert [t.reward for t in first.group.trajectories] == [0.0, 1.0]


async def test_a_resumed_run_records_its_steps_anew(run: RunSection):
    path = run.folder / "batches.trajectories"
    cut_from_step(path, 1)
    records = FolderRecords(run, ListTracker(), keep_answers=0, batches=path)
    ledger = await record_three_steps(records)
    records.close(status_of(ledger, run), account(ledger))
    cut_from_step(path, 1)
    assert [group.step for group in read_groups(path)] == [0, 0]


async def test_steps_that_a_learner_went_back_behind_are_recorded_anew(run: RunSection):
    path = run.folder / "rollouts" / "batches.trajectories"
    records = FolderRecords(run, ListTracker(), keep_answers=0, batches=path)
    ledger = await record_three_steps(records)
    records.went_back(1)
    assert [group.step for group in read_groups(path)] == [0, 0]
    ledger.training.take_over(1)
    batch = train_step(ledger)
    await records.batch(1, [(group, frames(group)) for group in batch])
    records.close(status_of(ledger, run), account(ledger))
    assert [group.step for group in read_groups(path)] == [0, 0, 1, 1]


def test_a_learner_goes_back_though_the_disk_is_full(
    run: RunSection, caplog: pytest.LogCaptureFixture
):
    metrics = MetricsFile(run.folder / "metrics.jsonl", step=3, evaluated=[])
    metrics.newest_step = 3
    records = FolderRecords(run, ListTracker(), keep_answers=0, batches=None, metrics=metrics)
    (run.folder / "rollouts").mkdir()
    (run.folder / "rollouts" / "trained.jsonl").write_text('{"step": 2}\n')
    (run.folder / "rollouts" / ".trained.jsonl.unfinished").mkdir()  # no copy can be made
    records.went_back(1)
    assert metrics.newest_step == 1
    assert "a shorter rollouts/trained.jsonl was not written" in caplog.text
    metrics.close()


def test_a_resumed_run_forgets_what_an_abandoned_life_wrote(run: RunSection):
    for step in (0, 10, 20):
        path = run.folder / "eval" / f"step-{step:06d}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}\n")
    rollouts = run.folder / "rollouts" / "trained.jsonl"
    rollouts.parent.mkdir()
    rollouts.write_text("".join(f'{{"step": {step}}}\n' for step in (3, 9, 10, 15)) + '{"st')
    forget_after(run.folder, 10)
    kept = sorted(path.name for path in (run.folder / "eval").iterdir())
    assert kept == ["step-000000.jsonl", "step-000010.jsonl"]
    assert [json.loads(row)["step"] for row in rollouts.read_text().splitlines()] == [3, 9]


def test_the_code_of_a_run_is_named(tmp_path: Path):
    assert git_commit(tmp_path) is None
    commit = git_commit(Path(__file__).parent)
    assert commit is None or len(commit.removesuffix("+changes")) == 40


def test_packages_go_into_versions_json(run: RunSection):
    records = FolderRecords(run, ListTracker(), keep_answers=0, batches=None)
    records.packages({"torch": "2.13.0"})
    content = json.loads((run.folder / "versions.json").read_text())
    assert content["packages"] == {"torch": "2.13.0"}
    assert set(content) >= {"slipstream", "git_commit", "python", "seed"}


async def test_repeated_batch_is_recorded_once(run: RunSection):
    path = run.folder / "rollouts" / "batches.trajectories"
    records = FolderRecords(run, ListTracker(), keep_answers=0, batches=path)
    ledger = make_ledger()
    ledger.training.take_over(0)
    make_ready(ledger, lease(ledger))
    batch = [(group, frames(group)) for group in train_step(ledger)]
    for _ in range(2):
        await records.batch(0, batch)
    records.close(status_of(ledger, run), account(ledger))
    assert [group.step for group in read_groups(path)] == [0, 0]


def test_the_account_shows_the_beginning_of_a_prompt():
    text = "".join(f"{number:03d}" for number in range(300))
    ledger = make_ledger()
    ledger.issuing._prompt_at = lambda _cursor: Prompt(prompt=text)
    ledger.training.take_over(0)
    lease(ledger)
    assert {item.prompt for item in account(ledger).oldest} == {text[:60]}
