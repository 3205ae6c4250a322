import pytest

from slipstream.learner.layout import Layout, Place, place_of
from slipstream.wire.errors import ConfigError
from slipstream.wire.settings.rendezvous import Address

FOUR_ON_TWO = Layout(ranks=4, ranks_per_node=2)


def test_ranks_are_numbered_node_by_node():
    layout = Layout.of(ranks=6, ranks_per_node=2, tensor_parallel=2)
    assert layout.nodes == 3
    assert [list(layout.ranks_of(node)) for node in range(3)] == [[0, 1], [2, 3], [4, 5]]


def test_no_ranks_per_node_is_one_node():
    layout = Layout.of(ranks=4, ranks_per_node=0, tensor_parallel=4)
    assert (layout.nodes, list(layout.ranks_of(0))) == (1, [0, 1, 2, 3])


def test_nodes_that_cannot_be_are_refused():
    for ranks, per_node, tensor, why in [
        (4, 3, 1, "learner.ranks = 4 is not a multiple of learner.ranks_per_node = 3"),
        (2, 4, 1, "learner.ranks = 2 is not a multiple of learner.ranks_per_node = 4"),
        (
            4,
            1,
            2,
            "learner.ranks_per_node = 1 is not a multiple of learner.tensor_parallel = 2: the "
            "shards of a layer exchange tensors all the time, and stay on one node",
        ),
    ]:
        with pytest.raises(ConfigError) as refusal:
            Layout.of(ranks=ranks, ranks_per_node=per_node, tensor_parallel=tensor)
        assert str(refusal.value) == why


def test_a_node_is_named_with_its_ranks():
    assert FOUR_ON_TWO.named(1, "b") == "node 1 (host b, ranks 2-3)"
    assert Layout(2, 1).named(1) == "node 1 (rank 1)"


def test_one_node_needs_no_options_and_takes_none():
    layout = Layout(2, 2)
    assert place_of(layout, None, None) == Place(layout)
    for options in ((0, None), (None, "a:1"), (0, "a:1")):
        with pytest.raises(ConfigError, match=r"is one node: .*learner\.ranks_per_node"):
            place_of(layout, *options)


def test_several_nodes_need_both_options():
    place = place_of(FOUR_ON_TWO, 1, "10.0.0.1:29400")
    assert list(place.ranks) == [2, 3]
    assert place.address == Address("10.0.0.1", 29400)
    for options in ((None, None), (0, None), (None, "a:1")):
        with pytest.raises(ConfigError, match=r"needs 2 nodes: .* --node K --rendezvous HOST:PORT"):
            place_of(FOUR_ON_TWO, *options)
    for node in (-1, 2):
        with pytest.raises(ConfigError, match=rf"--node is {node}: .* has nodes 0 to 1"):
            place_of(FOUR_ON_TWO, node, "a:1")
