"""One rank of a learner that counts how often an optimizer update waits for the device.

Usage: host_reads MODEL_FOLDER WORK_FOLDER RANK WORLD_SIZE LEARNER_JSON
Writes WORK_FOLDER/RANK.json: per algorithm and model, what the last of two updates did.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from slipstream.learner.batches.packing import pack
from slipstream.learner.config import LearnerSection
from slipstream.learner.model import device
from slipstream.learner.training.algorithm import algorithm_of
from slipstream.learner.training.step import train_step
from slipstream.wire.process.phases import PhaseClock
from tests.support.ranks.policy import algorithms, random_outcomes, train_siblings, whole_plan
from tests.support.ranks.program import finish, join_ranks, run, settings_of
from tests.support.ranks.run import section_of

_READ = ("tolist", "cpu", "numpy")  # of a tensor: no operator on a CPU
_COUNTED = ("prepare_grads", "get_grad_norm_fp32", "gradient_norm")
# Only where there is no kernel for sequences of unlike lengths: a GPU's attention has one.
_OF_CPU_ATTENTION = "group_by_length"
_OF_HOST = "tensor_parallel.random:fork"  # of the state of random numbers, which is on the host


def _reads(operator: str, arguments: tuple[object, ...], named: dict[str, object]) -> bool:
    """Return whether an operator waits for the device: what it returns depends on values."""
    if operator in {"_local_scalar_dense", "nonzero", "masked_select", "bincount", "_unique2"}:
        return True
    if operator == "repeat_interleave":
        return named.get("output_size") is None
    indices = arguments[1] if operator == "index" else ()
    assert isinstance(indices, list | tuple)
    return any(isinstance(one, torch.Tensor) and one.dtype == torch.bool for one in indices)


def _caller(frame: FrameType | None) -> str:
    """Return the nearest function of ours or of Megatron's."""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(("slipstream.", "megatron.")) and "cpu_shim" not in name:
            return f"{name}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "nobody"


class _Operators(TorchDispatchMode):
    def __init__(self, seen: Counter[str]) -> None:
        super().__init__()
        self.seen = seen

    @override
    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> object:  # noqa: ANN001
        if _reads(func.overloadpacket.__name__, args, kwargs or {}):
            self.seen[_caller(sys._getframe(1))] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counting(reads: Counter[str], calls: Counter[str], before: Counter[str]) -> Iterator[None]:
    """Count reads and calls; and apart, reads until the weights have changed."""

    def profile(frame: FrameType, event: str, called: object) -> None:
        name = frame.f_code.co_name
        if event == "call" and name in _COUNTED:
            owner = type(frame.f_locals.get("self")).__name__
            calls[name] += owner != "ChainedOptimizer"  # which asks the one that it holds
        elif event == "return" and name == "step_with":
            before.update(reads)
        elif event == "c_call" and getattr(called, "__name__", "") in _READ:
            is_tensor = isinstance(getattr(called, "__self__", None), torch.Tensor)
            is_twice = "cpu_shim" in frame.f_globals["__name__"]  # hands on what was called
            reads[_caller(frame)] += is_tensor and not is_twice

    others = sys.getprofile()
    sys.setprofile(profile)
    try:
        with _Operators(reads):
            yield
    finally:
        sys.setprofile(others)


def of_updates(reads: Counter[str]) -> Counter[str]:
    """Return the reads that a GPU's update would do, too."""
    return Counter(
        {
            name: n
            for name, n in reads.items()
            if n and _OF_CPU_ATTENTION not in name and _OF_HOST not in name
        }
    )


class Counted:
    """A policy or a critic whose updates are counted."""

    def __init__(self, model: object, wrapped_critic: object = None) -> None:
        self._model = model
        self.critic = wrapped_critic
        self.seen: dict[str, object] = {}

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)

    def update(self, *arguments: object) -> object:
        reads, calls, before = (Counter[str]() for _ in range(3))
        update: Callable[..., tuple[dict[str, float], float]] = self._model.update  # type: ignore[attr-defined]
        with counting(reads, calls, before):
            figures, norm = update(*arguments)
        assert {type(value) for value in figures.values()} == {float}, "there is more to be read"
        self.seen = {
            "reads": of_updates(reads),
            "before the weights change": of_updates(before).total(),
            "calls": calls,
            "num_figures": len(figures),
        }
        return figures, norm


def check_fused_kernels() -> None:
    """Check where fused kernels read their steps, and that weights may be of a later group only."""
    from slipstream.learner.training.optimizer import (
        put_steps_in_place,
        step_with,
        use_fused_kernels,
    )

    elsewhere = torch.nn.Parameter(torch.empty(2, device="meta"))
    adam = torch.optim.AdamW([elsewhere])
    adam.state[elsewhere] = {"step": torch.tensor(3.0)}
    use_fused_kernels(SimpleNamespace(optimizer=adam))
    assert adam.state[elsewhere]["step"].is_meta, "fused kernels read steps beside parameters"
    adam.param_groups[0]["fused"] = None
    adam.state[elsewhere] = {"step": torch.tensor(3.0)}
    put_steps_in_place(SimpleNamespace(optimizer=adam))
    assert adam.state[elsewhere]["step"].device.type == "cpu"

    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    adam = torch.optim.AdamW([{"params": []}, {"params": [weight]}])
    parts = [
        SimpleNamespace(optimizer=inner)
        for inner in (None, torch.optim.AdamW([{"params": []}]), adam)
    ]
    chained = SimpleNamespace(
        chained_optimizers=parts,
        config=SimpleNamespace(clip_grad=1.0),
        step_with_ready_grads=adam.step,
    )
    use_fused_kernels(chained)
    step_with(chained, torch.tensor(2.0), torch.tensor(0.0))
    assert (weight < 1.0).all()


def main(folder: Path, work: Path, rank: int, world_size: int, layout: str) -> None:
    topology = join_ranks(work, rank, world_size, section_of(layout))
    from slipstream.learner.starting_policy import build_policy
    from slipstream.learner.training.optimizer import gradient_norm

    check_fused_kernels()
    some = train_siblings()
    replicas = topology.data_parallel
    batch = pack(some, device.device(), shares_prompts=True)
    assert batch.shared is not None
    data = random_outcomes(some, step=5)
    plan = whole_plan(some)
    if replicas > 1:  # each trains them all: what is counted does not depend on it
        plan = type(plan)(plan.microbatches * replicas)
    report: dict[str, object] = {}
    norms = []
    for name, algo in {**algorithms(folder), "bfloat16": {}}.items():
        dtype = "bfloat16" if name == "bfloat16" else "float32"
        learner = LearnerSection(lr=1e-2, adam_epsilon=1e-3, dtype=dtype)
        settings = settings_of(folder, learner, algo)
        algorithm = algorithm_of(settings)

        def train(policy: object) -> None:
            train_step(policy, [[batch]], [plan], data, algorithm, PhaseClock(), num_lags=3)  # type: ignore[arg-type]  # noqa: B023

        policy = build_policy(settings, algorithm, topology)
        critic = None if policy.critic is None else Counted(policy.critic)
        counted = Counted(policy, critic)
        for _ in range(2):
            train(counted)
        report[name] = counted.seen
        if critic is not None:
            report[f"{name}, critic"] = critic.seen
        optimizer = policy._optimizer
        norms.append([float(gradient_norm(optimizer)), optimizer.get_grad_norm()])
    report["norms"] = norms
    finish(work / f"{rank}.json", report)


if __name__ == "__main__":
    run(main)
