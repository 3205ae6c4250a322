"""Items that are given up, kept, listed and issued again."""

from tests.support.begun_ledgers import begun, score
from tests.support.ledger_driver import (
    generate,
    lease,
    make_ready,
    stored,
    train_step,
    with_a_dead_letter,
)


def test_group_without_a_reward_becomes_a_dead_letter_with_all_failures():
    ledger, group_id = with_a_dead_letter()
    assert ledger.book.state.dropped == {"reward_unavailable": 1}
    letter = stored(ledger.book.state).dead_letters[group_id]
    named = (letter.reason, letter.prompt.prompt, letter.step)
    assert named == ("reward_unavailable", "train 0", 0)
    assert [(one.by, one.sibling, one.version) for one in letter.failures] == [
        ("a@1", 1, "7"),
        ("b@1", 1, "7"),
    ]
    assert len(letter.failures[0].excerpt) == 500


def test_a_dead_letter_is_issued_again_as_a_new_item_and_every_count_holds():
    ledger, group_id = with_a_dead_letter()
    done, refused = ledger.retry([group_id, 77])
    assert refused == {77: "no such dead letter"}
    new = done[group_id]
    assert (ledger.book.groups[new].retry_of, ledger.book.state.dead_letters) == (group_id, {})
    assert (ledger.book.state.issued, ledger.book.unaccounted()) == (2, 0)
    (again,) = lease(ledger, max_sequences=2)
    assert (again.group_id, again.prompt.prompt, again.position) == (new, "train 0", 0)
    make_ready(ledger, [again])
    (trained,) = train_step(ledger)
    assert trained.group_id == new
    assert ledger.book.state.retried == 1


def test_a_dead_letter_is_not_issued_again_when_the_run_takes_no_more_prompts():
    ledger, group_id = with_a_dead_letter()
    ledger.plan_stop("enough")
    assert ledger.retry([group_id]) == ({}, {group_id: "the run takes no more prompts"})
    assert ledger.drop_letters([group_id, 5]) == ({group_id: -1}, {5: "no such dead letter"})
    assert ledger.book.state.dead_letters == {}


def test_poisonous_prompt_is_a_dead_letter_that_names_its_victims():
    ledger = begun(groups_per_step=1, max_attempts=2)
    for holder in ("generator-0@1", "generator-1@1"):
        lease(ledger, holder, max_sequences=2)
        ledger.release_all(holder, "restarted")
    (letter,) = ledger.book.state.dead_letters.values()
    assert letter.reason == "poison"
    assert [one.by for one in letter.failures] == ["generator-0@1", "generator-1@1"]


def test_the_oldest_dead_letters_make_room_and_are_counted():
    ledger, first = with_a_dead_letter(max_dead_letters=1)
    (group,) = lease(ledger, max_sequences=2)
    generate(ledger, group)
    for _ in range(2):
        score(ledger, group.group_id, 0, unavailable="no")
    assert list(ledger.book.state.dead_letters) == [group.group_id] != [first]
    assert ledger.book.state.letters_forgotten == 1
