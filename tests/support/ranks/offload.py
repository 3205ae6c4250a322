"""What a rank holds on its device while it computes, with learner.offload and without.

Usage: offload MODEL_FOLDER WORK_FOLDER
Writes WORK_FOLDER/0.json: per setting the figures of two steps and, per moment, the models and
kinds of tensors that the device held; and the trained models to WORK_FOLDER/SETTING.
"""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.learner.batches.packing import PackedBatch, pack
from slipstream.learner.config import LearnerSection
from slipstream.learner.model import device
from slipstream.learner.training.algorithm import algorithm_of
from slipstream.learner.training.step import train_step
from slipstream.wire.process.phases import PhaseClock
from tests.support.ranks.policy import random_outcomes, train_sequences, whole_plan
from tests.support.ranks.program import finish, join_ranks, run, settings_of

if TYPE_CHECKING:
    from slipstream.learner.training.policy import Policy

KINDS = ("weights", "gradients", "optimizer")
SETTINGS: dict[str, dict[str, object]] = {
    "plain": {},
    "all": {"offload": KINDS},
    "half-bfloat16": {"optimizer_offload_fraction": 0.5, "dtype": "bfloat16"},
    "whole-bfloat16": {"optimizer_offload_fraction": 1.0, "dtype": "bfloat16"},
    "narrow": {"moments_dtype": "bfloat16"},
    "all-narrow": {"moments_dtype": "bfloat16", "offload": KINDS},
    "narrow-bfloat16": {"moments_dtype": "bfloat16", "dtype": "bfloat16"},
    "bfloat16": {"dtype": "bfloat16"},
    "all-bfloat16": {"offload": KINDS, "dtype": "bfloat16"},
    **{kind: {"offload": (kind,)} for kind in KINDS},
}
ALGO: dict[str, object] = {
    "preset": "vapo",
    "critic": {"warmup_steps": 0, "lr": 1e-2},
    "kl": {"coefficient": 0.1, "name": "k1", "place": "reward", "renew_every": 1},
}


def main(folder: Path, work: Path) -> None:
    topology = join_ranks(work, 0, 1, LearnerSection())
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    from slipstream.learner.model.weights.hf_weights import save_hf_folder
    from slipstream.learner.starting_policy import build_policy
    from slipstream.learner.training import trainable
    from slipstream.learner.training.passes import ModelPasses

    everything = train_sequences()
    batch, plan = pack(everything, device.device()), whole_plan(everything)
    held: list[tuple[str, list[str]]] = []
    policies: list[Policy] = []

    def observed(moment: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: object, **kwargs: object) -> object:
            if policies:
                held.append((moment, sorted(_held(policies[-1]))))
            return function(*args, **kwargs)

        return call

    ModelPasses.forward = observed("forward", ModelPasses.forward)  # type: ignore[method-assign]
    ModelPasses.train = observed("train", ModelPasses.train)  # type: ignore[method-assign]
    trainable.step_with = observed("update", trainable.step_with)

    report: dict[str, object] = {}
    for name, learner in SETTINGS.items():
        section = LearnerSection(lr=1e-2, adam_epsilon=1e-3, **learner)  # type: ignore[arg-type]
        settings = settings_of(folder, section, ALGO)
        held.clear()
        policy = None
        gc.collect()
        gc.disable()  # only who frees what refers to itself is rid of it
        policy = build_policy(settings, algorithm_of(settings), topology)
        hybrids = sum(type(one) is HybridDeviceOptimizer for one in gc.get_objects())
        gc.enable()
        policies.append(policy)
        figures = []
        for step in range(2):
            batches: list[list[PackedBatch]] = [[batch]]
            found, _ = train_step(
                policy,
                batches,
                [plan],
                random_outcomes(everything, step),
                algorithm_of(settings),
                PhaseClock(),
            )
            figures.append(found)
            policy.end_step()
            policy.renew_reference()
        policy.bring_weights()
        held.append(("publish", sorted(_held(policy))))
        report[name] = {
            "figures": figures,
            "held": list(held),
            "held bytes": sum(policy.held_bytes()[kind] for kind in ("main weights", "moments")),
            "hybrid optimizers": hybrids,
        }
        save_hf_folder(policy.model, work / name, folder)
        policies.clear()
    finish(work / "0.json", report)


def _held(policy: "Policy") -> set[str]:
    """Return the kinds of tensors on the device, by model."""
    assert policy.critic is not None
    assert policy.reference is not None
    models = {"policy": policy, "critic": policy.critic}
    kinds = {
        f"{name} {'optimizer' if kind in {'main weights', 'moments'} else kind}"
        for name, model in models.items()
        for kind, num_bytes in model.held_bytes().items()
        if num_bytes > 1000  # counts of updates are on the host at all times
    }
    frozen = policy.reference._model.parameters()
    if any(weight.untyped_storage().nbytes() for weight in frozen):
        kinds.add("reference weights")
    return kinds


if __name__ == "__main__":
    run(main)
