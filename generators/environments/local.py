"""An environment's processes on this host, by its settings."""

import os
from collections.abc import Sequence
from pathlib import Path

from slipstream.generators.environments.host import EnvironmentHost, ProcessLimits
from slipstream.wire.process.environment import handed_on
from slipstream.wire.settings.sections import EnvironmentSection


async def local_environments(
    settings: EnvironmentSection, *, hide: Sequence[Path]
) -> EnvironmentHost:
    """Start an environment's processes on this host.

    Raises:
        ConfigError: the environment cannot be imported, or a setting is wrong.
    """
    return await EnvironmentHost.start(
        settings.function,
        settings.options,
        ProcessLimits(memory_mb=settings.memory_mb, max_processes=settings.max_processes),
        jailed=settings.sandbox != "none",
        hide=hide,
        environment=handed_on(
            os.environ,  # noqa: TID251 a child gets parts of it
            named=settings.environment,
            setting="environment.environment",
        ),
    )
