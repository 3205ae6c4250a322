from slipstream.generators.nodes.verdict import Blame, blamed, is_of_peers

GLOO = "RuntimeError: [../gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:4"


def test_errors_of_a_peer_are_told_apart():
    for reason, is_consequence in [
        (GLOO, True),
        ("torch.distributed.DistBackendError: NCCL error in: x", True),
        ("torch.OutOfMemoryError: CUDA out of memory", False),
        ("it printed nothing", False),
    ]:
        assert is_of_peers(reason) is is_consequence


def test_what_no_other_node_can_have_caused_goes_first():
    for own, ended, silent, blame in [
        ("no memory", {}, {}, Blame(0, "no memory")),
        ("no memory", {1: GLOO}, {}, Blame(0, "no memory")),
        (GLOO, {1: "no memory"}, {}, Blame(1, "no memory")),
        (GLOO, {1: GLOO, 2: "no memory"}, {}, Blame(2, "no memory")),
        (GLOO, {1: GLOO}, {2: "silence"}, Blame(2, "silence")),
        (GLOO, {}, {1: "silence"}, Blame(1, "silence")),
        (GLOO, {}, {}, Blame(0, GLOO)),
        ("", {1: GLOO}, {}, Blame(1, GLOO)),
    ]:
        assert blamed(0, own, ended, silent) == blame
