"""A publish between pools of GPUs, by the weight bus's own law."""

import pytest

from slipstream.deploy.predict.laws.publish_cost import Cost
from slipstream.deploy.predict.laws.publishes import publish_cost
from slipstream.weightbus.config import WeightBusSection
from tests.support.planned import H100

FAST = WeightBusSection(bulk="plain", connections=256)  # sockets as fast as the NICs


def test_a_star_sends_to_every_engine_and_a_chain_once():
    star, chain = (
        publish_cost(
            400e9,
            H100,
            learner_gpus=8,
            engines=4,
            engine_ranks=8,
            bus=WeightBusSection(
                bulk="plain", connections=256, fanout=fanout, bucket_bytes=1 << 20
            ),
        )
        for fanout in (0, 1)
    )
    # Eight NICs of 50 GB/s on a host: 400 GB in a second, four times from one host.
    assert star.receive_s == pytest.approx(4.0)
    assert chain.receive_s == pytest.approx(400 / (256 * 1.4)), "blake2b is slower than the NICs"
    assert star.stall_s == 1.0
    assert star.pause_s == pytest.approx(400 / 8 / 8 + 0.05)
    assert chain.digest_s > 3 * star.digest_s


def test_engines_on_one_host_share_a_fetch_and_load_by_themselves():
    def cost(engines: int, ranks: int) -> Cost:
        return publish_cost(
            400e9, H100, learner_gpus=64, engines=engines, engine_ranks=ranks, bus=FAST
        )

    small = cost(engines=9, ranks=2)  # on three hosts of eight GPUs
    assert small.receive_s == pytest.approx(1.0)  # NICs of each host take one version
    assert small.relayed_bytes == 3 * 400e9
    assert small.load_s == pytest.approx(400 / 2 / 8)
    assert small.stall_s == 400 / 64 / 50
    assert cost(engines=3, ranks=16).relayed_bytes == 6 * 400e9, "each host of a large engine"
