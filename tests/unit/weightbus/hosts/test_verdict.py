import pytest

from slipstream.weightbus.hosts.membership import HostPlace
from slipstream.weightbus.hosts.verdict import HostEnd, HostView, ended_by, is_of_peers, verdict_of
from slipstream.wire.errors import PublishError
from slipstream.wire.settings.rendezvous import Address

GLOO = "RuntimeError: [../gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:4"
KNOWN = HostEnd(2, "it broke")
ASKED = "it was asked to end, and node 0 was not"
CAUSED = "its rank 3 ended with code 4"


# The decision of a learner's nodes: what each sees, and whose end it takes for the first.
@pytest.mark.parametrize(
    ("view", "end"),
    [
        (HostView(node=0), None),
        (HostView(node=1), None),
        (HostView(node=0, stopping={1}, stop_is_ours=True), None),
        (HostView(node=1, stopping={1}, stop_is_ours=True), None),
        # What the nodes know goes before what one sees.
        (HostView(node=1, known=KNOWN, silent={0: "long"}, own="code -9"), KNOWN),
        # A part that died here goes before silence of others.
        (HostView(node=1, own="code 1", silent={0: "long"}), HostEnd(1, "code 1")),
        # A part whose collective failed is not the reason, unless no other is found.
        (HostView(node=1, own=CAUSED, own_is_caused=True), None),
        (
            HostView(node=1, own=CAUSED, own_is_caused=True, silent={0: "long"}, is_final=True),
            HostEnd(0, "long"),
        ),
        (HostView(node=1, own=CAUSED, own_is_caused=True, is_final=True), HostEnd(1, CAUSED)),
        (HostView(node=1, silent={0: "for 60 s"}), HostEnd(0, "for 60 s")),
        (HostView(node=0, silent={2: "for 60 s", 1: "for 61 s"}), HostEnd(1, "for 61 s")),
        # A stop of another node alone ends the learner, and node 0 decides that.
        (HostView(node=0, stopping={2}), HostEnd(2, ASKED)),
        (HostView(node=1, stopping={2}), None),
        # What another node reports.
        (HostView(node=0, reported={1: HostEnd(1, GLOO)}), None),
        (HostView(node=0, reported={1: HostEnd(1, GLOO)}, is_final=True), HostEnd(1, GLOO)),
        (HostView(node=0, reported={1: HostEnd(1, "torn")}, own="code 1"), HostEnd(1, "torn")),
    ],
)
def test_what_ends_a_node(view: HostView, end: HostEnd | None):
    assert verdict_of(view) == end


# The decision of an engine's node 0, once one of its servers has ended.
@pytest.mark.parametrize(
    ("own", "ended", "silent", "end"),
    [
        ("no memory", {}, {}, HostEnd(0, "no memory")),
        ("no memory", {1: GLOO}, {}, HostEnd(0, "no memory")),
        (GLOO, {1: "no memory"}, {}, HostEnd(1, "no memory")),
        (GLOO, {1: GLOO, 2: "no memory"}, {}, HostEnd(2, "no memory")),
        (GLOO, {1: GLOO}, {2: "silence"}, HostEnd(2, "silence")),
        (GLOO, {}, {1: "silence"}, HostEnd(1, "silence")),
        (GLOO, {}, {}, HostEnd(0, GLOO)),
        ("", {1: GLOO}, {}, HostEnd(1, GLOO)),
    ],
)
def test_what_no_other_node_can_have_caused_goes_first(
    own: str, ended: dict[int, str], silent: dict[int, str], end: HostEnd
):
    view = HostView(
        node=0,
        own=own,
        own_is_caused=is_of_peers(own),
        reported={node: HostEnd(node, text) for node, text in ended.items()},
        silent=silent,
        is_final=True,
    )
    assert verdict_of(view) == end


@pytest.mark.parametrize(
    ("reason", "is_consequence"),
    [
        (GLOO, True),
        ("torch.distributed.DistBackendError: NCCL error in: x", True),
        ("torch.OutOfMemoryError: CUDA out of memory", False),
        ("it printed nothing", False),
    ],
)
def test_errors_of_a_peer_are_told_apart(reason: str, *, is_consequence: bool):
    assert is_of_peers(reason) is is_consequence


@pytest.mark.parametrize(
    ("end", "node", "asked", "code"),
    [
        (HostEnd(0, "", is_orderly=True), 1, False, 0),
        (HostEnd(0, ""), 1, False, 1),
        (HostEnd(1, "", is_orderly=True), 0, False, 1),
        (HostEnd(1, "", is_orderly=True), 2, False, 1),
        (HostEnd(1, "", is_orderly=True), 0, True, 0),
        (HostEnd(1, ""), 0, True, 1),  # it could not save
        (HostEnd(1, ""), 1, True, 0),
        (HostEnd(0, ""), 2, True, 0),
    ],
)
def test_what_was_asked_for_ends_with_0(end: HostEnd, node: int, *, asked: bool, code: int):
    assert end.exit_code(node, asked_to_stop=asked) == code


def test_an_error_is_told_by_its_first_line():
    assert ended_by(1, PublishError("torn\nmore")) == HostEnd(1, "torn")
    assert ended_by(1, ValueError("bad\nmore")) == HostEnd(1, "ValueError: bad")
    assert ended_by(0, SystemExit(0)) == HostEnd(0, "it was asked to end", is_orderly=True)


def test_ranks_are_numbered_node_by_node_and_a_name_is_one_line():
    address = Address("h", 1)
    assert HostPlace(0, 2, 1, address).named(1) == "node 1 (rank 1)"
    assert HostPlace(0, 2, 4, address).named(1, "gpu-8") == "node 1 (host gpu-8, ranks 4-7)"
    assert HostPlace(0, 2, 4, address).named(1, "a\nb\x1b[2J" + "x" * 500).isprintable()
