"""Pure: which host of the learner keeps which tensors of a version, and which rank writes them.

Every replica holds the whole model, so most tensors could be written on several hosts. They are
divided by bytes: no host writes, keeps and sends much more than another.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from slipstream.learner.model.weights.shards import ShardFacts


class Piece(NamedTuple):
    """A parameter's part by its name and its number among the ranks that split it."""

    name: str
    number: int


class Transfer(NamedTuple):
    """A piece that no rank of its host holds, sent to one that writes it."""

    piece: Piece
    sender: int
    receiver: int


class Shares(NamedTuple):
    """The decision for all ranks."""

    host_of: dict[str, int]  # host by name of a tensor
    writes: list[set[Piece]]  # pieces that a rank holds and writes itself, by rank
    transfers: list[Transfer]  # in the order of execution on all ranks


def share_out(
    held: Sequence[Iterable[ShardFacts]],
    tensors_of: Callable[[str], Sequence[str]],
    *,
    item_bytes: Callable[[str], int],
    ranks_per_host: int,
    hosts: int,
) -> Shares:
    """Give every tensor to one of the first ``hosts`` hosts, and every piece to one rank there.

    Tensors are given largest first, each to the least loaded host that holds all its pieces; a host
    that lacks pieces gets a tensor only if no host has all. Ranks of a host divide its pieces by
    size likewise. Equal arguments give equal answers on every rank.

    Args:
        held: parameters' parts that each rank holds, by rank. Copies are equal.
        tensors_of: returns the names of the tensors that a parameter is published as.
        item_bytes: returns the size of an item of a parameter as published.
        ranks_per_host: number of ranks on a host; ranks are numbered host by host.
        hosts: number of hosts to use, at least 1 and at most all.
    """
    holders: dict[Piece, list[int]] = defaultdict(list)
    size: dict[Piece, int] = {}  # bytes
    for rank, facts in enumerate(held):
        for shard in facts:
            piece = Piece(shard.name, shard.rank)
            holders[piece].append(rank)
            size[piece] = math.prod(shard.shape) * item_bytes(shard.name)
    host_of: dict[str, int] = {}
    writes: list[set[Piece]] = [set() for _ in held]
    transfers: list[Transfer] = []
    host_load, rank_load = [0] * hosts, [0] * len(held)
    for names, pieces in _tied_together(size, tensors_of):

        def missing(host: int, pieces: list[Piece] = pieces) -> int:
            there = range(host * ranks_per_host, (host + 1) * ranks_per_host)
            return sum(
                size[piece] for piece in pieces if not any(r in there for r in holders[piece])
            )

        host = min(range(hosts), key=lambda host: (missing(host), host_load[host], host))
        host_of |= dict.fromkeys(names, host)
        for piece in pieces:
            host_load[host] += size[piece]
            here = [rank for rank in holders[piece] if rank // ranks_per_host == host]
            rank = min(here or holders[piece], key=lambda rank: (rank_load[rank], rank))
            rank_load[rank] += size[piece]
            if here:
                writes[rank].add(piece)
            else:
                receiver = host * ranks_per_host + rank % ranks_per_host
                transfers.append(Transfer(piece, rank, receiver))
    return Shares(host_of, writes, transfers)


def batches_of(
    transfers: Iterable[Transfer], size_of: Callable[[Piece], int], most: int
) -> list[list[Transfer]]:
    """Return the transfers in batches, in their order; equal on every rank.

    A rank ends its part of a batch before it begins the next one: so no ranks wait for each other.

    Args:
        transfers: Transfers of all ranks.
        size_of: returns the size of a piece, bytes.
        most: Bytes of a batch of several transfers, at most.
    """
    batches: list[list[Transfer]] = []
    filled = 0
    for transfer in transfers:
        size = size_of(transfer.piece)
        if not batches or filled + size > most:
            batches.append([])
            filled = 0
        batches[-1].append(transfer)
        filled += size
    return batches


def _tied_together(
    size: dict[Piece, int], tensors_of: Callable[[str], Sequence[str]]
) -> list[tuple[list[str], list[Piece]]]:
    """Return tensors with the pieces that make them up, largest first.

    Tensors of one parameter stay together, and so do parameters that share a tensor.
    """
    first: dict[str, str] = {}  # first parameter with a tensor
    leader: dict[str, str] = {}

    def lead(name: str) -> str:
        while leader[name] != name:
            name = leader[name]
        return name

    names = list(dict.fromkeys(piece.name for piece in size))
    for name in names:
        leader[name] = name
        for tensor in tensors_of(name):
            leader[lead(name)] = lead(first.setdefault(tensor, name))
    pieces: dict[str, list[Piece]] = defaultdict(list)
    tensors: dict[str, list[str]] = defaultdict(list)
    for piece in sorted(size):
        pieces[lead(piece.name)].append(piece)
    for tensor, name in first.items():
        tensors[lead(name)].append(tensor)
    heaviest = sorted(pieces, key=lambda leader: (-sum(size[p] for p in pieces[leader]), leader))
    return [(tensors[leader], pieces[leader]) for leader in heaviest]
