from collections import Counter

import pytest

from slipstream.broker.data.mixture import BLOCK, PromptSource, checked_weights, shares
from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.trajectory import Prompt


def rows(name: str, count: int) -> list[Prompt]:
    return [Prompt(prompt=f"{name}{i}", data_source=name, row=i) for i in range(count)]


ROWS = rows("a", 20)


def texts(source: PromptSource, cursors: range) -> list[str]:
    return [source.at(cursor).text for cursor in cursors]


def test_each_epoch_holds_every_prompt_once_in_an_order_of_its_own():
    source = PromptSource([ROWS], seed=1)
    first, second = texts(source, range(20)), texts(source, range(20, 40))
    assert sorted(first) == sorted(second) == sorted(p.text for p in ROWS)
    assert first != second


@pytest.mark.parametrize("weights", [(), (3.0, 1.0)])
def test_the_order_depends_on_seed_and_cursor_alone(weights: tuple[float, ...]):
    sources = [ROWS, rows("b", 7)]
    forward = texts(PromptSource(sources, seed=1, weights=weights), range(1500))
    source = PromptSource(sources, seed=1, weights=weights)
    backward = [source.at(cursor).text for cursor in reversed(range(1500))]
    assert backward[::-1] == forward
    assert texts(PromptSource(sources, seed=2, weights=weights), range(1500)) != forward


def test_without_weights_all_rows_are_one_pool():
    source = PromptSource([ROWS, rows("b", 5)], seed=3)
    assert source.num_rows == 25
    epoch = texts(source, range(25))
    assert sorted(epoch) == sorted(p.text for p in [*ROWS, *rows("b", 5)])
    assert {text[0] for text in epoch[:15]} == {"a", "b"}, "mixed, not one after the other"


def test_file_order_is_kept_without_shuffling():
    source = PromptSource([ROWS, rows("b", 5)], seed=3, shuffle=False)
    once = [p.text for p in [*ROWS, *rows("b", 5)]]
    assert texts(source, range(50)) == once + once


def test_weights_give_every_block_its_shares_exactly_and_each_source_its_own_epochs():
    source = PromptSource([ROWS, rows("b", 300)], seed=5, weights=[1.0, 2.0])
    for block in range(3):
        at = range(block * BLOCK, (block + 1) * BLOCK)
        assert Counter(source.at(c).data_source for c in at) == {"a": 333, "b": 667}
    of_b = [p.row for p in map(source.at, range(BLOCK)) if p.data_source == "b"]
    assert sorted(of_b[:300]) == sorted(of_b[300:600]) == list(range(300))
    of_a = [p.row for p in map(source.at, range(3 * BLOCK)) if p.data_source == "a"]
    assert max(Counter(of_a).values()) - min(Counter(of_a).values()) == 1


def test_weighted_sources_keep_their_file_order_without_shuffling():
    source = PromptSource([ROWS, rows("b", 300)], seed=5, weights=[1.0, 2.0], shuffle=False)
    of_a = [p.row for p in map(source.at, range(2 * BLOCK)) if p.data_source == "a"]
    assert of_a == [i % 20 for i in range(666)]


def test_the_largest_remainders_get_what_rounding_left():
    assert shares([1, 1, 1], 10) == [4, 3, 3]
    assert shares([0.5, 0.25, 0.25], 1000) == [500, 250, 250]
    assert shares([5, 3, 2.6], 10) == [5, 3, 2]  # 4.72, 2.83 and 2.45
    assert shares([5, 3, 2.9], 10) == [4, 3, 3]  # 4.59, 2.75 and 2.66


def test_all_sources_have_a_weight_or_none():
    assert checked_weights({"a": 0.0, "b": 0.0}, "data.sources") == []
    assert checked_weights({"a": 1.0, "b": 3.0}, "data.sources") == [1.0, 3.0]
    with pytest.raises(ConfigError, match=r"data\.sources\.b\.weight is not set"):
        checked_weights({"a": 1.0, "b": 0.0}, "data.sources")
    with pytest.raises(ConfigError, match=r"data\.sources\.b\.weight = 0\.0001 is less than"):
        checked_weights({"a": 1.0, "b": 0.0001}, "data.sources")
