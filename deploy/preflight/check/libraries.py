"""Versions of libraries that must agree between hosts, and flash-attn."""

import importlib
from collections.abc import Collection, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from slipstream.deploy.preflight.check.facts import Fact, fail, ok, warn
from slipstream.wire.process.extras import pip_install

_PACKAGES = ("torch", "megatron-core", "sglang", "flash-attn")
_NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
_NEEDED_BY: Mapping[str, tuple[str, ...]] = {
    "learner": ("torch", "megatron-core"),
    "generator": ("torch", "sglang"),
}
_EXTRAS = {"learner": "learner", "generator": "generators"}


def installed() -> dict[str, str]:
    """Return the installed versions by package; NCCL for any CUDA version."""
    found: dict[str, str] = {}
    for name in (*_PACKAGES, *_NCCL):
        with suppress(PackageNotFoundError):
            found.setdefault("nccl" if name in _NCCL else name, version(name))
    return found


def judge_installed(found: Mapping[str, str], kinds: Collection[str]) -> Fact:
    """Return whether a host has the libraries of its processes.

    Args:
        found: Installed versions by package.
        kinds: Kinds of the processes there.
    """
    missing = [
        (package, kind)
        for kind, packages in _NEEDED_BY.items()
        if kind in kinds
        for package in packages
        if package not in found
    ]
    if missing:
        named = ", ".join(f"{package} (for the {kind})" for package, kind in missing)
        extras = list(dict.fromkeys(_EXTRAS[kind] for _, kind in missing))
        return fail("libraries", f"not installed: {named}: {pip_install(extras)}")
    shown = ", ".join(f"{name} {number}" for name, number in found.items())
    return ok("libraries", shown or "none is needed by the roles here")


def judge_versions(
    ours: Mapping[str, str],
    theirs: Mapping[str, str],
    *,
    kinds: Collection[str],
    collective: bool,
    on_gpu: bool,
) -> Fact:
    """Return whether a host has the learner host's versions; builds of a release are equal.

    Args:
        ours: Versions of the learner's host, by package.
        theirs: Versions of the other host.
        kinds: Kinds of the processes there.
        collective: True if weights or gradients go there in a collective.
        on_gpu: True for NCCL.
    """
    needed = {"torch"} | ({"nccl"} if on_gpu and collective else set())
    needed |= {"megatron-core"} if "learner" in kinds else set()
    here, there = (
        {n: v.partition("+")[0] for n, v in versions.items()} for versions in (ours, theirs)
    )
    wrong = [
        f"{name} is {there.get(name, 'missing')} here, {here.get(name, 'missing')} on the learner's"
        for name in sorted(needed)
        if there.get(name) != here.get(name)
    ]
    if not wrong:
        shown = ", ".join(f"{name} {here.get(name, '')}" for name in sorted(needed))
        return ok("versions", f"as on the learner's host: {shown}")
    breaks = collective or "learner" in kinds
    setting = "weightbus.transport" if breaks else ""
    return (fail if breaks else warn)("versions", "; ".join(wrong), setting)


def judge_flash_attn(failure: str, *, on_gpu: bool) -> Fact:
    """Return whether the learner's attention has its kernel.

    Args:
        failure: import error of flash-attn; empty without one.
        on_gpu: True if the learner is on a GPU.
    """
    if not on_gpu:
        return ok("flash-attn", "is not used on a CPU", "generators.device")
    if failure:
        return warn("flash-attn", f"torch's own kernel takes its place: {failure}")
    return ok("flash-attn", "can be imported")


def import_failure(module: str) -> str:
    """Return the import error of a module on this host; empty without one."""
    try:
        importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:  # built for another torch or CUDA
        return str(error) or type(error).__name__
    return ""
