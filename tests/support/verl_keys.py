"""The keys of verl in verl_keys.toml: of its example scripts, and of its whole configuration."""

import tomllib
from pathlib import Path

Keys = dict[str, dict[str, str]]  # what all keys of a group begin with -> the rest, and a value

_READ = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
COMMON: Keys = _READ["common"]
GRPO: Keys = _READ["grpo"]
MEGATRON: Keys = _READ["megatron"]
DAPO: Keys = _READ["dapo"]
PPO: Keys = _READ["ppo"]


def _full(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def words(*groups: Keys) -> list[str]:
    """Return the words of a command that sets all these keys."""
    found: dict[str, str] = {}
    for group in groups:
        for prefix, keys in group.items():
            found |= {_full(prefix, name): value for name, value in keys.items()}
    return [f"{name}={value}" for name, value in found.items()]


def configuration() -> list[str]:
    """Return all keys of the whole configuration."""
    return [
        _full(place, name)
        for part in _READ["configuration"]
        for place in part["places"]
        for name in part["names"].split()
    ]
