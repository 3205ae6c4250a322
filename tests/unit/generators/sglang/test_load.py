"""The load that a server reports."""

import pytest

from slipstream.generators.engine import EngineLoad
from slipstream.generators.sglang.engine import load_of


def group(running: int, retracted: int | None = None) -> dict[str, object]:
    core: dict[str, object] = {
        "num_running_reqs": running,
        "num_waiting_reqs": 3,
        "num_used_tokens": 100,
        "max_total_num_tokens": 4096,
    }
    return core if retracted is None else core | {"queues": {"retracted": retracted}}


def test_the_caches_of_attention_groups_add_up():
    assert load_of([group(1, 2), group(4)]) == EngineLoad(
        num_running=5, num_waiting=6, used_tokens=200, capacity_tokens=8192, num_retractions=2
    )
    assert load_of([group(1)]) == EngineLoad(
        num_running=1, num_waiting=3, used_tokens=100, capacity_tokens=4096, num_retractions=0
    )


def test_a_server_without_a_load_is_refused():
    with pytest.raises(ValueError, match="no load"):
        load_of([])
    with pytest.raises(KeyError, match="num_running_reqs"):
        load_of([{}])
