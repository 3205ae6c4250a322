"""Pure: everything that a simulated run consists of."""

from dataclasses import dataclass, field
from typing import Literal

from slipstream.broker.ledger.throttle import StalenessTarget
from slipstream.deploy.predict.laws.engine_law import EngineLaw
from slipstream.deploy.predict.laws.learner_law import LearnerLaw, PublishLaw
from slipstream.deploy.predict.simulate.lengths import Lengths
from slipstream.wire.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Faults of a run."""

    engine_mtbf_s: float = 0.0  # mean time between failures of one engine; 0 for never
    restart_s: float = 120.0  # time until a failed engine answers again
    lease_s: float = 60.0  # time until its work is given to others
    slow_share: float = 0.0  # share of engines that are slow
    slow_factor: float = 1.5  # times as long as the others
    max_attempts: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of pace at some time."""

    at_s: float
    learner_factor: float = 1.0  # times as long a step
    engine_factor: float = 1.0
    length_factor: float = 1.0
    lost_engines: int = 0  # engines that end now for good


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A run to simulate."""

    steps: int
    groups_per_step: int
    group_size: int
    max_staleness_steps: int
    engines: int
    max_sequences: int  # limit of one engine
    engine: EngineLaw
    learner: LearnerLaw
    publish: PublishLaw
    lengths: Lengths
    prompt_tokens: int = 256
    max_in_flight: int | None = None  # groups; None for as many as the bound allows
    siblings_together: bool = False  # a group holds its lanes until its last answer
    staleness_mode: Literal["wait", "drop"] = "wait"
    prefetch: bool = True  # bind the next batch during training
    publish_every: int = 1  # learner steps
    score_s: float = 0.0  # time from an answer to its reward
    useless_share: float = 0.0  # share of groups with all rewards equal, which are dropped
    target: StalenessTarget | None = None
    kl_per_lag: float = 0.0  # mismatch_kl of a token, by the square of its staleness
    faults: Faults = field(default_factory=Faults)
    changes: tuple[Change, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        counts = ("steps", "groups_per_step", "group_size", "engines", "publish_every")
        for name in counts:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected >= 1")
        if self.max_staleness_steps < 0:
            raise ConfigError(f"max_staleness_steps is {self.max_staleness_steps}, expected >= 0")
        if self.publish_every > self.max_staleness_steps + 1:
            raise ConfigError(
                f"publish_every is {self.publish_every}: with max_staleness_steps = "
                f"{self.max_staleness_steps} an engine waits for a version after "
                f"{self.max_staleness_steps + 1} steps"
            )
        if self.max_sequences < self.group_size:
            raise ConfigError(
                f"max_sequences is {self.max_sequences}, expected at least the group_size of "
                f"{self.group_size}"
            )
        if not 0 <= self.useless_share < 1:
            raise ConfigError(f"useless_share is {self.useless_share:g}, expected in [0, 1)")
        if self.useless_share and self.group_size < 2:
            raise ConfigError("useless_share of groups of 1, whose rewards are all equal")
        if self.in_flight < self.groups_per_step:
            raise ConfigError(
                f"max_in_flight is {self.in_flight}, expected at least the groups_per_step of "
                f"{self.groups_per_step}"
            )

    @property
    def in_flight(self) -> int:
        """Largest number of open groups."""
        if self.max_in_flight is not None:
            return self.max_in_flight
        return self.groups_per_step * (self.max_staleness_steps + 1)
