"""Pure: which host of the learner keeps which tensors of a version, and which rank writes them.

Every replica holds the whole model, so most tensors could be written on several hosts. They are
shared out by bytes: no host writes, keeps and sends much more than another.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from slipstream.learner.model.shards import ShardFacts


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

    host_of: dict[str, int]  # by name of a tensor
    writes: list[set[Piece]]  # by rank: pieces that it holds and writes itself
    transfers: list[Transfer]  # in the order in which all ranks carry them out


def share_out(
    held: Sequence[Iterable[ShardFacts]],
    tensors_of: Callable[[str], Sequence[str]],
    *,
    item_bytes: Callable[[str], int],
    ranks_per_host: int,
    hosts: int,
) -> Shares:
    """Give every tensor to one of the first ``hosts`` hosts, and every piece to one rank there.

    Largest first, each to the least loaded host of those that hold all pieces of it; a host gets a
    tensor of which it lacks pieces only where none has all. Ranks of a host share its pieces out by
    size likewise. Every rank that calls this with the same arguments gets the same answer.

    Args:
        held: what each rank holds, by rank. Copies are equal.
        tensors_of: returns the names of the tensors that a parameter is published as.
        item_bytes: returns the size of an item of a parameter as it is published.
        ranks_per_host: ranks are numbered host by host.
        hosts: at least 1, at most as many as there are.
    """
    holders: dict[Piece, list[int]] = defaultdict(list)
    size: dict[Piece, int] = {}  # bytes
    for rank, facts in enumerate(held):
        for one in facts:
            piece = Piece(one.name, one.rank)
            holders[piece].append(rank)
            size[piece] = math.prod(one.shape) * item_bytes(one.name)
    host_of: dict[str, int] = {}
    writes: list[set[Piece]] = [set() for _ in held]
    transfers: list[Transfer] = []
    host_load, rank_load = [0] * hosts, [0] * len(held)
    for names, pieces in _tied_together(size, tensors_of):

        def missing(host: int, pieces: list[Piece] = pieces) -> int:
            there = range(host * ranks_per_host, (host + 1) * ranks_per_host)
            return sum(size[one] for one in pieces if not any(r in there for r in holders[one]))

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


def _tied_together(
    size: dict[Piece, int], tensors_of: Callable[[str], Sequence[str]]
) -> list[tuple[list[str], list[Piece]]]:
    """Return tensors with the pieces that they are made of, largest first.

    Tensors stay together that a parameter holds in one, and parameters that share a tensor.
    """
    first: dict[str, str] = {}  # a parameter with this tensor
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
    heaviest = sorted(pieces, key=lambda one: (-sum(size[p] for p in pieces[one]), one))
    return [(tensors[one], pieces[one]) for one in heaviest]
