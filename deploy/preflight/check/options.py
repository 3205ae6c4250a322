"""Settings for other libraries: Megatron, SGLang, and trackers."""

import asyncio
from importlib.util import find_spec

from slipstream.broker.config import private_paths
from slipstream.deploy.config import RunConfig
from slipstream.deploy.preflight.check.facts import Fact, fail, ok
from slipstream.generators.environments.local import local_environments
from slipstream.generators.sglang.process import refused_flags
from slipstream.wire.errors import ConfigError
from slipstream.wire.models.hf_config import HfConfig

_OURS = "tensorboard"  # a dependency


def observe_trackers(config: RunConfig) -> list[Fact]:
    """Look for the packages of logging.trackers, imported by the broker."""
    named = config.broker.logging.trackers
    missing = [name for name in named if name != _OURS and find_spec(name) is None]
    if missing:
        text = f"not installed: {', '.join(missing)}"
        return [fail("trackers", text, "logging.trackers")]
    return [ok("trackers", ", ".join(named) or "none", "logging.trackers")]


def observe_megatron(config: RunConfig, hf: HfConfig) -> list[Fact]:
    """Compare [learner.megatron] with Megatron's configuration."""
    extra = config.learner.learner.megatron
    if not extra:
        return []
    from slipstream.learner.model.gpt import refuse_unknown_keys  # Megatron: seconds

    try:
        refuse_unknown_keys(hf, extra)
    except ConfigError as error:
        return [fail("megatron", str(error), "learner.megatron")]
    return [ok("megatron", f"knows {', '.join(extra)}", "learner.megatron")]


def observe_engine(config: RunConfig) -> list[Fact]:
    """Compare [generators.sglang] with SGLang's settings."""
    extra = config.generators.generators.sglang
    if not extra:
        return []
    if refused := refused_flags(config.generators):
        return [fail("sglang", refused, "generators.sglang")]
    return [ok("sglang", f"knows {', '.join(extra)}", "generators.sglang")]


def observe_environment(config: RunConfig) -> list[Fact]:
    """Load the environment as a generator does, if it runs on the generators' hosts."""
    settings = config.generators.environment
    if not settings.function or settings.servers:
        return []
    hidden = [path for path in private_paths(config.table) if path.exists()]

    async def load() -> str:
        host = await local_environments(settings, hide=hidden)
        try:
            return "drives itself" if host.drives_itself else "acts in turns"
        finally:
            await host.close()

    try:
        found = asyncio.run(load())
    except ConfigError as error:
        return [fail("environment", str(error), "environment.function")]
    return [ok("environment", f"{settings.function} {found}", "environment.function")]
