"""Settings of the broker, its data and its reward workers."""

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from slipstream.wire.errors import ConfigError
from slipstream.wire.files.run_folder import HOSTS_KEY, PAGE_ADDRESS, PAGE_TOKEN
from slipstream.wire.messages.trajectory import Json
from slipstream.wire.settings.load import Section, Table, section
from slipstream.wire.settings.sections import (
    AtLeast0,
    AtLeast1,
    EnvironmentSection,
    EvalSection,
    LoggingSection,
    NotNegative,
    Positive,
    RunSection,
    SamplingSection,
    SourceTable,
    required,
    run_section,
)
from slipstream.wire.settings.tenants import neighbors

_BYTES_PER_TOKEN = 13  # id, logprob, mask, and four characters in the transcript


class DataSection(Section, frozen=True, kw_only=True):
    """[data]: where prompts come from.

    See [data.md](data.md).
    """

    file: str = ""
    """JSONL or parquet file of prompts, if one file is all there is."""
    sources: dict[str, SourceTable] = msgspec.field(default_factory=dict)
    """Several files or reasoning-gym data sets, by name; mixed by rows or by weight."""
    shuffle: bool = True
    """Take prompts in an order of run.seed, another one in every epoch; false is file order."""
    on_bad_row: Literal["error", "skip"] = "error"
    """Treatment of rows that are no prompts; skipped rows are counted and logged."""
    prompt_column: str = "prompt"
    """Column of a file that holds text or a list of turns."""
    ground_truth_column: str = "ground_truth"
    """Column of a file that holds what rewards compare with; by default also verl's
    reward_model.ground_truth."""
    image_column: str = "images"
    """Column of a file that holds a row's images; empty leaves images out."""
    max_images: AtLeast1 = 16
    """Most images of one prompt."""
    as_chat: bool = False
    """Ask text prompts as one turn of a user, through the model's chat template."""
    system_prompt: str = ""
    """First turn of every conversation that has no system turn."""
    allow_change: bool = False
    """Resume from a checkpoint although the prompts differ from those it was saved with."""


class RedisTable(Section, frozen=True, kw_only=True):
    """[broker.redis]: where events and payloads are kept."""

    url: str = ""
    """An existing server, redis://, rediss:// (TLS) or unix://; empty starts a private one."""
    username: str = ""
    """ACL user of an existing server; empty is its default user."""
    ca_file: str = ""
    """Certificates that a rediss:// server must be signed by; empty is the system's."""
    password_file: str = ""
    """File with the password of an existing server; passwords do not belong into settings."""
    fsync: Annotated[str, msgspec.Meta(pattern="^(always|everysec|no)$")] = "always"
    """appendfsync of the private server. Weaker than always can lose acknowledged work."""

    @property
    def known_fsync(self) -> str:
        """Sync policy of the store; empty for another's server, where it is not known."""
        return "" if self.url else self.fsync


class DashboardTable(Section, frozen=True, kw_only=True):
    """[broker.dashboard]: the live page and /metrics."""

    enabled: bool = True
    """Serve the page."""
    host: str = "127.0.0.1"
    """Address of the page. Beyond loopback it travels openly, token and all."""
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    """Port of the page; 0 lets the system choose."""


class BrokerSection(Section, frozen=True, kw_only=True):
    """[broker]: leases, limits and filters.

    The default of `broker.max_in_flight` is (S + 1) x G groups. Less than G is refused. A
    `broker.redis.url` that holds a password is refused, because settings are written into
    `resolved.toml`.
    """

    lease_s: Positive = 60.0
    """A lease ends this long after its last heartbeat."""
    max_lease_s: NotNegative = 0.0
    """A lease of generation ends after this long in spite of heartbeats; 0 is never."""
    max_attempts: AtLeast1 = 3
    """Attempts to generate and to score before a group is dropped."""
    max_batch_attempts: AtLeast1 = 3
    """Learners that may end with the same batch in hand before its groups become dead letters."""
    max_in_flight: int | None = None
    """Most groups started and in no batch yet; default is the most the staleness bound allows."""
    drop_zero_variance: bool = True
    """Drop groups whose rewards are all equal (they carry no gradient) and issue others."""
    zero_variance_of: str = ""
    """Use this named part of the reward instead, such as the one before shaping."""
    high_water_bytes: AtLeast1 = 4 * 1024 * 1024 * 1024
    """Past so much untrained payload no more groups are started than one step needs."""
    replay_budget_bytes: AtLeast0 = 2 * 1024 * 1024 * 1024
    """Trained payloads kept until a checkpoint holds their step; past it prompts alone are kept."""
    image_budget_bytes: AtLeast0 = 64 * 1024 * 1024 * 1024
    """Most bytes of images in the run folder; past it prompts with more of them are bad rows, and
    observations are refused."""
    cache_bytes: AtLeast0 = 256 * 1024 * 1024
    """Payloads that the broker keeps in its own memory too, besides Redis."""
    max_trail_bytes: AtLeast0 = 256 * 1024 * 1024
    """Newest history of every item, for `slipstream ledger trace`; 0 writes none."""
    record_batches: bool = False
    """Record trained batches whole in rollouts/, for `slipstream replay`."""
    max_recorded_bytes: AtLeast0 = 1024 * 1024 * 1024
    """Recording stops at this size; 0 is no limit."""
    max_message_bytes: AtLeast1 = 256 * 1024 * 1024
    """Larger messages are refused."""
    max_requests_per_s: Positive = 20_000.0
    """Requests of one client in the long run; beyond it they are refused as slow_down."""
    listen: str = ""
    """Where roles on other hosts connect, tcp://ADDRESS:PORT; they need keys. Empty is nowhere."""
    keys: str = ""
    """Folder of the keys for that; empty is DIR/keys, which all runs share."""
    redis: RedisTable = RedisTable()
    dashboard: DashboardTable = DashboardTable()


class RewardTable(Section, frozen=True, kw_only=True):
    """[reward.sources.NAME]: the reward of one data source."""

    function: str = ""
    """MODULE:NAME or FILE.py:NAME of a function or class; needed."""
    options: dict[str, Json] = msgspec.field(default_factory=dict)
    """Keyword arguments of the function, or of the class."""


class RewardSection(Section, frozen=True, kw_only=True):
    """[reward]: how answers are scored.

    See [rewards.md](rewards.md). A path is relative to the folder the process was started in.
    """

    function: str = "slipstream.broker.rewards.exact_match:score"
    """MODULE:NAME or FILE.py:NAME of a function or class."""
    options: dict[str, Json] = msgspec.field(default_factory=dict)
    """Keyword arguments of the function, or of the class."""
    sources: dict[str, RewardTable] = msgspec.field(default_factory=dict)
    """Other rewards for some data sources, by data_source."""
    workers: AtLeast0 = 1
    """Reward workers that `slipstream run` starts; 0 if they are started by hand. With
    environment.function, 0 (and inline = false) says that environments give all rewards: what one
    gives none has failed."""
    inline: bool = False
    """Score in the generators first; workers get the answers still without a reward."""
    processes: AtLeast1 = 2
    """Child processes in which one worker runs the function."""
    concurrency: AtLeast1 = 16
    """Answers that one child works on at a time where the function is async."""
    credits: AtLeast1 = 64
    """Trajectories that one worker leases at a time."""
    timeout_s: Positive = 60.0
    """A call that takes longer has failed: its child is replaced, the answer scored elsewhere."""
    cpu_s: Positive = 60.0
    """Processor seconds that one call may take."""
    memory_mb: AtLeast1 = 4096
    """Memory of one child and all that it starts; past it the child is replaced."""
    max_processes: AtLeast1 = 64
    """Processes and threads of one child and all that it starts."""
    environment: tuple[str, ...] = ()
    """Variables that a reward function gets besides the system's and Python's, such as the
    name of a judge's API key variable."""
    sandbox: Literal["namespaces", "none"] = "namespaces"
    """How reward functions, and code that a model wrote, are run: in namespaces made by bubblewrap
    (`bwrap`), or unprotected. Without bubblewrap the worker refuses to start; in a
    container that forbids namespaces, set `none` for functions that you trust."""


class BrokerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All that the broker reads."""

    run: RunSection
    data: DataSection
    eval: EvalSection
    sampling: SamplingSection
    broker: BrokerSection
    reward: RewardSection
    logging: LoggingSection
    environment: EnvironmentSection = EnvironmentSection()

    @property
    def keys_folder(self) -> Path:
        """Folder of the broker's and its clients' keys."""
        return keys_folder(self.run, self.broker)

    @property
    def max_in_flight(self) -> int:
        """Most groups that are neither trained nor dropped."""
        allowed = (self.run.staleness_bound + 1) * self.run.groups_per_step
        return allowed if self.broker.max_in_flight is None else self.broker.max_in_flight


def keys_folder(run: RunSection, broker: BrokerSection) -> Path:
    """Return the folder of the broker's and its clients' keys."""
    return Path(broker.keys) if broker.keys else Path(run.dir) / "keys"


def redis_folder(run: RunSection) -> Path:
    """Return the folder of the private server's files, with all prompts, answers and truths."""
    return run.folder / "redis"


def private_folders(run: RunSection) -> tuple[Path, ...]:
    """Return the folders of a run's sockets, store, page token and key of a learner's hosts."""
    in_run = (run.folder / path.parent for path in (PAGE_TOKEN, HOSTS_KEY))
    return (run.socket_folder, redis_folder(run), *in_run)


def private_paths(table: Table) -> tuple[Path, ...]:
    """Return the paths hidden from reward functions: keys, stores and sockets.

    Sockets need no key: any process that can reach them could pose as the learner. A role
    of a broker on another host has no sockets or store here, unless some exist already; a run
    folder that is here may be the one that a learner's hosts share. A tenant's functions do not see
    those of its neighbors either.
    """
    run = run_section(table)
    of_others = (path for other in neighbors(run) for path in _private_paths(other))
    return tuple(dict.fromkeys((*_private_paths(table), *of_others)))


def _private_paths(table: Table) -> tuple[Path, ...]:
    run, broker = run_section(table), section(table, "broker", BrokerSection)
    algo = table.get("algo")  # the learner checks its settings
    teacher = algo.get("teacher") if isinstance(algo, dict) else None
    here = {run.folder / HOSTS_KEY.parent} if run.folder.exists() else set()
    files = (
        broker.redis.password_file,
        str(run.folder / PAGE_ADDRESS),
        section(table, "environment", EnvironmentSection).key_file,
        str(teacher.get("api_key_file", "")) if isinstance(teacher, dict) else "",
    )
    return (
        keys_folder(run, broker),
        *((Path(run.key_file),) if run.key_file else ()),
        *(path for path in private_folders(run) if not run.broker or path in here or path.exists()),
        *(Path(name) for name in files if name and Path(name).exists()),
    )


def broker_settings(table: Table) -> BrokerSettings:
    """Decode and check the broker's sections."""
    settings = BrokerSettings(
        run=run_section(table),
        data=section(table, "data", DataSection),
        eval=section(table, "eval", EvalSection),
        sampling=section(table, "sampling", SamplingSection),
        broker=section(table, "broker", BrokerSection),
        reward=section(table, "reward", RewardSection),
        environment=section(table, "environment", EnvironmentSection),
        logging=section(table, "logging", LoggingSection),
    )
    if settings.keys_folder.absolute() == settings.run.folder.absolute():
        raise ConfigError(
            f"run.name = {settings.run.name!r}: {settings.keys_folder} is the folder of the keys "
            "of roles on other hosts (broker.keys); choose another name"
        )
    if not settings.data.sources:
        required(settings.data.file, "data.file")
    evaluation = settings.eval
    asked = {"eval.target": evaluation.target is not None, "eval.patience": evaluation.patience > 0}
    for setting, is_set in asked.items():
        if is_set and not evaluation.enabled:
            raise ConfigError(f"{setting} needs held-out problems: set eval.file or eval.sets")
    if evaluation.patience and not evaluation.every_steps:
        raise ConfigError("eval.patience counts evaluations while training: set eval.every_steps")
    listen = settings.broker.listen
    if listen and not listen.startswith("tcp://"):
        raise ConfigError(f"broker.listen must be tcp://ADDRESS:PORT, got {listen!r}")
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
    _check_target(settings.run)
    run, sampling = settings.run, settings.sampling
    longest = settings.environment.longest(sampling)
    step_bytes = run.groups_per_step * run.group_size * longest * _BYTES_PER_TOKEN
    if step_bytes > settings.broker.high_water_bytes:
        raise ConfigError(
            f"broker.high_water_bytes is {settings.broker.high_water_bytes}, but the "
            f"run.groups_per_step = {run.groups_per_step} groups of one learner step can take "
            f"{step_bytes} bytes ({run.group_size} x {longest} tokens each)"
        )
    if settings.broker.drop_zero_variance and settings.run.group_size < 2:
        raise ConfigError(
            "run.group_size must be >= 2 while broker.drop_zero_variance is on, "
            f"got {settings.run.group_size}"
        )
    return settings


def _check_target(run: RunSection) -> None:
    """Refuse a target of staleness that means nothing.

    Raises:
        ConfigError: it does.
    """
    target, bound = run.staleness_target, run.staleness_bound
    if not target.is_set:
        return
    if target.mismatch_kl is not None and target.p95_lag is not None:
        raise ConfigError(
            "run.staleness_target has mismatch_kl and p95_lag: one of them can be held"
        )
    if not bound:
        raise ConfigError(
            "run.staleness_target is below the bound, which is 0 with run.max_staleness_steps = 0 "
            'or run.mode = "sync": raise the bound or leave the target out'
        )
    if run.staleness_mode == "drop":
        raise ConfigError(
            'run.staleness_target with run.staleness_mode = "drop": a lowered bound would drop '
            'more groups, long answers first; expected run.staleness_mode = "wait"'
        )
    if target.p95_lag is not None and target.p95_lag >= bound:
        raise ConfigError(
            f"run.staleness_target.p95_lag is {target.p95_lag}, expected less than "
            f"run.max_staleness_steps = {bound}, which no token passes"
        )
