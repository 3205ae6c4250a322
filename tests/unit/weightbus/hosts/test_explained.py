"""The wait for a better reason, on a host that loses its link meanwhile."""

import asyncio

from slipstream.weightbus.hosts.explained import explained
from slipstream.weightbus.hosts.follower import HostFollower
from slipstream.weightbus.hosts.verdict import SETTLE_S, HostEnd
from slipstream.wire.errors import ConfigError
from tests.support.memberships import membership

GLOO = "RuntimeError: gloo: Connection closed by peer"


async def failing() -> None:
    raise ConfigError("node 0 refuses it")


async def test_a_link_that_ends_meanwhile_ends_the_wait_with_its_reason():
    follower = HostFollower(membership(1, facts={}))
    waiting = asyncio.create_task(explained(follower, GLOO, "a collective failed"))
    await asyncio.sleep(0)
    linking = asyncio.create_task(failing())
    linking.add_done_callback(follower.deafened)
    await asyncio.gather(linking, return_exceptions=True)
    async with asyncio.timeout(0.5):
        assert await waiting == HostEnd(0, "node 0 refuses it")


async def test_a_link_that_says_nothing_any_more_does_not_prolong_the_wait():
    follower = HostFollower(membership(1, facts={}))
    async with asyncio.timeout(SETTLE_S + 2.0):
        assert await explained(follower, "it broke", "") == HostEnd(1, "it broke")
