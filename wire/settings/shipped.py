"""Settings of runs that ship with the package, by the names that documents give them."""

from pathlib import Path

CONFIGS = Path(__file__).parents[2] / "configs"
"""Their folder: configs/ of the repository, in a checkout through the link in src/slipstream."""


def settings_file(text: str) -> Path:
    """Return a settings file; ``configs/NAME.toml`` that is not here is the one that ships."""
    path = Path(text)
    shipped = CONFIGS / path.name
    if path.parent == Path(CONFIGS.name) and not path.exists() and shipped.is_file():
        return shipped
    return path
