"""The figures of large models at stated links, and what they are made of."""

import math
from dataclasses import replace

import pytest

from slipstream.deploy.predict.laws.publish_cost import Rates, Setup, cost_of
from slipstream.weightbus.config import WeightBusSection

GB = 1e9
BIG = {"8B": 16 * GB, "235B": 470 * GB, "671B": 1342 * GB, "671B fp8": 671 * GB}


def rounded(values: list[float], digits: int) -> list[float]:
    return [round(value, digits) for value in values]


def costs(**changes: object) -> list[object]:
    return [
        cost_of(
            Setup(version_bytes=size, **({"learner_hosts": 16, "engine_hosts": 32} | changes))  # type: ignore[arg-type]
        )
        for size in BIG.values()
    ]


def figures(name: str, digits: int, **changes: object) -> list[float]:
    return rounded([getattr(cost, name) for cost in costs(**changes)], digits)


LINKS_ALONE = Rates(
    wire=math.inf, digest=math.inf, encode=math.inf, expect=math.inf, load=50e9, check=math.inf
)


def test_large_models_over_400_gigabits_per_second():
    assert figures("stall_s", 4) == [0.0025, 0.0734, 0.2097, 0.1048]
    assert figures("slot_bytes", -9) == [3 * GB, 88 * GB, 252 * GB, 126 * GB]
    links = {"rates": LINKS_ALONE}
    assert figures("receive_s", 2, engine_hosts=1, **links) == [0.32, 9.4, 26.84, 13.42]
    assert figures("receive_s", 2, engine_hosts=1, nics=8, **links) == [0.04, 1.18, 3.35, 1.68]
    assert figures("arrival_s", 1, **links) == [0.6, 18.8, 53.7, 26.8]
    assert figures("receive_s", 1, nics=8, **links) == [0.1, 2.4, 6.7, 3.4]
    assert figures("pause_s", 2, **links) == [0.04, 1.18, 3.35, 1.68]
    live = {"is_staged": False, "engine_hosts": 1}
    assert figures("load_s", 1, **live) == [0.3, 9.4, 26.8, 13.4], "no sockets in a collective"
    assert figures("digest_core_s", 1) == [1.5, 42.7, 122.0, 61.0]
    assert figures("receive_s", 2, engine_hosts=1, delta_share=0.02, **links)[1:] == [
        *(0.19, 0.54, 0.27)
    ]


def test_sockets_limit_what_links_allow():
    one = {"engine_hosts": 1, "connections": 4}
    assert figures("receive_s", 1, **one) == [4.9, 143.3, 409.1, 204.6]
    plain = Rates.of(WeightBusSection(bulk="plain"))
    assert figures("receive_s", 1, rates=plain, **one) == [1.5, 43.5, 124.3, 62.1]
    assert figures("receive_s", 1, **one | {"connections": 1000}) == [0.3, 9.4, 26.8, 13.4]
    star, twice = (figures("receive_s", 5, engine_hosts=count) for count in (32, 64))
    assert twice == pytest.approx([2 * seconds for seconds in star], abs=1e-4)


def test_a_version_is_run_after_its_copy_digests_transfer_load_and_check():
    rates = Rates(wire=1.0, digest=5.0, encode=0.5, expect=2.0, load=10.0, check=20.0)
    setup = Setup(
        version_bytes=100.0,
        learner_hosts=2,
        nic_bytes_s=1e9,
        gpus=1,
        pcie_bytes_s=25.0,
        connections=4,
        digest_threads=2,
        rates=rates,
    )
    cost = cost_of(setup)
    assert (cost.stall_s, cost.digest_s, cost.receive_s, cost.expect_s) == (2.0, 5.0, 25.0, 25.0)
    assert (cost.load_s, cost.check_s, cost.pause_s) == (10.0, 5.0, 15.0)
    assert cost.arrival_s == 5.0 + 25.0, "each host hashes its part meanwhile"
    assert cost.total_s == 2.0 + 30.0 + 15.0
    of_one_host = cost_of(replace(setup, learner_hosts=1))
    assert of_one_host.arrival_s == 10.0 + 50.0
    shadowed = cost_of(replace(setup, has_shadow=True, rates=replace(rates, copy=50.0)))
    assert (shadowed.pause_s, shadowed.arrival_s) == (2.0, 30.0 + 15.0)
    assert shadowed.total_s == 2.0 + 45.0 + 2.0
    assert cost_of(replace(setup, delta_share=0.1)).receive_s == 100.0, "deltas are encoded first"
    assert (
        cost_of(replace(setup, delta_share=0.1, rates=replace(rates, encode=1e9))).receive_s == 5.0
    )
    live = cost_of(replace(setup, is_staged=False, nic_bytes_s=0.5))
    assert (live.digest_s, live.receive_s, live.expect_s) == (0.0, 0.0, 0.0)
    assert live.pause_s == 200.0 + 5.0, "an engine stands still while its bytes come"


def test_a_chain_takes_one_transfer_and_a_bucket_for_each_hop():
    chain = {"fanout": 1, "bucket_bytes": 512e6, "connections": 1, "rates": LINKS_ALONE}
    one, all_of_them = costs(engine_hosts=1, rates=LINKS_ALONE), costs(**chain)
    for alone, chained in zip(one, all_of_them, strict=True):
        hops = chained.receive_s - alone.receive_s  # type: ignore[attr-defined]
        assert hops == pytest.approx(31 * 0.01, rel=0.03)


def test_more_heads_than_learner_hosts_can_feed_are_slower():
    def seconds(fanout: int) -> float:
        setup = Setup(version_bytes=GB, learner_hosts=4, engine_hosts=32, fanout=fanout)
        return cost_of(replace(setup, connections=4, rates=LINKS_ALONE)).receive_s

    assert seconds(4) < seconds(1), "shorter chains"
    assert seconds(16) > seconds(4), "a learner host sends four times its part in the time of one"
    assert seconds(32) == seconds(0)


@pytest.mark.parametrize("fanout", [0, 1, 3, 7, 32, 100])
def test_every_engine_gets_every_byte_once(fanout: int):
    setup = Setup(version_bytes=1000.0, learner_hosts=2, engine_hosts=32, fanout=fanout)
    cost = cost_of(setup)
    assert cost.relayed_bytes + cost.forwarded_bytes == 32 * 1000
    assert cost.learner_host_bytes * 2 == cost.relayed_bytes == setup.heads * 1000
    assert cost.copied_bytes == 32 * 1000 + cost.forwarded_bytes
    assert cost.commands == 32 * 2 + (32 - setup.heads)
    assert cost.bucket_requests == 32 * 2


def test_buckets_do_not_span_parts():
    assert Setup(version_bytes=100.0, learner_hosts=3, bucket_bytes=10).num_buckets == 12
    assert Setup(version_bytes=100.0, learner_hosts=3, bucket_bytes=10, buckets=7).num_buckets == 7


def test_in_place_each_bucket_is_a_command_and_nothing_is_fetched_or_copied():
    cost = cost_of(Setup(version_bytes=100.0, engine_hosts=2, bucket_bytes=10, is_staged=False))
    assert cost.commands == 2 * (3 + 10)
    assert cost.bucket_requests == cost.copied_bytes == 0
