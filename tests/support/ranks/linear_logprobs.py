"""One rank of those that the rows of an output layer are split over.

Usage: linear_logprobs WORK_FOLDER RANK WORLD_SIZE
Reads WORK_FOLDER/case.pt; writes the results and the gradients to WORK_FOLDER/RANK.pt.
"""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.algos.logprobs.linear_logprobs import (
    Reference,
    linear_logprobs,
    squared_probabilities,
)
from slipstream.algos.logprobs.sampling import Kept, OutputLayer
from tests.support.ranks.program import run
from tests.support.waiting import HANG_S

TIMEOUT = timedelta(seconds=HANG_S)


def results(
    case: dict[str, Any],
    hidden: Tensor,
    weight: Tensor,
    reference: Tensor,
    *,
    chunk_columns: int,
    **settings: Any,  # noqa: ANN401 as OutputLayer
) -> dict[str, Tensor | None]:
    """Return what is computed of a case with these rows of the output layer, and gradients."""
    settings |= {"vocab_size": case["vocab_size"], "barred_ids": tuple(case["barred_ids"])}
    layer = OutputLayer(weight=weight, **settings)
    drawn = {
        "temperature": case["temperature"],
        "barred": case["barred"],
        "kept": Kept(*case["kept"]),
    }
    computed = linear_logprobs(
        hidden,
        layer,
        case["target"],
        reference=Reference(case["reference_hidden"], OutputLayer(weight=reference, **settings)),
        chunk_columns=chunk_columns,
        **drawn,
    )
    sum((part * mix).sum() for part, mix in zip(computed, case["mix"], strict=True)).backward()
    return {
        "computed": torch.stack([part.detach() for part in computed]),
        "squares": squared_probabilities(hidden, layer, **drawn),
        "by_hidden": hidden.grad,
        "by_weight": weight.grad,
    }


def main(work: Path, rank: int, world_size: int) -> None:
    store = dist.FileStore(str(work / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    case = torch.load(work / "case.pt")
    mine, of_reference = (
        case[name].chunk(world_size)[rank].clone() for name in ("weight", "reference_weight")
    )
    found = results(
        case,
        case["hidden"].requires_grad_(),
        mine.requires_grad_(),
        of_reference,
        chunk_columns=case["chunk_columns"],
        group=dist.group.WORLD,
    )
    dist.all_reduce(found["by_hidden"])
    torch.save(found, work / f"{rank}.pt")
    dist.barrier()  # of no tokens, nothing else waits for the rank that has yet to connect
    dist.destroy_process_group()


if __name__ == "__main__":
    run(main)
