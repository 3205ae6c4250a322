"""The section of a command server, which all its roles read."""

from pathlib import Path

from slipstream.wire.errors import ConfigError
from slipstream.wire.settings.load import Section, Table, section
from slipstream.wire.settings.lora import LoraSection, lora_section, trouble_of_names
from slipstream.wire.settings.sections import (
    AtLeast0,
    AtLeast1,
    Positive,
    RunSection,
    SamplingSection,
)


class ServeSection(Section, frozen=True, kw_only=True):
    """[serve]: many tenants train adapters of one model by commands, in place of a run.

    Off unless the section is there. `lora.rank` is then the greatest rank of a tenant's adapters,
    `lora.targets` are the layers that may have any, and `lora.alpha` is that of all.
    See [serving.md](serving.md).
    """

    host: str = "127.0.0.1"
    """Address at which the command server listens for tenants; keys travel as they are: reach it
    from elsewhere through TLS of your own."""
    port: AtLeast0 = 8484
    """Its port; 0 is one of the system's choice, in FOLDER/serve/address.txt."""
    max_models: AtLeast1 = 8
    """Models that a tenant may have at a time."""
    max_commands: AtLeast1 = 1024
    """Commands of a tenant that wait or are carried out."""
    max_samples: AtLeast1 = 1024
    """Samples of a tenant that wait or are being generated."""
    max_bytes: AtLeast1 = 2**30
    """Bytes of a tenant's commands and of results that were not fetched."""
    max_checkpoints: AtLeast1 = 100
    """Checkpoints that a tenant may keep, and as many versions for sampling without a name: beyond
    them the one that was not sampled from for the longest time goes, and its samplers end."""
    keep_s: Positive = 24 * 3600.0
    """A result that nobody fetches is forgotten after this time, and its future says so."""
    session_s: Positive = 24 * 3600.0
    """A session without a sign of life for so long has ended: its models are unloaded."""
    adapters: AtLeast1 = 8
    """Versions of adapters that an engine has loaded at a time."""


class ServedPlaces:
    """Files of a command server in its run folder, which its learner shares."""

    def __init__(self, run: RunSection) -> None:
        self.folder = run.folder / "serve"
        self.log = self.folder / "commands.db"
        self.address = self.folder / "address.txt"
        self.states = self.folder / "states"  # state of each model as it is, by the learner
        self.weights = self.folder / "weights"  # checkpoints with their optimizers, by digest
        self.versions = self.folder / "versions"  # PEFT folders, by digest

    def state(self, model: str) -> Path:
        """Return the file of a model's state."""
        return self.states / f"{model.replace(':', '-')}.state"

    def checkpoint(self, digest: str) -> Path:
        """Return the file of a checkpoint."""
        return self.weights / f"{digest}.state"

    def version(self, digest: str) -> Path:
        """Return the PEFT folder of a version of adapters."""
        return self.versions / digest


def longest_of(sampling: SamplingSection, positions: int) -> int:
    """Return the most tokens of a sequence of a tenant: prompt and answer together."""
    return min(sampling.max_prompt_tokens + sampling.max_response_tokens, positions)


def serves(table: Table) -> bool:
    """True if settings are those of a command server."""
    return "serve" in table


def serve_section(table: Table) -> tuple[ServeSection, LoraSection]:
    """Return [serve] and [lora], checked.

    Raises:
        ConfigError: a setting is wrong, or no adapters are trained.
    """
    found, lora = section(table, "serve", ServeSection), lora_section(table)
    if not lora.is_on:
        raise ConfigError("[serve] needs lora.rank, the greatest rank of a tenant's adapters")
    if lora.adapter:
        raise ConfigError("lora.adapter must be empty with [serve]: tenants begin on their own")
    if not lora.is_named:
        is_asked = table["lora"].get("publish") == "merged"
        why = 'lora.publish is "merged"' if is_asked else trouble_of_names(table, lora.targets)
        raise ConfigError(f"[serve] needs engines that hold adapters of lora.targets: {why}")
    return found, lora
