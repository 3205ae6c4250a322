"""What the optimizer's settings do: one step per setting, and the learning rate of nine.

Usage: optimizer MODEL_FOLDER WORK_FOLDER
Writes WORK_FOLDER/0.json.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from slipstream.learner.batches.packing import TrainTrajectory, pack
from slipstream.learner.config import LearnerSection
from slipstream.learner.model import device
from tests.support.ranks.policy import algorithm, random_outcomes, train_sequences, whole_plan
from tests.support.ranks.program import finish, join_ranks, run

if TYPE_CHECKING:
    from slipstream.learner.training.policy import Policy

SCHEDULES: dict[str, dict[str, object]] = {
    "constant": {"lr_warmup_steps": 3},
    "linear": {"lr_schedule": "linear", "lr_warmup_steps": 2, "lr_min": 0.2},
    "cosine": {"lr_schedule": "cosine"},
    "inverse-square-root": {"lr_schedule": "inverse-square-root", "lr_warmup_steps": 1},
    "WSD": {"lr_schedule": "WSD", "lr_warmup_steps": 1, "wsd_decay_steps": 2},
    "WSD to a square root": {
        "lr_schedule": "WSD",
        "lr_warmup_steps": 1,
        "wsd_decay_steps": 2,
        "wsd_decay": "minus_sqrt",
    },
}


# With this epsilon Adam is linear in the gradient, so that clipping and momentum show.
LINEAR: dict[str, object] = {"lr": 10.0, "adam_epsilon": 1e3, "clip_grad": 0.0}
NAME = "model.layers.0.mlp.down_proj.weight"


def moves(policy: "Policy", *halves: Sequence[TrainTrajectory]) -> list[torch.Tensor]:
    """Return how a step of each of the halves moves a weight."""
    from slipstream.learner.model.weights.hf_weights import export_hf_weights
    from slipstream.learner.training.step import train_step
    from slipstream.wire.process.phases import PhaseClock

    weights = [dict(export_hf_weights(policy.model))[NAME].clone()]
    for half in halves:
        batch, plan = pack(half, device.device()), whole_plan(half)
        train_step(policy, [[batch]], [plan], random_outcomes(half), algorithm(), PhaseClock())
        policy.end_step()
        weights.append(dict(export_hf_weights(policy.model))[NAME].clone())
    return [after - before for before, after in pairwise(weights)]


def relative_error(measured: torch.Tensor, expected: torch.Tensor) -> float:
    return float((measured - expected).norm() / expected.norm())


def main(folder: Path, work: Path) -> None:
    topology = join_ranks(work, 0, 1, LearnerSection())
    from slipstream.learner.model.gpt import build_model
    from slipstream.learner.model.weights.hf_weights import export_hf_weights, load_hf_weights
    from slipstream.learner.training.critic import Critic, with_value_head
    from slipstream.learner.training.policy import Policy
    from slipstream.learner.training.step import train_step
    from slipstream.wire.models.hf_config import load_hf_config
    from slipstream.wire.process.phases import PhaseClock

    everything = train_sequences()

    def policy(critic: Critic | None = None, **settings: object) -> Policy:
        model = build_model(load_hf_config(folder), dtype=torch.float32, extra={})
        load_hf_weights(model, folder)
        return Policy(model, LearnerSection(**settings), topology, decay_steps=6, critic=critic)

    def step(**settings: object) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], float]:
        """Return the weights before and after one step, and the gradient's norm."""
        trained = policy(**settings)
        before = {name: t.clone() for name, t in export_hf_weights(trained.model)}
        batch, plan = pack(everything, device.device()), whole_plan(everything)
        outcomes = random_outcomes(everything)
        figures, _ = train_step(trained, [[batch]], [plan], outcomes, algorithm(), PhaseClock())
        after = {name: t.clone() for name, t in export_hf_weights(trained.model)}
        return before, after, figures["policy/grad_norm"]

    def rates(settings: dict[str, object]) -> list[float]:
        scheduled = policy(lr=1.0, **settings)
        values = []
        for _ in range(8):
            values.append(scheduled.lr)
            scheduled.end_step()
        return values

    def rates_after_the_critic_alone() -> dict[str, list[float]]:
        """Return the learning rates before a step, after one of the critic, and after one more."""
        settings: dict[str, object] = {"lr": 1.0, "lr_warmup_steps": 3}
        critic = Critic(
            with_value_head(build_model(load_hf_config(folder), dtype=torch.float32, extra={})),
            LearnerSection(**settings),
            topology,
            decay_steps=6,
        )
        both = policy(critic, **settings)
        values: dict[str, list[float]] = {"policy": [both.lr], "critic": [critic.lr]}
        for trained_policy in (False, True):
            both.end_step(trained_policy=trained_policy)
            values["policy"].append(both.lr)
            values["critic"].append(critic.lr)
        return values

    before, plain, _ = step(lr=1e-2, weight_decay=0.0)
    _, decayed, _ = step(lr=1e-2, weight_decay=0.5)
    decay = dict.fromkeys(before, decayed[NAME] - plain[NAME] + 0.01 * 0.5 * before[NAME])
    _, free, norm = step(**LINEAR)
    _, clipped, norm_again = step(**LINEAR | {"clip_grad": norm / 4})
    halves = everything[::2], everything[1::2]
    first, second = moves(policy(adam_beta1=0.0, **LINEAR), *halves)
    # Bias correction makes the first equal; the second is the mean weighted by 0.75 and 1.
    begun, carried = moves(policy(adam_beta1=0.75, **LINEAR), *halves)
    report = {
        "not_decayed": sorted(n for n in before if plain[n].equal(decayed[n])),
        "decay_error": {n: float(d.abs().max()) for n, d in decay.items()},
        "norms": [norm, norm_again],
        "clipped_share": float(
            (clipped[NAME] - before[NAME]).norm() / (free[NAME] - before[NAME]).norm()
        ),
        "momentum_errors": [
            relative_error(begun, first),
            relative_error(carried, (0.75 * first + second) / 1.75),
            relative_error(carried, second),
        ],
        "rates": {schedule: rates(settings) for schedule, settings in SCHEDULES.items()},
        "warming": rates_after_the_critic_alone(),
    }
    finish(work / "0.json", report)


if __name__ == "__main__":
    run(main)
