"""The trail of events in the run folder, and the life of one item read from it."""

import struct
from pathlib import Path

import pytest

from slipstream.broker.ledger.commands import Ledger
from slipstream.broker.ledger.events import Requeued, encode_event
from slipstream.broker.store.event_log import FolderTrail, read_trail, segments_in
from slipstream.broker.store.item_history import groups_at, trace_group, trace_item
from slipstream.wire.messages.trajectory import Prompt
from tests.support.ledger_driver import lease, make_ledger, make_ready, make_rules, train_step


class Written:
    """A ledger whose events go into a trail, a second apart."""

    def __init__(self, folder: Path, max_bytes: int = 1 << 20) -> None:
        self.folder = folder
        self.ledger: Ledger = make_ledger(make_rules(total_steps=99))
        self.trail = FolderTrail(folder, max_bytes)
        self.now_s = 0.0
        self.written = 0
        self.ledger.training.take_over(0)

    def flush(self) -> None:
        events, _ = self.ledger.drain()
        self.now_s += 1.0
        self.trail.append(self.written, self.now_s, [encode_event(event) for event in events])
        self.written += len(events)

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            make_ready(self.ledger, lease(self.ledger))
            train_step(self.ledger)
            self.flush()


def test_item_history_covers_issue_to_checkpoint(tmp_path: Path):
    it = Written(tmp_path / "ledger")
    granted = lease(it.ledger, max_sequences=4)
    it.flush()
    it.ledger.release("generator-0", granted[1].lease_id, "failed")
    it.flush()
    make_ready(it.ledger, [granted[0], *lease(it.ledger, "generator-1", max_sequences=2)])
    train_step(it.ledger)
    it.flush()
    it.ledger.training.take_over(0, "step-000000")
    train_step(it.ledger)
    it.ledger.training.seal(it.ledger.book.version, 1, oldest_kept=1)
    it.flush()
    it.trail.close()

    trace = trace_item(read_trail(it.folder), "1")
    assert trace is not None
    assert (trace.group_id, trace.position, trace.prompt) == (1, 1, "train 1")
    assert [(moment.at_s, moment.what) for moment in trace.life] == [
        (1.0, "issued for training"),
        (1.0, "leased to generator-0, which runs step 0"),
        (2.0, "lease ended: failed"),
        (3.0, "leased to generator-1, which runs step 0"),
        (3.0, "sibling 0: 4 tokens by v1.0 (stop)"),
        (3.0, "sibling 1: 4 tokens by v1.0 (stop)"),
        (3.0, "sibling 0: reward 0"),
        (3.0, "sibling 1: reward 1"),
        (3.0, "in the batch of step 0"),
        (3.0, "trained by the step that made v1.1"),
        (4.0, "a learner went back to step 0 (step-000000)"),
        (4.0, "trained by the step that made v2.1"),
        (4.0, "sealed by the checkpoint of step 1"),
    ]
    assert trace.outcome == "trained by the step that made v2.1"
    for wanted in ("g1", "train 1"):
        assert trace_item(read_trail(it.folder), wanted) == trace
    assert trace_item(read_trail(it.folder), "g77") is None


def test_a_group_is_found_without_reading_what_was_written_before_it(tmp_path: Path):
    it = Written(tmp_path, max_bytes=20_000)
    it.train(20)
    newest = max(one.group_id for one in lease(it.ledger))
    it.flush()
    it.trail.close()
    lives = {g: trace_item(read_trail(tmp_path), f"g{g}") for g in (newest, newest - 20)}
    oldest = segments_in(tmp_path)[0]
    oldest.write_bytes(struct.pack("<IQd4s", 4, 0, 0.0, b"\xff" * 4))  # reading it fails
    for group_id, life in lives.items():
        assert life is not None
        assert trace_group(tmp_path, group_id) == life
    assert trace_group(tmp_path, newest + 1) is None


def test_groups_are_found_by_their_position_in_the_data(tmp_path: Path):
    it = Written(tmp_path)
    leased = lease(it.ledger, max_sequences=6)
    it.flush()
    it.trail.append(
        it.written,
        2.0,
        [encode_event(Requeued(group_id=90, of=1, position=1, prompt=Prompt(prompt=""), size=2))],
    )
    it.trail.close()
    assert [one.group_id for one in leased] == [0, 1, 2]
    assert groups_at(tmp_path, 1) == {1, 90}
    assert groups_at(tmp_path, 2) == {2}
    assert groups_at(tmp_path, 1_000) == set()


def test_a_prompt_that_is_answered_again_is_found_under_its_new_id():
    prompt = Prompt(prompt="1+1=")
    again = Requeued(group_id=90, of=77, position=5, prompt=prompt, size=2)
    trail = [(0, 1.0, encode_event(again))]
    trace = trace_item(trail, "g90")
    assert trace is not None
    assert (trace.position, trace.prompt) == (5, "1+1=")
    assert [moment.what for moment in trace.life] == ["the prompt of g77 again"]


@pytest.mark.parametrize("end", [b"cut o", bytes(4096)], ids=["cut", "zeros"])
def test_a_broker_that_starts_again_writes_only_what_is_missing(tmp_path: Path, end: bytes):
    it = Written(tmp_path)
    lease(it.ledger)
    events, _ = it.ledger.drain()
    stored = [encode_event(event) for event in events]
    it.trail.append(0, 1.0, stored[:3])
    it.trail.close()
    segment = segments_in(tmp_path)[0]
    segment.write_bytes(segment.read_bytes() + end)
    again = FolderTrail(tmp_path, 1 << 20)
    again.append(0, 2.0, stored)
    again.close()
    assert [number for number, _, _ in read_trail(tmp_path)] == list(range(len(stored)))


def test_the_oldest_history_goes_when_there_is_too_much(tmp_path: Path):
    it = Written(tmp_path, max_bytes=40_000)
    it.train(30)
    it.trail.close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 44_000
    numbers = [number for number, _, _ in read_trail(tmp_path)]
    assert numbers[0] > 0
    assert numbers[-1] == it.written - 1


def test_events_that_the_store_lost_leave_the_trail_and_their_numbers_are_used_again(
    tmp_path: Path,
):
    it = Written(tmp_path, max_bytes=2_000)  # several segments
    for _ in range(6):
        lease(it.ledger, max_sequences=2)
        it.flush()
    before = list(read_trail(tmp_path))
    assert len(segments_in(tmp_path)) > 2
    cut = before[len(before) // 2][0]
    it.trail.cut_from(cut)
    assert it.trail.next_event == cut
    assert list(read_trail(tmp_path)) == before[: len(before) // 2]
    it.trail.append(cut, 99.0, [b"another"])
    it.trail.close()
    assert list(read_trail(tmp_path))[-1] == (cut, 99.0, b"another")
    again = FolderTrail(tmp_path, 2_000)
    assert again.next_event == cut + 1
    again.close()


def test_of_a_long_prompt_the_beginning_is_shown(tmp_path: Path):
    it = Written(tmp_path / "ledger")
    text = "".join(f"{number:04d}" for number in range(2_000))
    it.ledger.issuing._prompt_at = lambda _cursor: Prompt(prompt=text)
    lease(it.ledger, max_sequences=2)
    it.flush()
    it.trail.close()
    trace = trace_item(read_trail(it.folder), "0")
    assert trace is not None
    assert trace.prompt == text[:4_000]
