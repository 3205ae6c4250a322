import pytest

from slipstream.learner.layout import Layout
from slipstream.learner.nodes.verdict import (
    EXIT_COLLECTIVE,
    Ended,
    View,
    ended_by,
    is_of_collective,
    verdict_of,
)
from slipstream.wire.errors import PublishError

LAYOUT = Layout(ranks=6, ranks_per_node=2)
KNOWN = Ended(node=2, text="it broke")


@pytest.mark.parametrize("node", [0, 1])
def test_while_all_is_well_nothing_ends(node: int):
    assert verdict_of(View(node=node)) is None
    assert verdict_of(View(node=node, stopping={1}, stop_is_ours=True)) is None


def test_what_the_nodes_know_goes_before_what_one_sees():
    view = View(node=1, ended=KNOWN, lost="closed", silent="long", dead_ranks={3: -9})
    assert verdict_of(view) == KNOWN


def test_a_rank_that_died_here_is_told_with_its_code():
    view = View(node=1, dead_ranks={3: -9, 2: 1}, lost="closed")
    assert verdict_of(view) == Ended(node=1, text="its rank 2 ended with code 1")


def test_a_rank_whose_collective_failed_is_not_the_reason_unless_no_other_is_found():
    ranks = {3: EXIT_COLLECTIVE}
    assert verdict_of(View(node=1, dead_ranks=ranks)) is None
    assert verdict_of(View(node=1, dead_ranks=ranks, lost="closed", is_unexplained=True)) == Ended(
        node=0, text="closed"
    )
    assert verdict_of(View(node=1, dead_ranks=ranks | {2: -9})) == Ended(
        node=1, text="its rank 2 ended with code -9"
    )
    text = f"its rank 3 ended with code {EXIT_COLLECTIVE}"
    assert verdict_of(View(node=1, dead_ranks=ranks, is_unexplained=True)) == Ended(
        node=1, text=text
    )


def test_an_error_of_a_collective_is_known_by_its_text():
    for error, is_so in [
        (RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed"), True),
        (RuntimeError("NCCL error in: ncclRemoteError"), True),
        (RuntimeError("out of memory"), False),
        (PublishError("gloo is torn"), False),
    ]:
        assert is_of_collective(error) == is_so


def test_a_store_that_is_gone_or_silent_is_the_end_of_node_0():
    assert verdict_of(View(node=1, lost="closed")) == Ended(node=0, text="closed")
    assert verdict_of(View(node=1, silent="for 60 s")) == Ended(node=0, text="for 60 s")


def test_node_0_names_a_node_that_fell_silent():
    view = View(node=0, silent_nodes={2: "for 60 s", 1: "for 61 s"})
    assert verdict_of(view) == Ended(node=1, text="for 61 s")


def test_a_stop_of_another_node_alone_ends_the_learner_and_node_0_decides_that():
    text = "it was asked to end, and node 0 was not"
    assert verdict_of(View(node=0, stopping={2})) == Ended(node=2, text=text)
    assert verdict_of(View(node=1, stopping={2})) is None


def test_the_line_names_node_host_and_ranks_and_is_one_line():
    ended = Ended(node=1, text="a\nb\x1b[2J" + "x" * 5000)
    line = ended.line(LAYOUT, {1: "b"})
    assert line.startswith("node 1 (host b, ranks 2-3) ended: a b [2J")
    assert len(line) < 2_100
    assert line.isprintable()


def test_what_was_asked_for_ends_with_0():
    for ended, node, asked, code in [
        (Ended(node=0, text="", orderly=True), 1, False, 0),
        (Ended(node=0, text=""), 1, False, 1),
        (Ended(node=1, text="", orderly=True), 0, False, 1),
        (Ended(node=1, text="", orderly=True), 2, False, 1),
        (Ended(node=1, text="", orderly=True), 0, True, 0),
        (Ended(node=1, text=""), 0, True, 1),  # it could not save
        (Ended(node=1, text=""), 1, True, 0),
        (Ended(node=0, text=""), 2, True, 0),
    ]:
        assert ended.exit_code(node, asked_to_stop=asked) == code


def test_an_error_is_told_by_its_first_line():
    assert ended_by(1, PublishError("torn\nmore")) == Ended(node=1, text="torn")
    assert ended_by(1, ValueError("bad\nmore")) == Ended(node=1, text="ValueError: bad")
    asked = Ended(node=0, text="it was asked to end", orderly=True)
    assert ended_by(0, SystemExit(0)) == asked
