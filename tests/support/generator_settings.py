"""Settings of a generator on a CPU whose model has a hundred tokens of room each way."""

from pathlib import Path
from typing import Any

from slipstream.generators.config import GeneratorSettings, generator_settings
from tests.support.blank_model import write_blank_model


def generator_settings_of(model: Path, **sections: dict[str, Any]) -> GeneratorSettings:
    """Return the settings of these sections; where there is no model yet, make a tiny one."""
    if not (model / "config.json").exists():
        write_blank_model(model, hidden=16, layers=1)
    table: dict[str, dict[str, Any]] = {
        "run": {"model": str(model)},
        "generators": {"device": "cpu"},
        "sampling": {"max_prompt_tokens": 100, "max_response_tokens": 100},
    }
    return generator_settings(
        {name: table.get(name, {}) | sections.get(name, {}) for name in {*table, *sections}}
    )
