"""One rank of those that the rows of an output layer are split over.

Usage: linear_logprobs WORK_FOLDER RANK WORLD_SIZE
Reads WORK_FOLDER/case.pt; writes the results and the gradients to WORK_FOLDER/RANK.pt.
"""

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from slipstream.algos.linear_logprobs import (
    Kept,
    OutputLayer,
    Reference,
    linear_logprobs,
    squared_probabilities,
)
from tests.support.waiting import HANG_S

TIMEOUT = timedelta(seconds=HANG_S)


def main(work: Path, rank: int, world_size: int) -> None:
    store = dist.FileStore(str(work / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    case = torch.load(work / "case.pt")
    hidden = case["hidden"].requires_grad_()
    weight = case["weight"].chunk(world_size)[rank].clone().requires_grad_()
    settings = {
        "group": dist.group.WORLD,
        "vocab_size": case["vocab_size"],
        "barred_ids": tuple(case["barred_ids"]),
    }
    reference = Reference(
        case["reference_hidden"],
        OutputLayer(weight=case["reference_weight"].chunk(world_size)[rank], **settings),
    )
    computed = linear_logprobs(
        hidden,
        OutputLayer(weight=weight, **settings),
        case["target"],
        temperature=case["temperature"],
        barred=case["barred"],
        kept=Kept(*case["kept"]),
        reference=reference,
        chunk_columns=case["chunk_columns"],
    )
    sum((part * mix).sum() for part, mix in zip(computed, case["mix"], strict=True)).backward()
    dist.all_reduce(hidden.grad)
    squares = squared_probabilities(
        hidden,
        OutputLayer(weight=weight, **settings),
        temperature=case["temperature"],
        barred=case["barred"],
        kept=Kept(*case["kept"]),
    )
    computed = torch.stack([part.detach() for part in computed])
    torch.save(
        {
            "computed": computed,
            "squares": squares,
            "by_hidden": hidden.grad,
            "by_weight": weight.grad,
        },
        work / f"{rank}.pt",
    )
    dist.barrier()  # of no tokens, nothing else waits for the rank that has yet to connect
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
