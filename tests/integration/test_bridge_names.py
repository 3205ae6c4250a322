"""Tensors' names in families' tables are those that Megatron-Bridge maps, read as text."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from slipstream.wire.models.families.registry import FAMILIES
from tests.support.waiting import HANG_S

pytestmark = [pytest.mark.integration, pytest.mark.slow]
_WHEEL = "megatron-bridge==0.6.2"  # needs CPython 3.12, Transformer Engine and more to be imported
_NAME = re.compile(r"layers\.\*\.([A-Za-z0-9_.*]+)")
_FILES = {
    "qwen3_next": "qwen/qwen3_next_bridge.py",
    "qwen3_5_text": "qwen/qwen35_bridge.py",
    "qwen3_5_moe_text": "qwen/qwen35_bridge.py",
    "qwen3_moe": "qwen/qwen3_moe_bridge.py",
    "gpt_oss": "gpt_oss/gpt_oss_bridge.py",
}
# Tensors that have all experts of a layer, by names of single ones.
_OF_ALL = {
    "mlp.experts.*.gate_proj.weight": "mlp.experts.gate_up_proj",
    "mlp.experts.*.up_proj.weight": "mlp.experts.gate_up_proj",
    "mlp.experts.*.down_proj.weight": "mlp.experts.down_proj",
}


@pytest.fixture(scope="module")
def bridge(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Fetch the wheel from the package index; skip where there is none."""
    folder = tmp_path_factory.mktemp("bridge")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
    command += ["--python-version", "3.12", "--only-binary=:all:", _WHEEL]
    environment = {**os.environ, "PIP_CONFIG_FILE": "/dev/null"}  # noqa: TID251 handed on
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=HANG_S, env=environment
    )
    if done.returncode:
        pytest.skip(f"{_WHEEL} cannot be fetched: {done.stderr.strip()[-200:]}")
    (wheel,) = Path(folder).glob("*.whl")
    return zipfile.ZipFile(wheel)


@pytest.mark.parametrize("family", _FILES)
def test_every_tensor_of_a_layer_has_a_mapping(bridge: zipfile.ZipFile, family: str):
    text = bridge.read(f"megatron/bridge/models/{_FILES[family]}").decode()
    mapped = set(_NAME.findall(text))
    tables = [*FAMILIES[family].tables()]
    ours = {
        tensor.name
        for table in tables
        if table is not FAMILIES[family].ends
        for parameter in table.values()
        for tensor in parameter.tensors
    }
    assert ours
    if FAMILIES[family].has_experts:  # no layer is without them
        ours -= {name for name in ours if re.match(r"mlp\.(gate|up|down)_proj", name)}
    missing = {name for name in ours if not {name, _OF_ALL.get(name, name)} & mapped}
    assert missing == set()
