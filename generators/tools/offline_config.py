"""Settings of a generator without a run, and the settings that an existing file was made with."""

from pathlib import Path
from typing import Any

import msgspec

from slipstream.broker.config import RewardSection
from slipstream.generators.config import GeneratorSettings, generator_settings
from slipstream.wire.errors import ConfigError
from slipstream.wire.settings.load import Table, section
from slipstream.wire.settings.lora import LoraSection
from slipstream.wire.unreadable import UNREADABLE


class OfflineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings for generating without a run."""

    generator: GeneratorSettings
    reward: RewardSection
    out: Path
    num_prompts: int  # 0 is every prompt once

    @property
    def origin_file(self) -> Path:
        """File with the settings that the answers were generated with."""
        return self.out.with_name(f"{self.out.name}.json")

    @property
    def origin(self) -> dict[str, Any]:
        """All settings that determine the prompts and their answers."""
        run = self.generator.run
        origin: dict[str, Any] = {
            "run.model": str(self.generator.model.resolve()),
            "run.seed": run.seed,
            "run.group_size": run.group_size,
            "reward.function": self.reward.function,
        }
        for key, value in (("options", self.reward.options), ("sources", self.reward.sources)):
            if value:
                origin[f"reward.{key}"] = msgspec.to_builtins(value)
        for name, values in (("data", self.generator.data), ("sampling", self.generator.sampling)):
            origin |= {f"{name}.{key}": v for key, v in msgspec.to_builtins(values).items()}
        if self.generator.environment.is_named:
            environment = msgspec.to_builtins(self.generator.environment)
            origin |= {f"environment.{key}": v for key, v in environment.items()}
        return origin


def offline_settings(table: Table, out: Path, num_prompts: int) -> OfflineSettings:
    """Decode and check the sections that are read.

    Raises:
        ConfigError: naming the setting or the option.
    """
    if num_prompts < 0:
        raise ConfigError(f"--num-prompts must be at least 1, got {num_prompts}")
    generator = generator_settings(table)
    # The policy is run.model, as it is before adapters add anything.
    generator = msgspec.structs.replace(generator, lora=LoraSection())
    settings = OfflineSettings(
        generator=generator,
        reward=section(table, "reward", RewardSection),
        out=out,
        num_prompts=num_prompts,
    )
    if not out.exists():
        return settings
    path = settings.origin_file
    another = "name another file or remove it"
    try:
        there: dict[str, Any] = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, *UNREADABLE) as error:
        raise ConfigError(
            f"--out {out} exists, and {path.name}, which holds its settings, cannot "
            f"be read: {error}; {another}"
        ) from error
    ours: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(settings.origin))
    for name in sorted({*there, *ours}):
        if there.get(name) != ours.get(name):
            raise ConfigError(
                f"--out {out} exists and was generated with {name} = {there.get(name)!r}, now it "
                f"is {ours.get(name)!r}; {another}"
            )
    return settings
