"""A real SGLang server for as long as a benchmark lasts."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from slipstream.generators.config import GeneratorSettings
from slipstream.generators.sglang.process import SglangProcess


@contextmanager
def sglang_server(settings: GeneratorSettings) -> Iterator[SglangProcess]:
    """Yield a server that answers."""
    process = SglangProcess.start(settings, "generator-0")
    try:
        asyncio.run(process.until_ready(settings.generators.start_timeout_s))
        yield process
    finally:
        process.stop()
