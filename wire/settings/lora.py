"""The section of low-rank adapters, which the learner and the generators read."""

from collections.abc import Collection
from typing import Literal

import msgspec

from slipstream.wire.errors import ConfigError
from slipstream.wire.models.adapters import AdapterFacts
from slipstream.wire.settings.load import Section, Table, section
from slipstream.wire.settings.sections import Positive

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
    publish: Literal["named", "merged"] = "named"
    """named publishes the adapters, of which an engine has several versions at a time: answers end
    under the version that they began with, and no engine pauses. merged adds the adapters to the
    weights and publishes these, as if all of them were trained."""
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
        return self.is_on and self.publish == "named"

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
        ConfigError: a rank below 1, a rank or alpha beyond all use, no target or one twice, or
            other settings without a rank.
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
    if found.is_named:
        _check_fused(found.targets)
    return found


def _changed(found: LoraSection) -> list[str]:
    """Return the settings that are not their defaults."""
    values, defaults = msgspec.structs.asdict(found), msgspec.structs.asdict(LoraSection())
    return [name for name, value in values.items() if value != defaults[name]]


def _check_fused(targets: Collection[str]) -> None:
    """Refuse a part of a fused layer that SGLang would leave out without a word.

    It fuses adapters of q, k and v where there is one of q, with zeros for k, and those of gate and
    up where there is one of gate, with zeros for up (lora/lora.py:254 and 462 of 0.5.23).
    """
    for some, needed in (
        (("q_proj", "k_proj", "v_proj"), ("q_proj", "v_proj")),
        (("up_proj",), ("gate_proj",)),
    ):
        named = [target for target in some if target in targets]
        missing = [target for target in needed if target not in targets]
        if named and missing:
            raise ConfigError(
                f"lora.targets names {', '.join(named)} without {', '.join(missing)}, and SGLang "
                'would leave it out: name both, or set lora.publish = "merged"'
            )
