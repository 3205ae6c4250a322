"""The log of a real SGLang server: nothing alarming of a healthy start, all of a failed one."""

import asyncio
from pathlib import Path

import pytest

from slipstream.generators.config import generator_settings
from slipstream.generators.sglang.process import SglangProcess
from slipstream.wire.errors import ConfigError
from tests.support.tiny_run import write_policy
from tests.support.waiting import HANG_S

pytestmark = pytest.mark.integration


def test_a_failed_start_has_its_traceback(tmp_path: Path):
    write_policy(tmp_path / "model")
    weights = next((tmp_path / "model").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:100])
    server = SglangProcess.start(
        generator_settings(
            {
                "run": {"name": "p", "dir": str(tmp_path), "model": str(tmp_path / "model")},
                "sampling": {"max_prompt_tokens": 16, "max_response_tokens": 64},
                "generators": {"device": "cpu", "max_cached_tokens": 4096},
            }
        ),
        "generator-0",
    )
    try:
        with pytest.raises(ConfigError, match="SafetensorError"):
            asyncio.run(server.until_ready(HANG_S))
    finally:
        server.stop()
    log = server.log_file.read_text()
    assert "Traceback (most recent call last)" in log
    assert "SafetensorError" in log
    assert "known warnings of libraries are left out here" in log
