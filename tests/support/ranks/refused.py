"""One rank of a learner whose updates are refused at times, beside one without such updates.

Usage: refused MODEL_FOLDER WORK_FOLDER RANK WORLD_SIZE LEARNER_JSON
Writes WORK_FOLDER/RANK.json: per setting, what refused updates changed, and in what the two differ
at the end.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slipstream.learner.batches.orders import NonFiniteError
from slipstream.learner.batches.packing import pack
from slipstream.learner.model import device
from slipstream.learner.training.algorithm import algorithm_of
from tests.support.ranks.policy import train_sequences
from tests.support.ranks.program import finish, join_ranks, run, settings_of
from tests.support.ranks.run import section_of

if TYPE_CHECKING:
    from slipstream.learner.training.policy import Policy

SETTINGS: dict[str, dict[str, object]] = {
    "float32": {},
    "unclipped": {"clip_grad": 0.0},
    "narrow": {"moments_dtype": "bfloat16"},
    "bfloat16": {"dtype": "bfloat16"},
    "half on the host": {"optimizer_offload_fraction": 0.5, "dtype": "bfloat16"},
}
Kept = dict[str, list[Tensor]]


def kept(policy: "Policy") -> Kept:
    """Return copies of what an update changes."""
    policy.bring_weights()
    from slipstream.learner.training.optimizer import _updating

    found: Kept = {"weights": list(policy.model.parameters())}
    for inner in _updating(policy._optimizer):
        for weight in (w for group in inner.param_groups for w in group["params"]):
            found.setdefault("main weights", []).append(weight)
            for name, value in inner.state[weight].items():
                if name == "master_param":  # the weight itself, on the host
                    continue
                found.setdefault(name, []).append(value)
    return {name: [one.detach().clone() for one in some] for name, some in found.items()}


def changed(before: Kept, after: Kept) -> list[str]:
    """Return the names of what is not equal bit by bit; nothing before means that all are 0."""
    names = []
    for name, some in after.items():
        old = before.get(name, [torch.zeros_like(one) for one in some])
        if not all(a.equal(b) for a, b in zip(old, some, strict=True)):
            names.append(name)
    return names


def main(folder: Path, work: Path, rank: int, world_size: int, layout: str) -> None:
    topology = join_ranks(work, rank, world_size, section_of(layout))
    from slipstream.learner.starting_policy import build_policy

    batch = pack(train_sequences(), device.device())
    is_last = rank == world_size - 1

    def loss_of(bad: str) -> Callable[..., tuple[Tensor, dict[str, Tensor]]]:
        def loss(_number: int, _batch: object, output: object) -> tuple[Tensor, dict[str, Tensor]]:
            logprobs: Tensor = output.logprobs  # type: ignore[attr-defined]
            mean = -logprobs.mean()
            if bad == "loss" and is_last:
                mean = mean * math.inf
            if bad == "gradient" and is_last:
                mean = mean + (logprobs.sum() * 0.0).sqrt()
            return mean, {"logprobs": logprobs.detach().sum()}

        return loss

    def update(policy: "Policy", bad: str = "") -> float:
        _, norm = policy.update([batch], loss_of(bad))
        policy.end_step()
        return norm

    report: dict[str, object] = {}
    for name, learner in SETTINGS.items():
        section = section_of(layout, lr=1e-2, **{"clip_grad": 0.1, **learner})
        settings = settings_of(folder, section, {})
        mine, other = (build_policy(settings, algorithm_of(settings), topology) for _ in range(2))
        mine.sharded_state(is_loading=False)  # a checkpoint in a critic's warm-up
        refused = []
        for bad in ("loss", "", "gradient", "loss", ""):
            before, rate = kept(mine), mine.lr
            try:
                norm = update(mine, bad)
                assert not bad, "it is refused"
                assert norm > 0.1, "it is clipped"
                assert {"weights", "step"} <= set(changed(before, kept(mine)))
            except NonFiniteError as error:
                refused.append([str(error), changed(before, kept(mine)), mine.lr == rate])
        for _ in range(2):
            update(other)
        report[name] = {
            "refused": refused,
            "steps": sorted({float(step) for step in kept(mine)["step"]}),
            "optimizers": len(getattr(mine._optimizer, "chained_optimizers", "1")),
            "differ": changed(kept(mine), kept(other)),
        }
    finish(work / f"{rank}.json", report)


if __name__ == "__main__":
    run(main)
