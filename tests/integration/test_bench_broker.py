"""The roles that the broker's benchmark plays work with today's broker."""

import pytest

from benchmarks.broker.process import BrokerProcess, Driver, drivers, shared_number, work_folder
from benchmarks.broker.roles import consume, generate
from tests.support.waiting import HANG_S

pytestmark = pytest.mark.integration

STEPS, GROUPS, SIBLINGS = 2, 2, 8


@pytest.mark.parametrize("payload_bytes", [256, 128 * 1024])
def test_trajectories_of_all_sizes_come_through(payload_bytes: int):
    settings = {"run__groups_per_step": GROUPS, "run__group_size": SIBLINGS}
    with work_folder() as folder, BrokerProcess(folder, **settings) as broker:
        version, stop = shared_number(), shared_number()
        with drivers(
            Driver(consume, broker.endpoint, version, stop, STEPS, 0, 1),
            Driver(generate, broker.endpoint, payload_bytes, version, stop, 0, "generator-0"),
        ) as (consumer, producer):
            trained = consumer.result(HANG_S)
            stop.value = 1
            assert producer.result(HANG_S) >= STEPS * GROUPS * SIBLINGS
    assert [count for _, count, _ in trained] == [GROUPS * SIBLINGS, 2 * GROUPS * SIBLINGS]
    assert trained[-1][2] == STEPS * GROUPS * SIBLINGS * payload_bytes
