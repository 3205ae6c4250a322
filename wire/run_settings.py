"""Sections that more than one role reads."""

from pathlib import Path
from typing import Annotated

import msgspec

from wire.errors import ConfigError
from wire.settings import Section, Table, section

AtLeast0 = Annotated[int, msgspec.Meta(ge=0)]
AtLeast1 = Annotated[int, msgspec.Meta(ge=1)]
Positive = Annotated[float, msgspec.Meta(gt=0)]

MAX_SOCKET_PATH = 100  # the kernel allows 107 bytes for the path of a Unix socket


class RunSection(Section, frozen=True, kw_only=True):
    """[run]: what run this is."""

    name: str = "run"
    """Name of the run; its folder is DIR/NAME."""
    dir: str = "runs"
    """Folder of all runs."""
    model: str = ""
    """Hugging Face folder of the policy to start from."""
    steps: AtLeast1 = 100
    """Learner steps to train."""
    group_size: AtLeast1 = 8
    """Trajectories per prompt (siblings)."""
    groups_per_step: AtLeast1 = 32
    """Groups that one learner step trains (G)."""
    max_staleness_steps: AtLeast0 = 2
    """Oldest data the learner may train on, in learner steps (S). 0 is synchronous."""
    seed: int = 0
    """Seed of prompts, sampling and the learner."""
    socket_dir: str = ""
    """Private folder for this run's sockets; empty means DIR/NAME/sockets."""

    @property
    def folder(self) -> Path:
        """Return the run's folder."""
        return Path(self.dir) / self.name

    @property
    def logs(self) -> Path:
        """Return the folder with one log per role."""
        return self.folder / "logs"

    @property
    def summary_file(self) -> Path:
        """Return the file with the run's figures."""
        return self.folder / "summary.json"

    @property
    def socket_folder(self) -> Path:
        """Return the folder of this run's sockets."""
        return Path(self.socket_dir) if self.socket_dir else self.folder.resolve() / "sockets"

    def make_socket_folder(self) -> None:
        """Make the folder that keeps other users from this run's sockets; who listens does it."""
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

    def endpoint(self, name: str) -> str:
        """Return the ZeroMQ endpoint of one of this run's Unix sockets."""
        return f"ipc://{self.socket(name)}"


class SamplingSection(Section, frozen=True, kw_only=True):
    """[sampling]: the distribution that training trajectories are sampled from."""

    temperature: Positive = 1.0
    """Logits are divided by this, by the engine and by the learner alike."""
    max_prompt_tokens: AtLeast1 = 512
    """Longer prompts are refused."""
    max_response_tokens: AtLeast1 = 512
    """A response ends here at the latest."""
    min_response_tokens: AtLeast0 = 0
    """No end of sequence is sampled before this many tokens."""


class EvalSection(Section, frozen=True, kw_only=True):
    """[eval]: held-out problems, answered greedily through the same generators."""

    file: str = ""
    """JSONL file of held-out problems; empty means no evaluation."""
    every_steps: AtLeast0 = 0
    """Evaluate after every so many learner steps; 0 means only where asked below."""
    before_train: bool = True
    """Evaluate the policy that the run starts from."""
    at_end: bool = True
    """Evaluate the policy that the run ends with."""
    temperature: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """0 is greedy."""


def run_section(table: Table) -> RunSection:
    """Return [run], checked for what needs more than one key."""
    run = section(table, "run", RunSection)
    if not run.name or "/" in run.name or run.name.startswith("."):
        raise ConfigError(f"run.name must be a plain folder name, got {run.name!r}")
    return run


def model_folder(run: RunSection) -> Path:
    """Return the folder of the policy to start from.

    Raises:
        ConfigError: run.model is not set, or is no Hugging Face folder.
    """
    folder = Path(required(run.model, "run.model"))
    if not (folder / "config.json").is_file():
        raise ConfigError(f"no config.json in {folder} (run.model)")
    return folder


def required(value: str, setting: str) -> str:
    """Return a setting that has no sensible default, or say that it is missing."""
    if not value:
        raise ConfigError(f"{setting} is not set")
    return value
