"""Which host keeps which tensors, and which rank writes them."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from slipstream.learner.model.weights.shards import ShardFacts
from slipstream.learner.publish.shares import Piece, Transfer, batches_of, share_out


def fact(name: str, size: int, rank: int = 0, ranks: int = 1) -> ShardFacts:
    return ShardFacts(name, (size,), 0 if ranks > 1 else None, rank, ranks)


def own_name(name: str) -> list[str]:
    return [name]


def one_byte(_name: str) -> int:
    return 1


def test_what_counts_is_bytes_and_not_items():
    held = [[fact("router", 6), fact("a", 5), fact("b", 5), fact("c", 4)]] * 2
    item_bytes = {"router": 4, "a": 2, "b": 2, "c": 2}
    shares = share_out(held, own_name, item_bytes=item_bytes.__getitem__, ranks_per_host=1, hosts=2)
    assert shares.host_of == {"router": 0, "a": 1, "b": 1, "c": 1}


def test_replicas_on_two_hosts_share_tensors_out_by_size():
    held = [[fact("a", 10), fact("b", 6), fact("c", 4)]] * 2
    shares = share_out(held, own_name, item_bytes=one_byte, ranks_per_host=1, hosts=2)
    assert shares.host_of == {"a": 0, "b": 1, "c": 1}
    assert shares.writes == [{Piece("a", 0)}, {Piece("b", 0), Piece("c", 0)}]
    assert not shares.transfers


def test_one_host_for_all_has_the_rest_sent_to_its_ranks():
    held = [[fact("a", 2)], [fact("b", 2)], [fact("c", 2)], [fact("d", 2)]]
    shares = share_out(held, own_name, item_bytes=one_byte, ranks_per_host=2, hosts=1)
    assert set(shares.host_of.values()) == {0}
    assert shares.transfers == [Transfer(Piece("c", 0), 2, 0), Transfer(Piece("d", 0), 3, 1)]


def test_transfers_are_in_batches_of_some_bytes_in_their_order():
    transfers = [Transfer(Piece(name, 0), 1, 0) for name in "abcde"]
    sizes = {"a": 3, "b": 4, "c": 1, "d": 20, "e": 1}
    batches = batches_of(transfers, lambda piece: sizes[piece.name], most=8)
    names = ["".join(transfer.piece.name for transfer in batch) for batch in batches]
    assert names == ["abc", "d", "e"], "a piece that is larger than a batch is one alone"
    assert batches_of([], lambda _: 1, most=8) == []


def test_a_tensor_whose_shards_no_host_has_all_of_goes_to_the_host_with_most_of_it():
    held = [[fact("w", 5, 0, 3), fact("w", 5, 1, 3)], [fact("w", 5, 2, 3)]]
    shares = share_out(held, own_name, item_bytes=one_byte, ranks_per_host=1, hosts=2)
    assert shares.host_of == {"w": 0}
    assert shares.transfers == [Transfer(Piece("w", 2), 1, 0)]


def test_tensors_of_one_parameter_and_parameters_of_one_tensor_stay_together():
    names = {"qkv": ["q", "k", "v"], "up": ["stack"], "down": ["stack"], "norm": ["norm"]}
    held = [[fact(name, size) for name, size in (("qkv", 9), ("up", 5), ("down", 5), ("norm", 1))]]
    shares = share_out(held * 2, names.__getitem__, item_bytes=one_byte, ranks_per_host=1, hosts=2)
    assert len({shares.host_of[name] for name in "qkv"}) == 1
    assert {Piece("up", 0), Piece("down", 0)} <= shares.writes[shares.host_of["stack"]]


@given(st.data(), st.integers(1, 4), st.integers(1, 3))
def test_every_piece_is_written_once_on_the_host_of_its_tensors(
    data: st.DataObject, hosts: int, ranks_per_host: int
):
    ranks = hosts * ranks_per_host
    sizes = data.draw(st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 99), min_size=1))
    pieces = [
        fact(name, size, number, count)
        for name, size in sizes.items()
        for count in [data.draw(st.integers(1, 3))]
        for number in range(count)
    ]
    held: list[list[ShardFacts]] = [[] for _ in range(ranks)]
    for one in pieces:
        for rank in data.draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
            held[rank].append(one)
    used = data.draw(st.integers(1, hosts))
    shares = share_out(
        held, own_name, item_bytes=one_byte, ranks_per_host=ranks_per_host, hosts=used
    )
    assert shares == share_out(
        held, own_name, item_bytes=one_byte, ranks_per_host=ranks_per_host, hosts=used
    )
    assert shares.host_of.keys() == sizes.keys()
    assert all(host < used for host in shares.host_of.values())
    written: Counter[Piece] = Counter()
    for rank, mine in enumerate(shares.writes):
        assert mine <= {Piece(one.name, one.rank) for one in held[rank]}
        for piece in mine:
            assert shares.host_of[piece.name] == rank // ranks_per_host
        written.update(mine)
    for piece, sender, receiver in shares.transfers:
        assert piece in {Piece(one.name, one.rank) for one in held[sender]}
        assert shares.host_of[piece.name] == receiver // ranks_per_host
        assert sender // ranks_per_host != receiver // ranks_per_host
        written[piece] += 1
    assert written == Counter(Piece(one.name, one.rank) for one in pieces)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(2, 8))
def test_where_every_host_has_all_none_keeps_more_than_a_largest_tensor_above_the_mean(
    sizes: list[int], hosts: int
):
    held = [[fact(str(i), size) for i, size in enumerate(sizes)]] * hosts
    shares = share_out(held, own_name, item_bytes=one_byte, ranks_per_host=1, hosts=hosts)
    load = Counter(dict.fromkeys(range(hosts), 0))
    for i, size in enumerate(sizes):
        load[shares.host_of[str(i)]] += size
    assert max(load.values()) <= sum(sizes) / hosts + max(sizes)
