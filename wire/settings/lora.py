"""The section of low-rank adapters, which the learner and the generators read."""

from collections.abc import Collection, Mapping
from typing import Literal

import msgspec

from slipstream.wire.errors import ConfigError
from slipstream.wire.models.adapters import AdapterFacts
from slipstream.wire.models.hf_config import load_hf_config
from slipstream.wire.models.served_adapters import trouble_next_to_weights
from slipstream.wire.process.gpus import usable_gpus
from slipstream.wire.settings.load import Section, Table, section
from slipstream.wire.settings.sections import Positive, RunSection, model_folder

LINEAR_LAYERS = (*("q_proj", "k_proj", "v_proj", "o_proj"), *("gate_proj", "up_proj", "down_proj"))

_MOST_RANK, _MOST_ALPHA = 8192, 1e6


class LoraSection(Section, frozen=True, kw_only=True):
    """[lora]: train low-rank adapters in place of the weights (Hu et al., arXiv:2106.09685).

    Off unless `lora.rank` is set. See [lora.md](lora.md).
    """

    rank: int | None = None
    """Rows of A and columns of B of every adapter; not set trains all weights."""
    alpha: Positive = 32.0
    """An adapter adds alpha / rank times B A to its layer's weight."""
    targets: tuple[str, ...] = LINEAR_LAYERS
    """Layers with adapters, by the last part of their names in Hugging Face's model."""
    publish: Literal["auto", "named", "merged"] = "auto"
    """named publishes the adapters, of which an engine has several versions at a time: answers end
    under the version that they began with, and no engine pauses. merged adds the adapters to the
    weights and publishes these, as if all of them were trained. auto is named where SGLang can hold
    adapters of `lora.targets` next to the weights of `run.model`, and merged where it cannot; a run
    says at its start which, and why."""
    adapter: str = ""
    """PEFT folder whose adapters a run starts from; not set starts from A at random and B = 0."""

    @property
    def is_on(self) -> bool:
        """True if adapters are trained."""
        return self.rank is not None

    @property
    def used_targets(self) -> tuple[str, ...]:
        """The layers that have adapters: none if none are trained."""
        return self.targets if self.is_on else ()

    @property
    def is_named(self) -> bool:
        """True if adapters are published as they are."""
        return self.is_on and self.publish != "merged"

    def facts(self, *, base: str = "") -> AdapterFacts:
        """Return what gives the adapters their meaning; ``base`` is the hash of the weights.

        Raises:
            ValueError: none are trained.
        """
        if self.rank is None:
            raise ValueError("lora.rank is not set")
        targets = tuple(sorted(self.targets))
        return AdapterFacts(rank=self.rank, alpha=self.alpha, targets=targets, base=base)


def lora_section(table: Table) -> LoraSection:
    """Return [lora], checked, with ``publish`` decided where run.model is set.

    Raises:
        ConfigError: a rank below 1, a rank or alpha beyond all use, no target or one twice, other
            settings without a rank, or named adapters that no engine can hold.
    """
    found = section(table, "lora", LoraSection)
    if found.rank is not None and found.rank < 1:
        raise ConfigError(
            f"lora.rank must be at least 1, got {found.rank}: leave it out to train all weights"
        )
    if found.rank is not None and found.rank > _MOST_RANK:
        raise ConfigError(f"lora.rank must be at most {_MOST_RANK}, got {found.rank}")
    if found.alpha > _MOST_ALPHA:
        raise ConfigError(f"lora.alpha must be at most {_MOST_ALPHA:g}, got {found.alpha:g}")
    if found.rank is None and (others := _changed(found)):
        raise ConfigError(f"lora.{others[0]} has no meaning without lora.rank, which is not set")
    if not found.targets or len(set(found.targets)) < len(found.targets):
        raise ConfigError(
            f"lora.targets must name one layer or more, each once, got {list(found.targets)}"
        )
    if not found.is_named or "model" not in table.get("run", {}):
        return found
    trouble = trouble_of_names(table, found.targets)
    if trouble and found.publish == "named":
        raise ConfigError(
            f'lora.publish = "named" cannot be had: {trouble}; leave it out, or set "merged"'
        )
    return msgspec.structs.replace(found, publish="merged" if trouble else "named")


def trouble_of_names(table: Table, targets: Collection[str]) -> str:
    """Return why the engines of a run cannot hold adapters of these targets; empty if they can.

    Raises:
        ConfigError: the settings of the model or of the engines cannot be read.
    """
    generators = table.get("generators", {})
    flags = generators.get("sglang", {}) if isinstance(generators, Mapping) else {}
    if not isinstance(flags, Mapping):
        return ""  # refused by the generators
    for name in ("attn_dp_size", "ep_size"):
        if flags.get(name, 1) != 1:
            return (
                f"generators.sglang.{name} = {flags[name]}, and adapters are loaded into one group "
                "of ranks"
            )
    device, ranks = generators.get("device", "auto"), flags.get("tp_size", 1)
    hf = load_hf_config(model_folder(section(table, "run", RunSection)))
    return trouble_next_to_weights(
        hf,
        targets,
        on_cpu=device == "cpu" or (device == "auto" and not usable_gpus()),
        ranks=ranks if isinstance(ranks, int) else 1,
    )


def publishing(table: Table) -> str:
    """Return how the adapters of a run are published, and why; empty if none are trained."""
    found = lora_section(table)
    if not found.is_on:
        return ""
    if trouble := trouble_of_names(table, found.targets):
        return f"lora.publish: {found.publish}, because {trouble}"
    asked = section(table, "lora", LoraSection).publish
    reason = "as lora.publish says" if asked == "merged" else "next to the weights in every engine"
    return f"lora.publish: {found.publish}, {reason}"


def _changed(found: LoraSection) -> list[str]:
    """Return the settings that are not their defaults."""
    values, defaults = msgspec.structs.asdict(found), msgspec.structs.asdict(LoraSection())
    return [name for name, value in values.items() if value != defaults[name]]
