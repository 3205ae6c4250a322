"""What the broker's benchmark computes without running anything."""

import pytest

from benchmarks.broker.roles import header_of, pack, trajectory_bytes, unpack
from slipstream.wire.messages.broker import LeasedGroup
from slipstream.wire.messages.trajectory import Prompt
from slipstream.wire.messages.versions import PolicyVersion


def test_a_version_survives_being_shared_as_a_number():
    for version in (PolicyVersion(0, 0), PolicyVersion(3, 12_345)):
        assert unpack(pack(version)) == version


@pytest.mark.parametrize("payload_bytes", [256, 16 * 1024, 128 * 1024])
def test_a_simulated_trajectory_has_a_header_that_the_wire_accepts(payload_bytes: int):
    sent = trajectory_bytes(payload_bytes)
    group = LeasedGroup(
        group_id=1, lease_id=2, item="train", position=0, prompt=Prompt(prompt="x"), siblings=(0,)
    )
    header = header_of(group, 0, sent.num_tokens, PolicyVersion(1, 0))
    assert header.num_response_tokens > 0
    assert len(sent.payload) == payload_bytes
    assert sent.response.decode().startswith("the sum is")
