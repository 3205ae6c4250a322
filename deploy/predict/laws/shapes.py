"""Shapes of models without weights: folders with a config.json; some are shipped."""

from pathlib import Path

from slipstream.wire.errors import ConfigError

_SHIPPED = Path(__file__).parent / "models"


def shipped_names() -> list[str]:
    """Return the names of the shipped shapes."""
    return sorted(path.parent.name for path in _SHIPPED.glob("*/config.json"))


def shape_folder(name: str) -> Path:
    """Return the folder of a shape: a shipped one, a folder, or the folder of a config.json.

    Raises:
        ConfigError: there is no config.json.
    """
    if name in shipped_names():
        return _SHIPPED / name
    path = Path(name)
    folder = path.parent if path.name == "config.json" else path
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"--model is {name!r}: expected a folder with a config.json, such a file, or one of "
            f"{', '.join(shipped_names())}"
        )
    return folder
