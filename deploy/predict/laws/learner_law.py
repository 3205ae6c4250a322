"""Pure: seconds of the learner and of publishes, from a few numbers that hardware explains.

The law of engines is in deploy/predict/laws/engine_law.py.
"""

from dataclasses import dataclass
from typing import Self

from slipstream.deploy.predict.laws.gpus import Gpu
from slipstream.deploy.predict.laws.publish_cost import Cost
from slipstream.wire.models.flops import SequenceCost
from slipstream.wire.models.hf_config import HfConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerLaw:
    """Seconds of a learner step: ``step_s + token_s * tokens + pair_s * squared lengths``."""

    step_s: float = 0.0  # optimizer, planning, the copy of the weights for a publish
    token_s: float = 0.0
    pair_s: float = 0.0  # per squared length

    @classmethod
    def of(
        cls,
        hf: HfConfig,
        gpu: Gpu,
        *,
        num_gpus: int,
        mfu: float,
        step_s: float,
        passes: float = 1.0,
    ) -> Self:
        """Return the law of a learner on some GPUs.

        Args:
            hf: the policy's architecture.
            gpu: Kind of GPU.
            num_gpus: GPUs of the learner.
            mfu: share of the peak that counted operations reach.
            step_s: constant seconds of a step.
            passes: passes over a batch in units of one forward and its backward pass: a forward
                pass alone (proximal logprobs, a reference) is a third more.
        """
        cost = SequenceCost.of(hf)
        flops = gpu.peak_flops * mfu * num_gpus
        per_token = cost.linear + 2 * cost.window * cost.windowed  # sequences far above a window
        return cls(
            step_s=step_s,
            token_s=passes * per_token / flops,
            pair_s=passes * cost.quadratic / flops,
        )

    def seconds(self, num_tokens: float, num_pairs: float) -> float:
        """Return the seconds of a step.

        Args:
            num_tokens: Tokens of all sequences, prompts included.
            num_pairs: sum of their squared lengths.
        """
        return self.step_s + self.token_s * num_tokens + self.pair_s * num_pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishLaw:
    """Seconds of a publish."""

    stall_s: float = 0.0  # learner's pause: its copy of the weights
    transfer_s: float = 0.0  # until engines have them; they generate meanwhile
    pause_s: float = 0.0  # engine's pause
    recomputes: bool = True  # recompute open keys and values with the new weights
    drains: bool = False  # finish open sequences before the new weights

    @classmethod
    def of(cls, cost: Cost) -> Self:
        """Return the law of a publish that is staged on the engines' hosts."""
        return cls(stall_s=cost.stall_s, transfer_s=cost.arrival_s, pause_s=cost.pause_s)
