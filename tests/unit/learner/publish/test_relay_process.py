"""The process that a learner starts as its relay."""

import subprocess
from collections.abc import Mapping

import pytest

from slipstream.learner.gpu_variables import gpu_variables
from slipstream.learner.publish.relay_process import RelayLaunch, RelayProcess


def test_no_watchdog_ends_a_relay_and_no_group_of_it_waits_for_another(
    monkeypatch: pytest.MonkeyPatch,
):
    given: dict[str, str] = {}

    class Started:
        pid = 1

        def __init__(self, _command: list[str], *, env: Mapping[str, str], **_more: object) -> None:
            given.update(env)

    monkeypatch.setattr(subprocess, "Popen", Started)
    of_learner = {"HOME": "/root", **gpu_variables({})}
    RelayProcess(RelayLaunch(environment=of_learner)).start()
    assert given["HOME"] == "/root"
    assert given["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert given["TORCH_NCCL_ENABLE_MONITORING"] == "0"
    assert of_learner["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert int(given["CUDA_DEVICE_MAX_CONNECTIONS"]) > 1
