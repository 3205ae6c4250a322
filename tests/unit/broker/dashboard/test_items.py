"""Recorded trajectories are found by group, by position in the data, by words and by staleness."""

import json
from pathlib import Path

from slipstream.broker.dashboard.items import RecordedItems
from slipstream.broker.ledger.events import Dropped, encode_event
from slipstream.broker.store.event_log import FolderTrail
from slipstream.wire.files.run_folder import TRAIL, TRAINED
from tests.support.ledger_driver import lease, make_ledger, make_ready, make_rules


def row(group_id: int, prompt: str, *steps: int) -> str:
    """One trained at step 5 whose tokens were chosen by these learner steps."""
    fields = {
        "step": 5,
        "group_id": group_id,
        "sibling": 0,
        "prompt": prompt,
        "answer": "46",
        "reward": 1.0,
        "num_prompt_tokens": 1,
        "token_ids": [1, *steps],
        "version_runs": [
            {"first_token": 1 + i, "version": f"v1.{step}", "step": step}
            for i, step in enumerate(steps)
        ],
        "logprob_diffs": [0.0 for _ in steps],
    }
    return json.dumps(fields) + "\n"


def recorded(folder: Path, *rows: str) -> RecordedItems:
    (folder / TRAINED).parent.mkdir(parents=True)
    (folder / TRAINED).write_text("".join(rows))
    return RecordedItems(folder)


def groups(items: RecordedItems, text: str = "", lag: int | None = None) -> list[int]:
    return [one.group_id for one in items.find(text, lag=lag).items]


def test_a_group_is_not_lost_among_prompts_that_hold_its_number(tmp_path: Path):
    numbers = [row(100 + i, f"17+{i}=", 5) for i in range(80)]
    items = recorded(tmp_path, row(17, "What is it?", 5), *numbers)
    assert groups(items, "g17") == [17]
    assert groups(items, " G17 ") == [17]
    assert groups(items, "g18") == []
    assert len(groups(items, "17+")) == 50


def test_a_number_is_a_position_in_the_data_as_the_ledger_has_it(tmp_path: Path):
    ledger = make_ledger(make_rules(total_steps=9))
    ledger.training.take_over(0)
    leased = lease(ledger, max_sequences=6)
    make_ready(ledger, leased[:1])
    first, second = leased[0].group_id, leased[1].group_id
    events = [*ledger.drain()[0], Dropped(group_id=second, reason="stale")]
    trail = FolderTrail(tmp_path / TRAIL, 1 << 20)
    trail.append(0, 9.0, [encode_event(event) for event in events])
    trail.close()
    items = recorded(tmp_path, row(first, "7", 5), row(77, "0", 5))
    assert groups(items, "0") == [first]
    assert groups(items, "3") == []
    assert items.find("0").groups == [first]
    assert items.find("1").groups == [second], "it was issued and left no recorded answer"
    assert items.find("3").groups == items.find("1+").groups == []

    unrecorded = items.trajectory(second, 0)
    assert not unrecorded.found
    assert unrecorded.prompt == "train 1"
    assert unrecorded.outcome == "dropped (stale)"
    assert unrecorded.life[-1].what == "dropped: stale"
    assert items.trajectory(999, 0).prompt == ""


def test_a_staleness_finds_whatever_has_tokens_of_it(tmp_path: Path):
    items = recorded(tmp_path, row(1, "a", 3, 5), row(2, "b", 4), row(3, "c", 5))
    assert groups(items, lag=0) == [3, 1]
    assert groups(items, lag=1) == [2]
    assert groups(items, lag=2) == [1]
    assert [one.lag for one in items.find().items] == [0, 1, 2], "of the oldest token"
