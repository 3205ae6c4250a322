"""Settings of a command server."""

from pathlib import Path

import msgspec

from slipstream.broker.commands.requests import ServedModel
from slipstream.broker.config import BrokerSection, keys_folder
from slipstream.wire.errors import ConfigError
from slipstream.wire.models.hf_config import load_hf_config
from slipstream.wire.settings.load import Table, section
from slipstream.wire.settings.lora import LoraSection
from slipstream.wire.settings.sections import (
    LoggingSection,
    RunSection,
    SamplingSection,
    model_folder,
    run_section,
)
from slipstream.wire.settings.serve import ServeSection, longest_of, serve_section


class CommandServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All that a command server reads."""

    run: RunSection
    serve: ServeSection
    lora: LoraSection
    sampling: SamplingSection
    broker: BrokerSection
    logging: LoggingSection

    @property
    def keys_folder(self) -> Path:
        """Folder of its own key, and of those of its workers and tenants."""
        return keys_folder(self.run, self.broker)

    @property
    def served(self) -> ServedModel:
        """The model that tenants train.

        Raises:
            ConfigError: its folder cannot be read.
        """
        hf = load_hf_config(model_folder(self.run))
        return ServedModel(
            name=self.run.model,
            vocab_size=hf.vocab_size,
            longest=longest_of(self.sampling, hf.max_position_embeddings),
            lora=self.lora,
        )


def command_server_settings(table: Table) -> CommandServerSettings:
    """Decode and check the sections of a command server.

    Raises:
        ConfigError: naming the wrong setting.
    """
    serve, lora = serve_section(table)
    settings = CommandServerSettings(
        run=run_section(table),
        serve=serve,
        lora=lora,
        sampling=section(table, "sampling", SamplingSection),
        broker=section(table, "broker", BrokerSection),
        logging=section(table, "logging", LoggingSection),
    )
    listen = settings.broker.listen
    if listen and not listen.startswith("tcp://"):
        raise ConfigError(f"broker.listen must be tcp://ADDRESS:PORT, got {listen!r}")
    _ = settings.served  # its checks
    return settings
