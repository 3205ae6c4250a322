"""Checks whether two processes can be in one collective."""

from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from slipstream.wire.messages.weightbus import Join

_NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")


@dataclass(frozen=True, slots=True)
class Libraries:
    """Library versions of a process in a collective."""

    torch_version: str
    nccl_version: str = ""  # empty on a CPU


def installed_libraries() -> Libraries:
    """Return the versions installed here, without importing the packages."""
    nccl = ""
    for package in _NCCL_PACKAGES:
        with suppress(PackageNotFoundError):
            nccl = nccl or version(package)
    return Libraries(version("torch"), nccl)


def why_no_collective(join: Join, ours: Libraries) -> str:
    """Return why an engine cannot join a collective with this process; empty if it can.

    Builds of one release of torch understand each other; NCCL must be the same release.
    """
    theirs, own = (text.partition("+")[0] for text in (join.torch_version, ours.torch_version))
    if theirs != own:
        return f"its torch is {theirs}, the relay's {own}"
    if join.device == "cuda" and join.nccl_version != ours.nccl_version:
        return f"its NCCL is {join.nccl_version or 'unknown'}, the relay's {ours.nccl_version}"
    return ""
