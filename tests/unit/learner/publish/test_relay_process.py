"""The process that a learner starts as its relay."""

from collections.abc import Mapping
from types import SimpleNamespace

from slipstream.learner.main import gpu_variables
from slipstream.learner.publish.relay_process import RelayLaunch, RelayProcess


def test_no_watchdog_ends_a_relay_and_no_group_of_it_waits_for_another():
    given: dict[str, str] = {}

    def popen(_command: list[str], *, env: Mapping[str, str], **_more: object) -> SimpleNamespace:
        given.update(env)
        return SimpleNamespace(pid=1)

    of_learner = {"HOME": "/root", **gpu_variables({})}
    RelayProcess(RelayLaunch(environment=of_learner), popen).start()
    assert given["HOME"] == "/root"
    assert given["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert given["TORCH_NCCL_ENABLE_MONITORING"] == "0"
    assert of_learner["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert int(given["CUDA_DEVICE_MAX_CONNECTIONS"]) > 1
