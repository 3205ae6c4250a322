from slipstream.broker.run_ledger import _token_bytes
from slipstream.broker.server.generation import most_bytes
from slipstream.generators.rollout import packed
from slipstream.generators.text.images import Encoded
from slipstream.wire.messages.codec import encode
from slipstream.wire.messages.images import ImageSpan
from slipstream.wire.messages.trajectory import TrajectoryHeader, VersionRun
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.settings.sections import RunSection, SamplingSection


def test_a_payload_has_room_for_the_places_of_the_smallest_images():
    count = 90_000
    spans = tuple(ImageSpan("f" * 64, 3 * n + 1, 1, 300, 300) for n in range(count // 3))
    ids = [70_000] * count
    payload = packed(
        Encoded(ids, spans), bytes(count - 1) + b"\1", [0.0] * count, kept=None, experts=None
    )
    header = TrajectoryHeader(
        group_id=1,
        sibling=0,
        lease_id=1,
        num_prompt_tokens=count - 1,
        num_tokens=count,
        version_runs=(VersionRun(count - 1, PolicyVersion(1, 0)),),
        temperature=1.0,
        finish_reason="stop",
    )
    each = _token_bytes(RunSection(), SamplingSection())
    assert len(encode(payload)) <= most_bytes(header, each)["payload"]
