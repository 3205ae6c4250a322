import contextlib
import os
import socket

from slipstream.deploy.preflight.check.network import (
    Listener,
    SeenListener,
    judge_interface,
    judge_listener,
    judge_nccl,
    see_listener,
)

RELAY = Listener("weightbus.listen", "weightbus.listen", "127.0.0.1", 5600, count=2)


def test_what_nccl_reads_is_shown_and_a_path_that_is_off_is_a_warning():
    assert judge_nccl({"HOME": "/root"}).line == "ok   NCCL variables: none is set: NCCL chooses"
    variables = {"NCCL_IB_HCA": "mlx5_0", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PATH": "/bin"}
    line = judge_nccl(variables | {"NCCL_P2P_DISABLE": "0"}).line
    assert line == (
        "ok   NCCL variables: CUDA_DEVICE_MAX_CONNECTIONS=1 NCCL_IB_HCA=mlx5_0 NCCL_P2P_DISABLE=0"
    )
    off = judge_nccl(variables | {"NCCL_P2P_DISABLE": "1"})
    assert off.outcome == "warn"
    assert off.found.endswith("NCCL_P2P_DISABLE turns a fast path off")


def test_a_listener_that_is_free_names_its_interface():
    line = judge_listener(SeenListener(RELAY, "lo")).line
    assert line == (
        "ok   weightbus.listen: 127.0.0.1:5600 and 1 more are free, on lo (weightbus.listen)"
    )


def test_an_address_of_another_host_is_refused_with_those_of_this_one():
    seen = SeenListener(RELAY, "", "it is no address of this host", {"eth0": "10.0.0.5"})
    line = judge_listener(seen).line
    assert line.startswith("fail weightbus.listen: 127.0.0.1:5600: it is no address of this host")
    assert "it has eth0 10.0.0.5" in line


def test_the_port_after_the_one_that_is_set_must_be_free_too():
    with socket.socket() as taken:
        port = _bind_after_a_free_port(taken)
        taken.listen()
        first = Listener("weightbus.listen", "weightbus.listen", "127.0.0.1", port - 1, count=2)
        assert f"port {port}" in see_listener(first).why_not


def _bind_after_a_free_port(taken: socket.socket) -> int:
    """Bind where no system picks ports for others, after a port that nobody has."""
    for port in range(20_001 + os.getpid() % 5_000, 32_000, 2):
        with contextlib.suppress(OSError), socket.socket() as before:
            before.bind(("127.0.0.1", port - 1))
            taken.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no two free ports")


def test_a_name_that_nobody_knows_is_no_traceback():
    seen = see_listener(Listener("broker.listen", "broker.listen", "no.such.invalid", 1))
    assert seen.why_not.startswith("it cannot be resolved")


def test_an_interface_that_is_not_there_is_named():
    assert judge_interface("10.0.0.1", "eth0", ["eth0", "lo"]).outcome == "ok"
    assert judge_interface("10.0.0.1", "", ["eth0"]).found == "no interface leads to 10.0.0.1"
    wrong = judge_interface("10.0.0.1", "ib9", ["eth0", "lo"])
    assert (wrong.outcome, wrong.setting) == ("fail", "weightbus.host")
    assert "GLOO_SOCKET_IFNAME is ib9, expected one of eth0, lo" in wrong.found
