"""A run has an identity: nothing of another run gets in, and nothing is given out twice."""

import asyncio
import queue
import resource
import shutil
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from slipstream.broker.config import BrokerSettings
from slipstream.broker.data.prompts import load_prompts
from slipstream.broker.identity import IDS_PER_LIFE, RunIdentity, read_identity, write_identity
from slipstream.broker.ledger.commands import Ledger
from slipstream.broker.ledger.events import encode_event
from slipstream.broker.ledger.state import encode_state
from slipstream.broker.report.telemetry import Telemetry
from slipstream.broker.report.trackers.background import BackgroundTrackers
from slipstream.broker.server.keyring import KeyRing, make_client_key, revoke
from slipstream.broker.service import _begin, _make_server, _remembered
from slipstream.broker.startup import start_run
from slipstream.broker.store.base import Changes
from slipstream.broker.store.event_log import CountedTrail, Trail
from slipstream.broker.store.group_commit import GroupCommitter
from slipstream.wire.errors import ConfigError, RefusedError
from slipstream.wire.files.checkpoints import INFO_FILE, newest_checkpoint
from slipstream.wire.files.image_folder import ImageFolder
from slipstream.wire.files.run_folder import IDENTITY, IMAGES, NUM_EVENTS, TRAIL
from slipstream.wire.messages.broker import TakeOver, TookOver
from slipstream.wire.messages.versions import PolicyVersion
from tests.support.broker_starts import begun, checkpoint, new_ledger, settings_in, trained
from tests.support.checkpoint_infos import write_checkpoint
from tests.support.ledger_driver import lease, make_ledger, make_ready, make_rules
from tests.support.memory_store import MemoryStore, SharedMemory
from tests.support.running_broker import running
from tests.support.waiting import HANG_S, until_async

RUN = RunIdentity(run_id="a" * 32, life=2, epoch=7)


@contextmanager
def full_disk(path: Path) -> Iterator[None]:
    """Have nothing take the place of a file for a while."""
    kept = path.rename(path.with_name("kept"))
    path.mkdir()
    yield
    path.rmdir()
    kept.rename(path)


async def kept(store: MemoryStore) -> tuple[bytes | None, list[bytes]]:
    return await store.snapshot(), [event async for event in store.replay()]


def test_a_run_begins_with_an_id_that_folder_and_store_agree_on(tmp_path: Path):
    settings, store = settings_in(tmp_path), MemoryStore()
    first = begun(settings, store)
    known = read_identity(settings.run.folder)
    assert known == first.identity
    assert (len(first.identity.run_id), first.identity.life) == (32, 0)
    assert begun(settings, store).identity == first.identity
    assert begun(settings_in(tmp_path, "run.name=other")).identity.run_id != known.run_id


@pytest.mark.parametrize("restarted", [False, True])
def test_a_store_that_lost_everything_ends_the_run_with_the_way_out(
    tmp_path: Path, restarted: bool
):
    settings = settings_in(tmp_path)
    begun(settings)
    empty = MemoryStore()
    with pytest.raises(
        ConfigError, match=r"has started, and its store at .*redis is empty.*--resume"
    ):
        begun(settings, empty, restarted=restarted)
    assert asyncio.run(kept(empty)) == (None, []), "nothing was written"
    assert asyncio.run(empty.claim()) == 1, "it was not claimed"


def test_a_restart_never_goes_back_to_the_checkpoint_that_its_life_began_with(tmp_path: Path):
    settings = settings_in(tmp_path)
    first = begun(settings).ledger
    first.training.take_over(0)
    resumed = settings_in(tmp_path, f"run.resume_from={checkpoint(tmp_path, first)}")
    begun(resumed)
    with pytest.raises(ConfigError, match="has started, and its store at"):
        begun(resumed, MemoryStore(), restarted=True)


def test_resumes_on_emptied_stores_give_out_no_epoch_or_id_twice(tmp_path: Path):
    first = begun(settings_in(tmp_path)).ledger
    first.training.take_over(0)
    resumed = settings_in(tmp_path, f"run.resume_from={checkpoint(tmp_path, first)}")
    epochs, groups, leases = {1}, set[int](), set[int]()
    for life in (1, 2, 3):
        beginning = begun(resumed)  # on an empty store
        ledger = beginning.ledger
        for _ in range(2):  # learner restarts that no checkpoint records
            version = ledger.training.take_over(0)
            assert version.epoch not in epochs
            epochs.add(version.epoch)
        write_identity(resumed.run.folder, beginning.identity.granted(version.epoch))
        (work, *_) = ledger.lease("g", version, max_sequences=8, now_s=0.0)
        assert work.group_id // IDS_PER_LIFE == work.lease_id // IDS_PER_LIFE == life
        assert work.group_id not in groups
        assert work.lease_id not in leases
        groups.add(work.group_id)
        leases.add(work.lease_id)
        assert beginning.identity.life == life


def test_an_epoch_that_the_store_forgot_is_not_granted_again(tmp_path: Path):
    settings, store = settings_in(tmp_path), MemoryStore()
    beginning = begun(settings, store)
    snapshot = asyncio.run(store.snapshot())
    write_identity(settings.run.folder, beginning.identity.granted(5))  # events were cut off since
    behind = MemoryStore()
    asyncio.run(behind.commit(Changes(snapshot=snapshot)))
    assert begun(settings, behind).ledger.training.take_over(0) == PolicyVersion(6, 0)


async def test_ids_that_a_store_forgot_are_not_given_out_again(tmp_path: Path):
    settings, shared = settings_in(tmp_path), SharedMemory()
    store, prompts = MemoryStore(shared), load_prompts(settings)
    first = (await start_run(settings, prompts, store)).ledger
    first.training.take_over(0)
    granted = first.lease("g", first.book.version, max_sequences=16, now_s=0.0)
    events = [encode_event(event) for event in first.drain()[0]]
    for kept in (len(events) - 2, 0):  # the last lease and its group were lost, and everything
        shared.events = events[:kept]
        again = await start_run(settings, prompts, store, first_event=len(events))
        assert again.identity.life == 1
        version = again.ledger.training.take_over(0)
        new = again.ledger.lease("h", version, max_sequences=99, now_s=0.0)
        assert {group.lease_id for group in new}.isdisjoint(g.lease_id for g in granted)
        assert max(group.group_id for group in new) >= IDS_PER_LIFE
        restarted = await start_run(settings, prompts, MemoryStore(shared), restarted=True)
        assert restarted.identity == again.identity.granted(version.epoch - 1)
        write_identity(settings.run.folder, RunIdentity(run_id=again.identity.run_id))
        shared.snapshot = encode_state(new_ledger(settings).book.state)


@asynccontextmanager
async def broker(settings: BrokerSettings, shared: SharedMemory) -> AsyncIterator[Ledger]:
    """A life of a broker; in the end its store has acknowledged all of its ledger."""
    settings.run.folder.mkdir(parents=True, exist_ok=True)
    store, trackers = MemoryStore(shared), BackgroundTrackers([])
    telemetry, prompts = Telemetry(settings.run), load_prompts(settings)
    committer = GroupCommitter(store)
    beginning, trail = await _begin(settings, prompts, store, restarted=False)
    server = await _make_server(
        settings,
        beginning,
        trail,
        store,
        committer,
        telemetry,
        trackers,
        None,
        ImageFolder(settings.run.folder / IMAGES),
    )
    writing = asyncio.create_task(committer.run())
    yield beginning.ledger
    server._persist()
    await until_async(lambda: not committer.backlog)
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    server.close_records()
    trackers.close()


@pytest.mark.parametrize("trail", ["none", "removed", "kept", "all that is kept"])
async def test_a_store_that_lost_its_end_is_noticed_with_and_without_a_trail(
    trail: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Without one the run went on under ids that it had given out."""
    size = 0 if trail == "none" else 1 << 20
    settings = settings_in(tmp_path, f"broker.max_trail_bytes={size}")
    shared, folder = SharedMemory(), settings.run.folder
    async with broker(settings, shared) as first:
        first.training.take_over(0)
        given = first.lease("g", first.book.version, max_sequences=99, now_s=0.0)
    async with broker(settings, shared) as same:
        assert same.book.state.life == 0, "nothing was lost"
    assert "the store lacks" not in caplog.text
    del shared.events[-3:]
    if trail == "removed":
        shutil.rmtree(folder / TRAIL)
    if trail == "all that is kept":  # by a version that counted nowhere else
        (folder / NUM_EVENTS).unlink()
    async with broker(settings, shared) as again:
        assert again.book.state.life == 1
        new = again.lease("h", again.book.version, max_sequences=99, now_s=0.0)
    assert "the store lacks the last 3 events that it acknowledged" in caplog.text
    assert min(group.lease_id for group in new) > max(group.lease_id for group in given)
    async with broker(settings, shared) as once:
        assert once.book.state.life == 1, "it is noticed once"


def test_a_count_of_events_that_is_none_is_named(tmp_path: Path):
    (tmp_path / NUM_EVENTS).write_text("many\n")
    with pytest.raises(ConfigError, match=r"num_events holds no number: put it back, or remove it"):
        CountedTrail(tmp_path / NUM_EVENTS, Trail())


def test_the_count_of_events_is_put_on_disk_by_itself(tmp_path: Path):
    """A crash of the machine took it back to what the kernel had written by chance."""
    synced: queue.Queue[int] = queue.Queue()
    file = tmp_path / NUM_EVENTS
    counted = CountedTrail(file, Trail(), sync=lambda _: synced.put(int(file.read_text())))
    counted.append(0, 1.0, [b"a", b"b"])
    assert synced.get(timeout=HANG_S) == 2
    counted.append(2, 1.0, [b"c"])
    counted.append(3, 1.0, [b"d"])
    counted.close()
    assert synced.queue[-1] == 4


def test_of_counts_that_a_slow_disk_has_not_taken_one_waits_at_most(tmp_path: Path):
    begun, is_free = queue.Queue[int](), threading.Event()

    def sync(file: int) -> None:
        begun.put(file)
        is_free.wait(HANG_S)

    counted = CountedTrail(tmp_path / NUM_EVENTS, Trail(), sync=sync)
    for number in range(9):
        counted.append(number, 1.0, [b"a"])
    is_free.set()
    counted.close()
    assert begun.qsize() <= 3, "the first one, the one that waited, and that of the end"


def test_room_is_asked_for_only_where_a_count_of_events_cannot_be_written_for_want_of_it(
    tmp_path: Path,
):
    (tmp_path / NUM_EVENTS).mkdir()
    with pytest.raises(ConfigError, match=r"cannot write .*num_events: Is a directory$"):
        CountedTrail(tmp_path / NUM_EVENTS, Trail())


def test_a_full_disk_is_named_where_events_are_counted_for_the_first_time(tmp_path: Path):
    file, limits = tmp_path / NUM_EVENTS, resource.getrlimit(resource.RLIMIT_FSIZE)
    CountedTrail(tmp_path / "before", Trail()).close()
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
        with pytest.raises(ConfigError, match=rf"cannot write {file}: File too large; make room"):
            CountedTrail(file, Trail())
        later = CountedTrail(tmp_path / "before", Trail())  # of a run that goes on
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    later.close()


async def test_the_store_of_a_run_whose_folder_is_gone_is_refused_and_not_touched(tmp_path: Path):
    settings, shared = settings_in(tmp_path), SharedMemory()
    store = MemoryStore(shared)
    prompts = load_prompts(settings)
    old = await start_run(settings, prompts, store)
    old.ledger.training.take_over(0)
    trained(old.ledger, 1)
    await store.commit(Changes(snapshot=encode_state(old.ledger.book.state)))
    (settings.run.folder / IDENTITY).unlink()
    before = await kept(store)
    with pytest.raises(ConfigError, match="a run that this folder knows nothing of"):
        await start_run(settings, prompts, MemoryStore(shared))
    write_identity(settings.run.folder, RUN)
    with pytest.raises(
        ConfigError, match=r"holds another run under this name.*nothing was changed"
    ):
        await start_run(settings, prompts, MemoryStore(shared))
    assert await kept(store) == before
    await store.commit(Changes(snapshot=before[0]))  # its owner keeps writing there


async def test_events_after_a_first_snapshot_are_a_run_that_has_begun(tmp_path: Path):
    settings, shared = settings_in(tmp_path), SharedMemory()
    store, prompts = MemoryStore(shared), load_prompts(settings)
    old = await start_run(settings, prompts, store)  # with a snapshot of nothing
    old.ledger.training.take_over(0)
    events, _ = old.ledger.drain()
    await store.commit(Changes(events=[encode_event(event) for event in events]))
    other = settings_in(tmp_path, "run.seed=7")
    with pytest.raises(ConfigError, match=r"run\.seed has changed"):
        await start_run(other, load_prompts(other), MemoryStore(shared))
    (settings.run.folder / IDENTITY).unlink()
    with pytest.raises(ConfigError, match="a run that this folder knows nothing of"):
        await start_run(settings, prompts, MemoryStore(shared))
    await store.commit(Changes(events=[]))  # it was not claimed


async def test_start_with_other_data_does_not_end_the_running_broker(tmp_path: Path):
    settings, shared = settings_in(tmp_path), SharedMemory()
    store = MemoryStore(shared)
    running = await start_run(settings, load_prompts(settings), store)
    running.ledger.training.take_over(0)
    trained(running.ledger, 1)
    await store.commit(Changes(snapshot=encode_state(running.ledger.book.state)))
    other = settings_in(tmp_path, "run.seed=7")
    with pytest.raises(ConfigError, match=r"run\.seed has changed"):
        await start_run(other, load_prompts(other), MemoryStore(shared))
    await store.commit(Changes(events=[]))


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path):
    first = begun(settings_in(tmp_path, "run.name=other")).ledger
    first.training.take_over(0)
    saved = checkpoint(tmp_path, first)
    settings = settings_in(tmp_path)
    begun(settings)
    with pytest.raises(ConfigError, match="the checkpoint is of another run than"):
        begun(settings_in(tmp_path, f"run.resume_from={saved}"))


@pytest.mark.parametrize(
    "text", ["{", '{"run_id": "a", "epoch": -1}', f'{{"run_id": "a", "life": {10**9}}}']
)
def test_an_identity_that_cannot_be_read_is_named(tmp_path: Path, text: str):
    (tmp_path / IDENTITY).write_text(text)
    with pytest.raises(ConfigError, match=r"cannot read .*identity\.json"):
        read_identity(tmp_path)
    assert read_identity(tmp_path / "nowhere") is None


async def test_an_epoch_is_granted_once_it_is_on_disk(short_folder: Path):
    """Repeated after a full disk it was granted unwritten, and again in the next life."""
    settings = settings_in(short_folder)
    beginning = await start_run(settings, load_prompts(settings), MemoryStore())
    ledger, identity = beginning.ledger, settings.run.folder / IDENTITY
    grant = _remembered(settings.run, beginning.identity)
    async with running(short_folder, ledger, on_epoch=grant) as it:
        learner = await it.client("learner", "learner")
        with full_disk(identity):
            taking_over = asyncio.create_task(learner.ask(TakeOver(step=0), TookOver))
            rejected = it.server.telemetry.rejected
            await until_async(lambda: rejected["slow_down"] > 1 or taking_over.done())
            assert (ledger.book.version, ledger.book.state.learner) == (PolicyVersion(0, 0), "")
        took, _ = await taking_over
        assert took.version == PolicyVersion(1, 0)
        assert read_identity(settings.run.folder) == beginning.identity.granted(1)
    resumed = settings_in(short_folder, f"run.resume_from={checkpoint(short_folder, ledger)}")
    trained(ledger, 1)
    again = await start_run(resumed, load_prompts(resumed), MemoryStore())  # its store was lost
    assert again.ledger.training.take_over(0) == PolicyVersion(2, 0)


async def test_a_take_over_that_had_to_wait_for_the_disk_drops_what_a_revoked_key_sent(
    short_folder: Path,
):
    settings = settings_in(short_folder)
    beginning = await start_run(settings, load_prompts(settings), MemoryStore())
    ledger = beginning.ledger
    ledger.training.take_over(0)
    make_ready(ledger, lease(ledger, "gpu7/generator-0", max_sequences=8)[:1])
    assert isinstance(ledger.training.deliver(ledger.book.version), list)
    make_client_key(short_folder / "keys", "gpu7", "generator")
    revoke(short_folder / "keys", "gpu7", discard=True)
    ring, grant = KeyRing(short_folder / "keys"), _remembered(settings.run, beginning.identity)
    async with running(short_folder, ledger, on_epoch=grant, keys=ring) as it:
        it.server._clients.refresh_keys()  # it would, within a second
        assert ledger.book.state.batches, "the learner before has it in hand"
        learner = await it.client("learner", "learner")
        with full_disk(settings.run.folder / IDENTITY):
            taking_over = asyncio.create_task(learner.ask(TakeOver(step=0), TookOver))
            await until_async(lambda: it.server.telemetry.rejected["slow_down"] > 0)
        await taking_over
        assert (dict(ledger.book.state.dropped), ledger.book.state.batches) == ({"revoked": 1}, {})


# ---- in the ledger and at the door ---------------------------------------------


def test_a_learner_with_weights_of_steps_that_were_given_up_is_refused():
    ledger = make_ledger(make_rules(max_staleness_steps=0, groups_per_step=1, total_steps=20))
    ledger.training.take_over(0)
    trained(ledger, 6)
    ledger.training.take_over(4, "step-4", held=PolicyVersion(1, 4))
    for _ in range(2):
        assert isinstance(ledger.training.deliver(ledger.book.version), list)
        ledger.training.commit(ledger.book.version.next(), {})
    trained(ledger, 1)
    with pytest.raises(RefusedError, match=r"holds v1\.6, which v2\.7 does not descend from"):
        ledger.training.take_over(6, "step-6", held=PolicyVersion(1, 6))
    assert ledger.training.take_over(6, "step-6", held=PolicyVersion(2, 6)) == PolicyVersion(3, 6)


def test_no_token_of_a_life_that_was_given_up_descends_from_anything():
    ledger = make_ledger(make_rules(max_staleness_steps=0, groups_per_step=1, total_steps=20))
    ledger.training.take_over(0)
    trained(ledger, 6)
    ledger.book.state.granted_epoch = 3  # 2 and 3 were those of another life, from step 4 on
    assert ledger.training.take_over(6) == PolicyVersion(4, 6)
    assert ledger.book.is_ancestor(PolicyVersion(1, 6))
    assert not ledger.book.is_ancestor(PolicyVersion(2, 5))
    assert not ledger.book.is_ancestor(PolicyVersion(3, 0))


async def test_a_client_of_another_run_is_refused_and_changes_nothing(short_folder: Path):
    async with running(short_folder) as it:
        it.ledger.book.state.run_id = "b" * 32
        learner = await it.client("learner", "learner")
        assert learner.run_id == "b" * 32
        for held in (None, PolicyVersion(1, 0)):
            with pytest.raises(RefusedError, match=r"with the id b+, not a+"):
                await learner.ask(TakeOver(step=0, held=held, run_id="a" * 32), TookOver)
        assert it.ledger.book.version == PolicyVersion(0, 0)
        await learner.ask(TakeOver(step=0, run_id="b" * 32), TookOver)


def test_a_checkpoint_that_cannot_be_read_is_passed_over_for_an_older_one(tmp_path: Path):
    two, four, six = (write_checkpoint(tmp_path, 1, step) for step in (2, 4, 6))
    (six / INFO_FILE).write_text("{")
    (two / INFO_FILE).unlink()
    assert newest_checkpoint(tmp_path) == four
