"""One rank of a learner that trains with fused gradients of weights, and without.

Usage: fused_gradients MODEL_FOLDER WORK_FOLDER RANK WORLD_SIZE LEARNER_JSON
Writes WORK_FOLDER/RANK.json: per type of weights, how far gradients and trained weights are apart,
and what tensors as large as a matrix were made or added.
"""

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from slipstream.learner.batches.packing import PackedBatch, pack
from slipstream.learner.model import device
from slipstream.learner.training.algorithm import algorithm_of
from slipstream.wire.models.hf_config import load_hf_config
from tests.support.ranks.policy import train_sequences, with_experts
from tests.support.ranks.program import finish, join_ranks, run, settings_of
from tests.support.ranks.run import section_of

if TYPE_CHECKING:
    from slipstream.learner.training.policy import Policy


class LikeMatrices(TorchDispatchMode):
    """Counts operators that make a tensor of a matrix's shape, or add one to another."""

    def __init__(self, policy: "Policy") -> None:
        super().__init__()
        chunks = policy.model.chunks
        shapes = {n: tuple(one.shape) for chunk in chunks for n, one in chunk.named_parameters()}
        self.names = {shape: name for name, shape in shapes.items() if len(shape) > 1}
        self.seen: Counter[str] = Counter()

    @override
    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, Tensor) or tuple(result.shape) not in self.names:
            return result
        of = func._schema.returns[0].alias_info
        is_new = of is None and result.layout is not torch.sparse_coo
        is_sum = func.overloadpacket is torch.ops.aten.add_ and args[1].layout is torch.strided  # type: ignore[attr-defined]
        if is_new or is_sum:
            name = re.sub(r"decoder\.layers\.\d+\.", "", self.names[tuple(result.shape)])
            self.seen[f"{func.overloadpacket.__name__} {name}"] += 1
        return result


def main(folder: Path, work: Path, rank: int, world_size: int, layout: str) -> None:
    topology = join_ranks(work, rank, world_size, section_of(layout))
    from slipstream.learner.model.fused_gradients import main_gradient_of
    from slipstream.learner.starting_policy import build_policy

    everything = with_experts(train_sequences(), load_hf_config(folder))
    mine = everything[topology.data_parallel_rank :: topology.data_parallel]
    halves = [mine[i::2] for i in range(2)]
    for half in halves:  # so few tokens that no activation has the shape of a matrix
        while sum(len(one.token_ids) for one in half) > 23:
            half.pop()
    batches = [pack(half, device.device()) for half in halves]

    def loss(_number: int, batch: PackedBatch, output: object) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs: Tensor = output.logprobs  # type: ignore[attr-defined]
        chosen = torch.linspace(-1, 2, len(logprobs))
        return -(logprobs * chosen).sum() / len(batch.token_ids), {}

    def trained(update: Callable[[], object], policy: "Policy") -> dict[str, list[Tensor]]:
        update()
        gradients = [one.clone() for one in policy._gradient_buffers()]
        update()
        weights = [one.detach().float() for one in policy.model.parameters()]
        return {"gradients": gradients, "weights": weights}

    report: dict[str, object] = {}
    for dtype in ("float32", "bfloat16"):
        found = []
        for megatron in ({}, {"gradient_accumulation_fusion": False}):
            section = section_of(
                layout, lr=1e-3, adam_epsilon=1e-3, clip_grad=0.0, dtype=dtype, megatron=megatron
            )
            settings = settings_of(folder, section, {})
            policy = build_policy(settings, algorithm_of(settings), topology)
            weight = next(iter(policy.model.parameters()))
            total = main_gradient_of(weight, policy.model.config)
            assert total is (None if megatron else weight.main_grad)
            with torch.no_grad():
                assert main_gradient_of(weight, policy.model.config) is None
            found.append(trained(lambda: policy.update(batches, loss), policy))  # noqa: B023
            with LikeMatrices(policy) as matrices:
                policy.update(batches, loss)
            report[f"{dtype}, {'unfused' if megatron else 'fused'}"] = dict(matrices.seen)
        fused, unfused = found
        report[dtype] = {
            what: max(
                float((a - b).norm() / b.norm()) for a, b in zip(some, unfused[what], strict=True)
            )
            for what, some in fused.items()
        }
    finish(work / f"{rank}.json", report)


if __name__ == "__main__":
    run(main)
