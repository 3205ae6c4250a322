"""Settings of the algorithm: plain structs, decoded by the learner."""

from typing import Annotated, Literal

import msgspec


class AlgoSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[algo]: decoupled PPO on group-relative advantages."""

    advantage: Literal["grpo", "grpo-without-std"] = "grpo"
    """Group-relative advantage, divided by the group's standard deviation or not."""
    surrogate: Literal["decoupled-ppo"] = "decoupled-ppo"
    """Clip current / proximal; correct proximal / behavior."""
    clip_low: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.2
    """The ratio current / proximal is clipped below 1 - clip_low."""
    clip_high: Annotated[float, msgspec.Meta(gt=0)] = 0.2
    """The ratio current / proximal is clipped above 1 + clip_high."""
    max_correction: Annotated[float, msgspec.Meta(gt=0)] = 5.0
    """Cap on the staleness correction proximal / behavior."""
