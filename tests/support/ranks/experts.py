"""One rank of a learner whose experts are computed in groups, beside Megatron's, one by one.

Usage: experts MODELS_FOLDER WORK_FOLDER RANK WORLD_SIZE LEARNER_JSON
Writes WORK_FOLDER/RANK.json: by family and type, how far outputs and gradients of a layer are from
those of Megatron's experts; by number of experts, the operators and host waits of a pass;
whether single experts can be named while weights are away; and whether a checkpoint of each form
is read in the other.
"""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from slipstream.learner.config import LearnerSection
from slipstream.wire.models.families.registry import FAMILIES
from tests.support.family_models import MODELS, SHAPE
from tests.support.ranks.host_reads import counting
from tests.support.ranks.program import finish, join_ranks, mark_open, run
from tests.support.ranks.run import section_of
from tests.support.single_experts import compute_one_by_one, megatrons_experts

if TYPE_CHECKING:
    from slipstream.learner.model.rank_model import RankModel

MIXTURES = [name for name in MODELS if name in FAMILIES and FAMILIES[name].has_experts]
WITH_BIASES = {"gpt_oss"}
SIZES = (8, 32)  # experts of all ranks
TOKENS = 24


class Operators(TorchDispatchMode):
    """Counts the operators that compute: those that a GPU launches a kernel for."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    @override
    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        name = func.overloadpacket.__name__
        self.count += not func.is_view and not name.startswith(("empty", "new_empty", "detach"))
        return func(*args, **(kwargs or {}))


def main(folder: Path, work: Path, rank: int, world_size: int, layout: str) -> None:
    learner = section_of(layout)
    join_ranks(work, rank, world_size, learner)
    open_megatrons_groups()
    report: dict[str, object] = {}
    for family in MIXTURES:
        if family in WITH_BIASES and learner.sizes.expert_tensor > 1:
            continue  # refused
        for dtype in (torch.float32, torch.bfloat16):
            mlp = layer_of(folder, rank, MODELS[family], dtype, learner)
            report[f"{family} {dtype}"] = distances(mlp)
    report["passes"] = {size: passes(folder, rank, size, learner) for size in SIZES}
    report["shared by"] = learner.expert_parallel
    report["away"] = are_single_while_away(folder, rank)
    report["unlike"] = checkpoints_unlike(folder, work, rank, learner)
    finish(work / f"{rank}.json", report)


def open_megatrons_groups() -> None:
    """Open what its dispatcher exchanges tensors in, and a run does not."""
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    groups = get_default_pg_collection()
    for group in (groups.ep, groups.expt_tp):
        torch.distributed.barrier(group)
    mark_open()


def layer_of(
    folder: Path,
    rank: int,
    shape: dict[str, object],
    dtype: torch.dtype = torch.float32,
    section: LearnerSection | None = None,
) -> Any:  # noqa: ANN401 - known only after prepare()
    """Return the last layer's MLP of a model with random weights, alike on copies of a rank."""
    mlp = model_of(folder, rank, shape, dtype, section).chunks[0].decoder.layers[-1].mlp
    with torch.no_grad():
        for weight in mlp.parameters():
            weight.normal_(std=0.1)
    return mlp


def model_of(
    folder: Path,
    rank: int,
    shape: dict[str, object],
    dtype: torch.dtype = torch.float32,
    section: LearnerSection | None = None,
) -> "RankModel":
    from megatron.core import parallel_state

    from slipstream.learner.model.gpt import build_model
    from slipstream.wire.models.hf_config import load_hf_config

    folder = folder / str(rank)
    folder.mkdir(parents=True, exist_ok=True)
    config = {"hidden_act": "silu", **SHAPE, **shape, "num_hidden_layers": 2}
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(parallel_state.get_expert_tensor_and_model_parallel_rank())
    learner = section or LearnerSection()
    return build_model(load_hf_config(folder), dtype=dtype, extra={}, learner=learner)


def results(mlp: Any) -> list[Tensor]:  # noqa: ANN401
    """Return a layer's outputs and all gradients; a rank of several has tokens of its own."""
    numbers = torch.Generator().manual_seed(torch.distributed.get_rank())
    hidden = torch.randn(TOKENS, 1, mlp.config.hidden_size, generator=numbers)
    hidden = hidden.to(mlp.config.params_dtype).requires_grad_()
    output, bias = mlp(hidden)
    assert bias is None
    output.backward(torch.randn(output.shape, generator=numbers).to(output))
    gradients = [weight.grad for weight in mlp.parameters()]
    for weight in mlp.parameters():
        weight.grad = None
    return [output.detach(), hidden.grad, *gradients]


def distances(mlp: Any) -> float:  # noqa: ANN401
    """Return the largest distance of results from those of single experts, over their size.

    Results that are computed again in the backward pass have the same bits.
    """
    grouped = results(mlp)
    mlp.moe_layer_recompute = True
    assert all(one.equal(other) for one, other in zip(grouped, results(mlp), strict=True))
    compute_one_by_one(mlp)
    pairs = zip(grouped, results(mlp), strict=True)
    return max(float((one - other).norm() / other.norm()) for one, other in pairs)


def passes(folder: Path, rank: int, size: int, section: LearnerSection) -> dict[str, list[int]]:
    """Return the operators forward and backward, and the host's waits, of each form of experts."""
    mlp = layer_of(folder, rank, MODELS["qwen3_moe"] | {"num_experts": size}, section=section)
    hidden = torch.randn(TOKENS, 1, mlp.config.hidden_size, requires_grad=True)

    def counts() -> list[int]:
        reads: Counter[str] = Counter()

        def of(work: Callable[[], Any]) -> tuple[int, Any]:
            with counting(reads, Counter(), Counter()), Operators() as operators:
                result = work()
            return operators.count, result

        forward, (output, _) = of(lambda: mlp(hidden))
        backward, _ = of(lambda: output.backward(torch.ones_like(output)))
        return [forward, backward, reads.total()]

    grouped = counts()
    compute_one_by_one(mlp)
    return {"grouped": grouped, "single": counts()}


def are_single_while_away(folder: Path, rank: int) -> bool:
    """Return whether the weights of single experts are those of before, after an absence."""
    model = model_of(folder, rank, MODELS["qwen3_moe"])
    values = {name: weight.clone() for name, weight in model.named_weights()}
    kept = [(one, one.detach().clone()) for one in model.parameters()]
    sizes = [one.untyped_storage().nbytes() for one, _ in kept]
    for one, _ in kept:
        one.untyped_storage().resize_(0)
    away = dict(model.named_weights())
    with torch.no_grad():
        for (one, value), size in zip(kept, sizes, strict=True):
            one.untyped_storage().resize_(size)
            one.copy_(value + 1.0)
    return all(away[name].equal(value + 1.0) for name, value in values.items())


def checkpoints_unlike(folder: Path, work: Path, rank: int, section: LearnerSection) -> list[str]:
    """Return the weights that differ after a file of each form has been read in the other."""
    from megatron.core.dist_checkpointing import load, save

    mlp = layer_of(folder, rank, MODELS["qwen3_moe"], section=section)
    single = megatrons_experts(mlp)
    with torch.no_grad():
        for weight in single.parameters():
            weight.normal_()
    unlike = []
    for name, written, read in (("single", single, mlp.experts), ("grouped", mlp.experts, single)):
        saved = work / name
        saved.mkdir(exist_ok=True)
        torch.distributed.barrier()
        save(written.sharded_state_dict("experts."), str(saved))
        wanted = read.sharded_state_dict("experts.")
        weights = {key: wanted[key] for key in wanted if "_extra_state" not in key}
        state = load(weights, str(saved))
        names = {key.removeprefix("experts."): state[key] for key in state}
        assert not read.load_state_dict(names, strict=False).unexpected_keys
        experts = zip(
            mlp.experts.linear_fc1, mlp.experts.linear_fc2, single.local_experts, strict=True
        )
        for number, (up, down, expert) in enumerate(experts):
            if not (up.equal(expert.linear_fc1.weight) and down.equal(expert.linear_fc2.weight)):
                unlike.append(f"{name} {number}")
        with torch.no_grad():
            for weight in mlp.experts.parameters():
                weight.add_(1.0)
    return unlike


if __name__ == "__main__":
    run(main)
