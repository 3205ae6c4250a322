"""Sections that more than one role reads."""

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import msgspec

from slipstream.wire.errors import ConfigError
from slipstream.wire.files.fetched import (
    Fetch,
    default_cache,
    fetched_file,
    found_model,
    with_tokenizer,
)
from slipstream.wire.files.remote import is_url
from slipstream.wire.files.run_folder import SUMMARY
from slipstream.wire.messages.trajectory import Json
from slipstream.wire.messages.weightbus import RelayAddress
from slipstream.wire.models.model_files import copied_files, refuse_no_model
from slipstream.wire.settings.load import Section, Table, section

AtLeast0 = Annotated[int, msgspec.Meta(ge=0)]
AtLeast1 = Annotated[int, msgspec.Meta(ge=1)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
RoutingReplay = Literal["off", "R2", "R3"]
TrackerName: TypeAlias = Literal["tensorboard", "wandb", "mlflow", "swanlab", "trackio"]
TopP = Annotated[float, msgspec.Meta(gt=0, le=1)]

MAX_SOCKET_PATH = 100  # the kernel allows 107 bytes for the path of a Unix socket

_MAX_NAME_BYTES = 200  # length of a folder's name; a number may be added


class StalenessTargetTable(Section, frozen=True, kw_only=True):
    """[run.staleness_target]: a figure that is held by starting fewer groups than the bound allows.

    One of the two. The bound run.max_staleness_steps holds all the same: a controller lowers the
    bound that is in force and the groups under way, and raises them again
    (docs/staleness.md#a-target-below-the-bound).
    """

    mismatch_kl: Positive | None = None
    """Held near this, and tried above now and then: staleness/mismatch_kl, in nats per token."""
    p95_lag: AtLeast0 | None = None
    """At most 5% of the trained tokens are older, in learner steps."""

    @property
    def is_set(self) -> bool:
        """Whether there is a target."""
        return self.mismatch_kl is not None or self.p95_lag is not None


class RunSection(Section, frozen=True, kw_only=True):
    """[run]: identity and size of the run.

    A run folder is `DIR/NAME`. `slipstream run` takes NAME-2, NAME-3, ... when the folder exists
    already, unless called with `--resume`. With `run.socket_dir` empty it puts the sockets into a
    private temporary folder and records it in `resolved.toml`. The run ends at the
    first of `run.steps`, `run.epochs`, `run.max_hours`, `eval.target` and `eval.patience`.
    """

    name: str = "run"
    """Name of the run; its folder is DIR/NAME."""
    dir: str = "runs"
    """Folder of all runs."""
    model: str = ""
    """Hugging Face folder of the policy to start from, the URL of one, such as s3://BUCKET/MODEL,
    or the name of a model of the Hugging Face hub, such as Qwen/Qwen3-0.6B."""
    mode: Literal["async", "sync"] = "async"
    """sync trains on no data older than the policy: the same roles with a staleness bound of 0."""
    steps: AtLeast1 = 100
    """Learner steps to train."""
    epochs: NotNegative = 0.0
    """Issue this many times as many prompts as there are rows, then end; 0 is no limit."""
    max_hours: NotNegative = 0.0
    """End the run normally this many hours after its start or resume; 0 is no limit."""
    group_size: AtLeast1 = 8
    """Trajectories per prompt (siblings)."""
    groups_per_step: AtLeast1 = 32
    """Groups that one learner step trains (G)."""
    max_staleness_steps: AtLeast0 = 2
    """Oldest data the learner may train on, in learner steps (S). 0 is synchronous."""
    staleness_mode: Literal["wait", "drop"] = "wait"
    """wait reserves a place in a batch for each started group; drop discards groups that expire."""
    staleness_target: StalenessTargetTable = StalenessTargetTable()
    """What to hold below the bound, as in { p95_lag = 1 } or { mismatch_kl = 0.01 }."""
    routing_replay: RoutingReplay = "off"
    """Experts that the learner's routers choose again: R3 those that the engine chose for a token,
    which travel with it (a byte for each layer and expert of a token, two with more than 256 to
    choose from); R2 those of the policy at the start of the step, in its later updates."""
    min_groups: AtLeast0 = 0
    """Fewest groups that the last step of run.epochs may train; 0 is half of groups_per_step."""
    outage_s: Positive = 300.0
    """Roles wait this long for a broker that is gone, and the broker for its Redis."""
    stuck_s: NotNegative = 0.0
    """A role without progress for so long fails its probe /health/live (--health); 0 is never."""
    seed: int = 0
    """Seed of prompts, sampling and the learner."""
    resume_from: str = ""
    """Checkpoint folder to resume from; `slipstream run --resume` fills it in."""
    socket_dir: str = ""
    """Private folder for this run's sockets; empty means DIR/NAME/sockets."""
    broker: str = ""
    """Where the broker listens, for roles on other hosts: tcp://HOST:PORT."""
    key_file: str = ""
    """Key that this host proves to such a broker; `slipstream keys make` writes it."""
    cache_dir: str = ""
    """Folder of the local copies of what URLs name; empty is ~/.cache/slipstream."""
    contents: dict[str, str] = msgspec.field(default_factory=dict)
    """Hash that the content of a URL must have, or the commit of a model of the hub;
    `slipstream run` fills it in."""

    @property
    def staleness_bound(self) -> int:
        """Oldest data that the learner may train on, in learner steps."""
        return 0 if self.mode == "sync" else self.max_staleness_steps

    @property
    def fewest_groups(self) -> int:
        """Number of groups that the last step of the data needs."""
        return self.min_groups or max(1, self.groups_per_step // 2)

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.dir) / self.name

    @property
    def checkpoints(self) -> Path:
        """Folder of the run's checkpoints."""
        return self.folder / "checkpoints"

    @property
    def logs(self) -> Path:
        """Folder with one log per role."""
        return self.folder / "logs"

    @property
    def summary_file(self) -> Path:
        """File with the run's figures."""
        return self.folder / SUMMARY

    @property
    def socket_folder(self) -> Path:
        """Folder of this run's sockets."""
        return Path(self.socket_dir) if self.socket_dir else self.folder.resolve() / "sockets"

    def make_socket_folder(self) -> None:
        """Make the private folder of this run's sockets; the listening roles call this."""
        self.socket_folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.socket_folder.chmod(0o700)

    def socket(self, name: str) -> Path:
        """Return the path of one of this run's Unix sockets.

        Raises:
            ConfigError: the path is too long for the kernel.
        """
        path = self.socket_folder / f"{name}.sock"
        if len(str(path).encode()) > MAX_SOCKET_PATH:
            raise ConfigError(
                f"socket path {path} is longer than {MAX_SOCKET_PATH} bytes; "
                "set run.socket_dir to a short private folder"
            )
        return path

    @property
    def broker_endpoint(self) -> str:
        """ZeroMQ endpoint at which this role reaches the broker."""
        return self.broker or self.endpoint("broker")

    def endpoint(self, name: str) -> str:
        """Return the ZeroMQ endpoint of one of this run's Unix sockets."""
        return f"ipc://{self.socket(name)}"


def part_name(part: int) -> str:
    """Return the name of a relay: of the head, 0, or of another host of the learner."""
    return f"relay-{part}" if part else "relay"


def relay_lock(run: RunSection, part: int = 0) -> Path:
    """Return the file that the run's weight relay on a host keeps locked until it ends."""
    return run.socket(part_name(part)).with_suffix(".lock")


def relay_address(run: RunSection) -> RelayAddress:
    """Return the addresses at which engines on the relay's host reach it."""
    return RelayAddress(endpoint=run.endpoint("weightbus"), bulk_endpoint=run.endpoint("weights"))


class SamplingSection(Section, frozen=True, kw_only=True):
    """[sampling]: the distribution that training trajectories are sampled from, and its text.

    See [data.md](data.md) for prompts and chat templates.
    """

    temperature: Positive = 1.0
    """Logits are divided by this, by the engine and by the learner alike."""
    top_p: TopP = 1.0
    """Sample from the most probable tokens that hold this share, up to max_kept_tokens."""
    top_k: int = -1
    """Sample from the N most probable tokens, 2 to max_kept_tokens; -1 is all."""
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    """Sample from the tokens with this share of the most probable one's probability at least."""
    kept_tokens: Literal["replay", "drop"] = "replay"
    """Where top_p, top_k or min_p leave tokens out: replay sends the ones that were kept to the
    learner, whose distribution is then over these alone (2 or 4 bytes for each, 1 or 2 for their
    number); drop sends none: both sides' log-probabilities are over the whole vocabulary, and what
    is trained is not quite what was sampled from."""
    max_kept_tokens: Annotated[int, msgspec.Meta(ge=2)] = 1024
    """Tokens that replay keeps for a response token at most: a top_k where there is none."""
    max_prompt_tokens: AtLeast1 = 512
    """Longer prompts are treated according to sampling.overlong_prompts."""
    max_response_tokens: AtLeast1 = 512
    """A response ends here at the latest."""
    max_image_pixels: AtLeast0 = 0
    """Images of more pixels are made smaller, for engine and learner alike; 0 is the model's own
    limit, where a photograph may have 16,000 tokens."""
    min_response_tokens: AtLeast0 = 0
    """No end of a response is sampled before this many tokens."""
    stop: tuple[str, ...] = ()
    """A response ends after any of these texts."""
    stop_token_ids: tuple[int, ...] = ()
    """A response ends after any of these tokens, besides the model's own."""
    skip_special_tokens: bool = False
    """Leave all special tokens out of the text that rewards and environments get; else those that
    end a response or pad it."""
    overlong_prompts: Literal["error", "drop", "truncate"] = "error"
    """error ends the run; drop takes another prompt; truncate keeps the last tokens."""
    overlong_responses: Literal["keep", "drop"] = "keep"
    """keep trains on a response that was cut off; drop takes another prompt for its group."""
    seed_per_sibling: bool = True
    """Seed every response by run.seed, prompt and sibling; else by the engine alone."""
    chat_template: str = ""
    """Jinja file instead of the model's own chat template."""
    chat_template_kwargs: dict[str, Json] = msgspec.field(default_factory=dict)
    """Variables of the chat template, such as enable_thinking = false."""

    @property
    def is_truncated(self) -> bool:
        """True if tokens are left out of the distribution."""
        return self.top_p < 1 or self.top_k != -1 or self.min_p > 0

    @property
    def records_kept(self) -> bool:
        """True if the learner gets the tokens that were kept."""
        return self.is_truncated and self.kept_tokens == "replay"


class EnvironmentSection(Section, frozen=True, kw_only=True):
    """[environment]: what the policy acts in over several turns.

    See [environments.md](environments.md). A path is relative to the folder the process was started
    in.
    """

    function: str = ""
    """MODULE:NAME or FILE.py:NAME of a class, or of an async function that drives an agent itself.
    Empty: a prompt is answered in one turn."""
    options: dict[str, Json] = msgspec.field(default_factory=dict)
    """Keyword arguments of the class, or of the function."""
    max_turns: AtLeast1 = 16
    """Replies in one trajectory."""
    max_tokens: AtLeast0 = 0
    """Tokens of one trajectory, context included, of all branches together; 0 is
    sampling.max_prompt_tokens and sampling.max_response_tokens together."""
    timeout_s: Positive = 1800.0
    """A trajectory that takes longer has failed and is tried elsewhere."""
    max_outside: AtLeast0 = 64
    """Trajectories of one generator beyond generators.max_sequences, at most: as many are taken as
    are not in the engine, because their environment answers. Each has a process."""
    memory_mb: AtLeast1 = 1024
    """Memory of one trajectory's process and all that it starts; past it they are killed."""
    max_processes: AtLeast1 = 64
    """Processes and threads of one trajectory."""
    environment: tuple[str, ...] = ()
    """Variables that an environment gets besides the system's and Python's."""
    sandbox: Literal["namespaces", "none"] = "namespaces"
    """How environments are run: in namespaces made by bubblewrap (`bwrap`), or unprotected."""
    servers: tuple[str, ...] = ()
    """HOST:PORT of environment servers (`start-environment`); none: environments run beside each
    generator."""
    key_file: str = ""
    """Key that generators and environment servers prove to each other."""
    server_silence_s: Positive = 30.0
    """A server, or a generator, that gives no sign of life for this long is gone: its trajectories
    end and are tried elsewhere."""
    tool_call_parser: str = ""
    """Name of SGLang's parser of tool calls for this model, as in qwen25 or llama3."""
    reasoning_parser: str = ""
    """Name of SGLang's parser of thoughts for this model, as in qwen3 or deepseek-r1: they are cut
    off and handed over as reasoning_content. Empty: they stay in the text."""

    @property
    def is_named(self) -> bool:
        """True if trajectories have an environment."""
        return bool(self.function)

    def longest(self, sampling: "SamplingSection") -> int:
        """Return the most tokens of a trajectory, with or without an environment."""
        most = self.max_tokens if self.is_named else 0
        return most or sampling.max_prompt_tokens + sampling.max_response_tokens


class SourceTable(Section, frozen=True, kw_only=True):
    """[data.sources.NAME] and [eval.sets.NAME]: one file or one generated data set."""

    file: str = ""
    """JSONL or parquet file, with verl's columns or our own."""
    reasoning_gym: str = ""
    """Name of a reasoning-gym data set, instead of a file."""
    size: AtLeast1 = 1000
    """Rows that reasoning-gym generates."""
    seed: int = 0
    """Seed that reasoning-gym generates from."""
    options: dict[str, Json] = msgspec.field(default_factory=dict)
    """Passed on to the reasoning-gym data set, such as max_digits = 3."""
    weight: NotNegative = 0.0
    """Share of the training prompts; 0 for all sources mixes them by their number of rows."""
    max_rows: AtLeast0 = 0
    """Use the first N rows; 0 is all."""
    as_chat: bool | None = None
    """Ask text prompts as one turn of a user; default is data.as_chat."""
    system_prompt: str | None = None
    """First turn of every conversation; default is data.system_prompt."""


class EvalSection(Section, frozen=True, kw_only=True):
    """[eval]: held-out problems, answered through the same generators.

    See [evaluation.md](evaluation.md).
    """

    file: str = ""
    """Held-out problems, if one file is all there is."""
    sets: dict[str, SourceTable] = msgspec.field(default_factory=dict)
    """Several files or reasoning-gym data sets, by name."""
    every_steps: AtLeast0 = 0
    """Evaluate every N learner steps; 0 means only where set below."""
    before_train: bool = True
    """Evaluate the policy that the run starts from."""
    at_end: bool = True
    """Evaluate the policy that the run ends with."""
    samples: AtLeast1 = 1
    """Answers per problem."""
    temperature: NotNegative = 0.0
    """0 is greedy."""
    top_p: TopP = 1.0
    """Sample from the most probable tokens that hold this share."""
    top_k: int = -1
    """Sample from the N most probable tokens; -1 is all."""
    max_response_tokens: AtLeast0 = 0
    """A response ends here at the latest; 0 is sampling.max_response_tokens."""
    correct_reward: float = 1.0
    """An answer with at least this reward is right, for pass@k."""
    metric: str = "mean"
    """Ranks evaluations: mean (that is mean@n), pass@K, or SOURCE:mean, SOURCE:pass@K."""
    target: float | None = None
    """End the run when eval.metric reaches this."""
    patience: AtLeast0 = 0
    """End the run after this many evaluations in a row without a gain; 0 never does."""
    min_gain: NotNegative = 0.0
    """Least improvement of eval.metric that counts as a gain for eval.patience."""
    keep_answers: AtLeast0 = 256
    """Answers to write into eval/ per round; 0 writes the figures alone."""

    @property
    def enabled(self) -> bool:
        """True if there is anything to evaluate."""
        return bool(self.file or self.sets)

    def is_due(self, step: int) -> bool:
        """True if the policy after ``step`` steps is evaluated, apart from the last."""
        if not self.enabled:
            return False
        if step == 0:
            return self.before_train
        return self.every_steps > 0 and step % self.every_steps == 0


class CheckpointSection(Section, frozen=True, kw_only=True):
    """[checkpoint]: checkpoints to resume from.

    See [checkpoints.md](checkpoints.md).
    """

    every_steps: AtLeast0 = 0
    """Save every N learner steps; 0 means only where set below."""
    at_end: bool = True
    """Save when the run is complete."""
    on_stop: bool = True
    """Save when the run is stopped before that, as by Ctrl-C."""
    asynchronous: bool = True
    """Train on while a checkpoint is written, from a copy of the ranks' state in host memory."""
    keep_last: AtLeast1 = 2
    """Newest checkpoints to keep; older ones are removed."""
    keep_best: bool = False
    """Save at every evaluation too, and keep the best by eval.metric."""
    export_at_end: bool = False
    """Write the trained policy as a Hugging Face folder, model/ in the run folder."""
    upload: str = ""
    """URL to upload checkpoints to, such as s3://BUCKET/runs/NAME; for one run alone."""


class LoggingSection(Section, frozen=True, kw_only=True):
    """[logging]: where the curves go, besides the page, and how roles write their logs.

    A run is one run in each tracker, however often its broker or learner begins anew
    (`trackers.json`), and no step is there twice: TensorBoard shows a step that was repeated as it
    was in the end, and the others, which take no point back, as it was first. Keys and tokens
    of a tracker do not belong here: it reads them from its own environment variables or files.
    """

    trackers: tuple[TrackerName, ...] = ("tensorboard",)
    """Any of tensorboard, wandb, mlflow, swanlab, trackio; all but the first are extra packages."""
    verl_names: bool = False
    """Log a learner step's times and throughput by verl's names as well, to compare with its runs:
    [coming_from_verl.md](coming_from_verl.md#timings-and-throughput) has them, and what differs."""
    project: str = "slipstream"
    """Project (MLflow: experiment) that a tracker files the run under."""
    wandb: dict[str, Json] = msgspec.field(default_factory=dict)
    """Passed on to wandb.init, such as mode = "offline" or entity."""
    mlflow: dict[str, Json] = msgspec.field(default_factory=dict)
    """tracking_uri for MLflow, and tags for the run."""
    swanlab: dict[str, Json] = msgspec.field(default_factory=dict)
    """Passed on to swanlab.init, such as mode = "offline" or workspace."""
    trackio: dict[str, Json] = msgspec.field(default_factory=dict)
    """Passed on to trackio.init, such as space_id or server_url; without them curves stay on the
    broker's host, in TRACKIO_DIR."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """The least that a role writes into its log."""
    format: Literal["text", "json"] = "text"
    """Lines of a log: text, or an object of JSON with time, level, role, logger, message."""
    rotate_mb: AtLeast0 = 100
    """`slipstream run` begins a log anew once it is larger, and keeps the older part as LOG.1; 0 is
    never."""
    keep_logs: AtLeast1 = 3
    """Older parts of each log that are kept: LOG.1, LOG.2, ..."""


def run_section(table: Table) -> RunSection:
    """Return [run], with checks across keys."""
    run = section(table, "run", RunSection)
    is_plain = run.name.isprintable() and "/" not in run.name
    if not run.name or run.name.startswith(".") or not is_plain:
        raise ConfigError(f"run.name must be a plain folder name, got {run.name!r}")
    if len(run.name.encode()) > _MAX_NAME_BYTES:
        raise ConfigError(f"run.name must have at most {_MAX_NAME_BYTES} bytes, got {run.name!r}")
    if run.min_groups > run.groups_per_step:
        raise ConfigError(
            f"run.min_groups must be at most run.groups_per_step = {run.groups_per_step}, "
            f"got {run.min_groups}"
        )
    return run


def model_folder(run: RunSection, *, with_weights: bool = False) -> Path:
    """Return the folder of the policy to start from; that of a URL or of the hub is fetched.

    One without tokenizer.json is a copy with a converted tokenizer.

    Without ``with_weights`` config and tokenizer are all that is fetched.

    Raises:
        ConfigError: run.model is not set, is no Hugging Face folder, cannot be fetched, has a
            tokenizer that cannot be converted, or holds a link that an export at the end would
            have to refuse.
    """
    fetch = _fetch(run, required(run.model, "run.model"), "run.model")
    folder = found_model(fetch, with_weights=with_weights)
    refuse_no_model(folder)
    copied_files(folder)
    return with_tokenizer(folder, fetch.cache)


def local_model(run: RunSection, name: str, setting: str, *, with_weights: bool = False) -> Path:
    """Return the folder of a model other than the policy; that of a URL or of the hub is fetched.

    Raises:
        ConfigError: it cannot be fetched.
    """
    return found_model(_fetch(run, name, setting), with_weights=with_weights)


def local_file(run: RunSection, name: str, setting: str) -> str:
    """Return the path of a file that a setting names; that of a URL is fetched.

    Raises:
        ConfigError: it cannot be fetched.
    """
    return str(fetched_file(_fetch(run, name, setting))) if is_url(name) else name


def _fetch(run: RunSection, url: str, setting: str) -> Fetch:
    cache = Path(run.cache_dir) if run.cache_dir else default_cache()
    return Fetch(url, setting, cache, run.contents.get(url, ""))


def required(value: str, setting: str) -> str:
    """Return a setting without a sensible default; ConfigError if it is not set."""
    if not value:
        raise ConfigError(f"{setting} is not set")
    return value
