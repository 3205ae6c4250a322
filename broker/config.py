"""Settings of the broker, its data and its reward workers."""

from typing import Annotated

import msgspec

from wire.errors import ConfigError
from wire.run_settings import AtLeast1, EvalSection, Positive, RunSection, required, run_section
from wire.settings import Section, Table, section


class DataSection(Section, frozen=True, kw_only=True):
    """[data]: where prompts come from."""

    file: str = ""
    """JSONL file of prompts: one object with prompt, ground_truth, data_source a line."""


class RedisTable(Section, frozen=True, kw_only=True):
    """[broker.redis]: where events and payloads are kept."""

    url: str = ""
    """An existing server, redis:// or unix://; empty starts a private one in the run folder."""
    password_file: str = ""
    """File with the password of an existing server; passwords do not belong into settings."""
    fsync: Annotated[str, msgspec.Meta(pattern="^(always|everysec|no)$")] = "always"
    """appendfsync of the private server. Weaker than always can lose acknowledged work."""


class DashboardTable(Section, frozen=True, kw_only=True):
    """[broker.dashboard]: the live page and /metrics."""

    enabled: bool = True
    """Serve the page."""
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    """Port on the loopback interface; 0 lets the system choose."""


class BrokerSection(Section, frozen=True, kw_only=True):
    """[broker]: leases, limits and filters."""

    lease_s: Positive = 30.0
    """A lease ends this long after its last heartbeat."""
    max_attempts: AtLeast1 = 3
    """Attempts to generate and to score before a group is dropped."""
    max_in_flight: int | None = None
    """Most groups neither trained nor dropped; default is what the staleness bound allows."""
    drop_zero_variance: bool = True
    """Drop groups whose rewards are all equal (they carry no gradient) and issue others."""
    max_message_bytes: AtLeast1 = 256 * 1024 * 1024
    """Larger messages are refused by the socket."""
    redis: RedisTable = RedisTable()
    dashboard: DashboardTable = DashboardTable()


class RewardSection(Section, frozen=True, kw_only=True):
    """[reward]: how answers are scored."""

    function: str = "broker.rewards.exact_match:score"
    """MODULE:FUNCTION or FILE.py:FUNCTION."""
    workers: AtLeast1 = 1
    """Reward workers that `slipstream run` starts."""
    timeout_s: Positive = 60.0
    """A function that takes longer over one answer has failed; its worker is replaced."""
    credits: AtLeast1 = 64
    """Trajectories that one worker leases at a time."""


class BrokerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All that the broker reads."""

    run: RunSection
    data: DataSection
    eval: EvalSection
    broker: BrokerSection
    reward: RewardSection

    @property
    def max_in_flight(self) -> int:
        """Return the most groups neither trained nor dropped."""
        allowed = (self.run.max_staleness_steps + 1) * self.run.groups_per_step
        return allowed if self.broker.max_in_flight is None else self.broker.max_in_flight


def broker_settings(table: Table) -> BrokerSettings:
    """Decode and check the broker's sections."""
    settings = BrokerSettings(
        run=run_section(table),
        data=section(table, "data", DataSection),
        eval=section(table, "eval", EvalSection),
        broker=section(table, "broker", BrokerSection),
        reward=section(table, "reward", RewardSection),
    )
    required(settings.data.file, "data.file")
    address = settings.broker.redis.url.partition("://")[2]
    if "@" in address.partition("/")[0] or "password" in address:
        raise ConfigError(
            "broker.redis.url must not hold a password: put it into a file and name that in "
            "broker.redis.password_file"
        )
    if settings.max_in_flight < settings.run.groups_per_step:
        raise ConfigError(
            f"broker.max_in_flight is {settings.max_in_flight}, but a learner step needs "
            f"run.groups_per_step = {settings.run.groups_per_step} groups at once"
        )
    if settings.broker.drop_zero_variance and settings.run.group_size < 2:
        raise ConfigError(
            "run.group_size must be >= 2 while broker.drop_zero_variance is on, "
            f"got {settings.run.group_size}"
        )
    return settings
