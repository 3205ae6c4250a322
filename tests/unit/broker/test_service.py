"""How a broker begins: a new run, a used name, a checkpoint."""

import asyncio
from pathlib import Path

import pytest

from slipstream.broker.config import BrokerSettings
from slipstream.broker.data.prompts import load_prompts
from slipstream.broker.ledger.commands import Ledger
from slipstream.broker.ledger.state import encode_state
from slipstream.broker.service import end_after
from slipstream.broker.startup import start_trackers
from slipstream.broker.store.base import Changes
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.checkpoints import LEDGER_FILE, ledger_file
from slipstream.wire.messages.trajectory import Score
from slipstream.wire.messages.versions import PolicyVersion
from tests.support.broker_starts import begun, checkpoint, new_ledger, settings_in, trained
from tests.support.ledger_driver import header, lease, make_ready, submit
from tests.support.memory_store import MemoryStore
from tests.support.waiting import until_async


def begun_run(tmp_path: Path, *overrides: str) -> tuple[BrokerSettings, Ledger]:
    """Return settings and the ledger of a run whose learner has taken over."""
    settings = settings_in(tmp_path, *overrides)
    ledger = new_ledger(settings)
    ledger.training.take_over(0)
    return settings, ledger


def saved_run(tmp_path: Path, *overrides: str) -> tuple[Ledger, Path]:
    """Return a ledger as above, and a checkpoint of step 0."""
    _, ledger = begun_run(tmp_path, *overrides)
    return ledger, checkpoint(tmp_path, ledger)


def store_with(ledger: Ledger) -> MemoryStore:
    store = MemoryStore()
    asyncio.run(store.commit(Changes(snapshot=encode_state(ledger.book.state))))
    return store


def test_restarted_broker_resumes_where_the_first_one_was(tmp_path: Path):
    settings, first = begun_run(tmp_path)
    trained(first, 2)
    state = first.book.state
    again = begun(settings, store_with(first))
    state.run_id = again.identity.run_id
    assert again.ledger.book.state == state
    assert again.generation > 0


@pytest.mark.parametrize("ends", [1, 2])
def test_as_many_learners_as_the_settings_allow_may_end_with_one_batch(tmp_path: Path, ends: int):
    _, ledger = begun_run(tmp_path, f"broker.max_batch_attempts={ends}")
    make_ready(ledger, lease(ledger, "g", max_sequences=8))
    for _ in range(ends):
        assert not ledger.book.state.dead_letters
        assert isinstance(ledger.training.deliver(ledger.book.version), list)
        ledger.training.take_over(0)
    assert [one.reason for one in ledger.book.state.dead_letters.values()] == ["unfinished"]


def test_the_name_of_a_run_that_has_ended_is_refused_with_what_to_do(tmp_path: Path):
    settings = settings_in(tmp_path, "run.steps=1")
    used = new_ledger(settings)
    used.training.take_over(0)
    trained(used, 1).training.leave()
    store = store_with(used)
    with pytest.raises(ConfigError, match=r"has ended at step 1; resume with .*--resume auto"):
        begun(settings, store)
    assert begun(settings, store, restarted=True).ledger.book.finished


def test_a_resume_goes_back_in_the_store_where_that_reaches_back(tmp_path: Path):
    first, saved = saved_run(tmp_path)
    store = store_with(trained(first, 3))
    resumed = settings_in(tmp_path, f"run.resume_from={saved}")
    ledger = begun(resumed, store).ledger
    assert ledger.book.step == 3
    ledger.training.take_over(0)
    assert (sorted(ledger.book.state.batches), ledger.book.state.requeued) == ([0, 1, 2], 0)


def test_a_resume_from_what_the_store_has_forgotten_begins_with_the_checkpoint(tmp_path: Path):
    first, saved = saved_run(tmp_path)
    trained(first, 3)
    first.training.seal(first.book.version, 3, oldest_kept=3)
    store = store_with(first)
    resumed = settings_in(tmp_path, f"run.resume_from={saved}")
    beginning = begun(resumed, store)
    assert (beginning.ledger.book.step, beginning.ledger.book.state.cursor) == (0, 0)
    assert beginning.ledger.training.take_over(0) == PolicyVersion(2, 0)
    restarted = begun(resumed, store, restarted=True)
    assert restarted.ledger.book.state.origin == str(saved)


def test_under_another_bound_what_is_under_way_begins_anew(tmp_path: Path):
    first, saved = saved_run(tmp_path)
    granted = first.lease("g", first.book.version, max_sequences=24, now_s=0.0)
    submit(first, header(granted[0].group_id, 0, first.book.version))
    store = store_with(first)
    with pytest.raises(ConfigError, match=r"other run\.max_staleness_steps.*--resume"):
        begun(settings_in(tmp_path, "run.max_staleness_steps=0"), store)
    changed = settings_in(tmp_path, f"run.resume_from={saved}", "run.max_staleness_steps=0")
    ledger = begun(changed, store).ledger
    version = ledger.training.take_over(0)
    assert len(granted) == 3
    again = ledger.lease("g", version, max_sequences=99, now_s=0.0)
    assert [g.group_id for g in again] == [granted[0].group_id]
    assert ledger.book.unaccounted() == 0


def test_a_broker_that_died_before_it_had_resumed_is_replaced_by_one_that_does(tmp_path: Path):
    first, saved = saved_run(tmp_path)
    trained(first, 3).plan_stop("enough")
    store = store_with(first)
    resumed = settings_in(tmp_path, f"run.resume_from={saved}")
    ledger = begun(resumed, store, restarted=True).ledger
    assert (ledger.book.state.stop_reason, ledger.book.state.awaits_learner) == ("", True)
    ledger.training.take_over(0)
    store = store_with(ledger)
    again = begun(resumed, store, restarted=True).ledger
    assert not again.book.state.awaits_learner, "resumed twice"


def test_what_is_under_way_takes_the_group_size_of_now(tmp_path: Path):
    _, first = begun_run(tmp_path, "run.group_size=4")
    first.lease("g", first.book.version, max_sequences=4, now_s=0.0)
    saved = checkpoint(tmp_path, first)
    store = store_with(first)
    resumed = settings_in(tmp_path, f"run.resume_from={saved}", "run.group_size=2")
    ledger = begun(resumed, store).ledger
    version = ledger.training.take_over(0)
    (work, *_) = ledger.lease("g", version, max_sequences=8, now_s=0.0)
    assert (work.position, work.siblings) == (0, (0, 1))
    assert begun(resumed, store, restarted=True).ledger.book.state.group_size == 2


@pytest.mark.parametrize("samples", [0, 1, 3], ids=["off", "as-before", "more"])
def test_open_evaluations_are_those_of_the_settings_of_now(tmp_path: Path, samples: int):
    (tmp_path / "held_out.jsonl").write_text('{"prompt": "1"}\n{"prompt": "2"}\n')
    held_out = f"eval.file={tmp_path / 'held_out.jsonl'}"
    _, first = begun_run(tmp_path, held_out, "eval.every_steps=1")
    (problem,) = first.lease("g", first.book.version, max_sequences=1, now_s=0.0)
    submit(first, header(problem.group_id, 0, first.book.version))
    saved = checkpoint(tmp_path, first)
    store = store_with(first)
    now = [held_out, f"eval.samples={samples}", "eval.temperature=1.0"] if samples else []
    resumed = settings_in(tmp_path, f"run.resume_from={saved}", *now)
    ledger = begun(resumed, store).ledger
    version = ledger.training.take_over(0)
    work = ledger.lease("g", version, max_sequences=99, now_s=0.0)
    evals = [(one.position, one.siblings) for one in work if one.item == "eval"]
    expected = {0: [], 1: [(1, (0,))], 3: [(0, (0, 1, 2)), (1, (0, 1, 2))]}
    assert evals == expected[samples]


def test_a_resumed_run_starts_above_every_epoch_that_was_granted(tmp_path: Path):
    first, saved = saved_run(tmp_path)
    for _ in range(3):
        first.training.take_over(0)  # learners that came after the checkpoint
    resumed = settings_in(tmp_path, f"run.resume_from={saved}")
    ledger = begun(resumed, store_with(first)).ledger
    assert ledger.training.take_over(0) == PolicyVersion(5, 0)


def test_other_prompts_are_refused_unless_they_are_meant(tmp_path: Path):
    first = new_ledger(settings_in(tmp_path))
    first.training.take_over(0)
    resume = f"run.resume_from={checkpoint(tmp_path, first)}"
    changed = settings_in(tmp_path, resume, "run.seed=7")
    with pytest.raises(ConfigError, match=r"\[data\] or run\.seed has changed.*allow_change"):
        begun(changed)
    meant = settings_in(tmp_path, resume, "run.seed=7", "data.allow_change=true")
    begun(meant)


def test_run_that_reached_its_target_names_the_setting_to_change(tmp_path: Path):
    (tmp_path / "held_out.jsonl").write_text('{"prompt": "1"}\n')
    evaluated = (f"eval.file={tmp_path / 'held_out.jsonl'}", "eval.target=0.5")
    first = new_ledger(settings_in(tmp_path, *evaluated))
    first.training.take_over(0)
    (problem,) = first.lease("g", first.book.version, max_sequences=1, now_s=0.0)
    submit(first, header(problem.group_id, 0, first.book.version))
    first.score(Score(group_id=problem.group_id, sibling=0, lease_id=0, reward=1.0))
    assert first.book.finished
    resume = f"run.resume_from={checkpoint(tmp_path, first)}"
    again = settings_in(tmp_path, resume, *evaluated)
    with pytest.raises(ConfigError, match=r"this run has ended: eval\.target"):
        begun(again)
    higher = settings_in(tmp_path, resume, evaluated[0], "eval.target=2")
    begun(higher)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("eval.target=1",), r"eval\.target needs held-out problems"),
        (("eval.file=x.jsonl", "eval.patience=2"), r"set eval\.every_steps"),
        (("run.epochs=0.01", "run.groups_per_step=5"), r"fewer than the run\.groups_per_step = 5"),
    ],
)
def test_what_would_never_happen_is_refused(
    tmp_path: Path, overrides: tuple[str, ...], message: str
):
    with pytest.raises(ConfigError, match=message):
        new_ledger(settings_in(tmp_path, *overrides))


def test_a_tracker_that_does_not_start_is_named(tmp_path: Path):
    settings = settings_in(
        tmp_path, "logging.trackers=['mlflow']", "logging.mlflow.tracking_url='x'"
    )
    with pytest.raises(ConfigError, match=r"mlflow does not start.*unknown option tracking_url"):
        asyncio.run(start_trackers(settings))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (ledger_file(b""), "was trained without a broker"),
        (b"", "is damaged"),
        (b"garbage", "is damaged"),
        (ledger_file(b"x"), "cannot be read"),
    ],
)
def test_a_checkpoint_without_a_usable_ledger_is_refused(
    tmp_path: Path, content: bytes, message: str
):
    saved = tmp_path / "step-000001"
    saved.mkdir()
    (saved / LEDGER_FILE).write_bytes(content)
    settings = settings_in(tmp_path, f"run.resume_from={saved}")
    with pytest.raises(ConfigError, match=message):
        begun(settings)


def test_epochs_bound_the_prompts(tmp_path: Path):
    assert new_ledger(settings_in(tmp_path)).book.rules.max_prompts is None
    assert new_ledger(settings_in(tmp_path, "run.epochs=1.5")).book.rules.max_prompts == 15


def test_sync_mode_has_a_bound_of_zero(tmp_path: Path):
    rules = new_ledger(settings_in(tmp_path, "run.mode=sync")).book.rules
    assert (rules.bound.max_staleness_steps, rules.max_in_flight) == (0, 1)


async def test_the_run_ends_when_its_time_is_up():
    reasons: list[str] = []
    task = asyncio.create_task(end_after(0.05 / 3600, reasons.append, every_s=0.02))
    await until_async(lambda: reasons)
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert reasons
    assert "run.max_hours" in reasons[0]


def test_an_eval_metric_that_cannot_exist_is_refused_at_the_start(tmp_path: Path):
    (tmp_path / "held_out.jsonl").write_text('{"prompt": "1"}\n')
    settings = settings_in(
        tmp_path, f"eval.file={tmp_path / 'held_out.jsonl'}", "eval.metric=sums:mean"
    )
    with pytest.raises(ConfigError, match="the data sources are held_out"):
        load_prompts(settings)
