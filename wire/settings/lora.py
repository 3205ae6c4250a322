"""The section of low-rank adapters, which the learner and the generators read."""

from typing import Literal

import msgspec

from slipstream.wire.errors import ConfigError
from slipstream.wire.files.adapters import AdapterFacts
from slipstream.wire.settings.load import Section, Table, section
from slipstream.wire.settings.sections import Positive

LINEAR_LAYERS = (*("q_proj", "k_proj", "v_proj", "o_proj"), *("gate_proj", "up_proj", "down_proj"))


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
    publish: Literal["merged"] = "merged"
    """merged adds the adapters to the weights and publishes these, as if all of them were
    trained."""
    adapter: str = ""
    """PEFT folder whose adapters a run starts from; not set starts from A at random and B = 0."""

    @property
    def is_on(self) -> bool:
        """True if adapters are trained."""
        return self.rank is not None

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
    """Return [lora], checked.

    Raises:
        ConfigError: a rank below 1, no target or one twice, or other settings without a rank.
    """
    found = section(table, "lora", LoraSection)
    if found.rank is not None and found.rank < 1:
        raise ConfigError(
            f"lora.rank must be at least 1, got {found.rank}: leave it out to train all weights"
        )
    if found.rank is None and (others := _changed(found)):
        raise ConfigError(f"lora.{others[0]} has no meaning without lora.rank, which is not set")
    if not found.targets or len(set(found.targets)) < len(found.targets):
        raise ConfigError(
            f"lora.targets must name one layer or more, each once, got {list(found.targets)}"
        )
    return found


def _changed(found: LoraSection) -> list[str]:
    """Return the settings that are not their defaults."""
    values, defaults = msgspec.structs.asdict(found), msgspec.structs.asdict(LoraSection())
    return [name for name, value in values.items() if value != defaults[name]]
