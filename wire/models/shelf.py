"""Models of the Hugging Face hub that are known before anything of them is fetched."""

from collections.abc import Mapping
from functools import cache
from importlib import resources

import msgspec

from slipstream.wire.errors import ConfigError

_FILE = "shelf.json"


class Listed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is known of a model of the hub."""

    model_type: str  # model_type in its config.json, of the language model
    billions: float = 0.0  # parameters of the language model, if it trains
    why: str = ""  # reason for which it is refused; empty if it trains


@cache
def shelf() -> Mapping[str, Listed]:
    """Return the known models by their names on the hub."""
    data = resources.files(__package__).joinpath(_FILE).read_bytes()
    return msgspec.json.decode(data, type=dict[str, Listed])


def refuse_listed(name: str, setting: str) -> None:
    """Refuse a model that is known not to train, by its name on the hub.

    Raises:
        ConfigError: it is; with the reason, and the setting that names it.
    """
    found = shelf().get(name)
    if found is not None and found.why:
        raise ConfigError(
            f"{name} ({found.model_type}) cannot be trained: {found.why}; docs/models.md has what "
            f"can ({setting})"
        )
