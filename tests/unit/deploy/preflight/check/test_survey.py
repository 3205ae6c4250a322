from slipstream.deploy.preflight.check.model import judge_models
from slipstream.deploy.preflight.check.requests import Passage
from slipstream.deploy.preflight.check.survey import judge_passage, way_to
from slipstream.weightbus.config import WeightBusSection

HERE = Passage(interface="eth0", num_bytes=16_000_000)
THERE = Passage(interface="eth1", num_bytes=16_000_000, seconds=0.02)
HOSTS = ("a (10.0.0.1)", "b (10.0.0.2)")


def test_tensors_are_tried_on_the_way_that_they_would_take():
    for bus, kind, device, is_far, way in [
        ({}, "generator", "cpu", False, "tcp"),
        ({"transport": "collective"}, "generator", "cpu", False, "gloo"),
        ({}, "generator", "cuda", False, "tcp"),
        ({"transport": "collective"}, "generator", "cpu", True, "tcp"),  # the host is loopback
        ({"transport": "collective", "host": "10.0.0.1"}, "generator", "cpu", True, "gloo"),
        ({"transport": "collective"}, "generator", "cuda", False, "nccl"),
        ({"transport": "collective", "backend": "gloo"}, "generator", "cuda", False, "gloo"),
        ({"transport": "disk"}, "generator", "cpu", True, "disk"),
        ({}, "learner", "cpu", True, "gloo"),
        ({"transport": "tcp"}, "learner", "cuda", True, "nccl"),
    ]:
        assert way_to(kind, device, WeightBusSection(**bus), is_far=is_far) == way  # type: ignore[arg-type]


def test_what_passed_is_reported_with_its_speed_and_interfaces():
    found = judge_passage(HERE, THERE, way="gloo", kind="generator", from_to=HOSTS)
    assert found.line.startswith(
        "ok   weights: 16 MB over gloo from a (10.0.0.1) (eth0) to b (10.0.0.2) (eth1): 800 MB/s"
    )


def test_what_did_not_names_both_hosts_their_interfaces_and_the_settings():
    failed = Passage(interface="eth1", failure="connection refused")
    found = judge_passage(HERE, failed, way="tcp", kind="generator", from_to=HOSTS)
    assert found.line == (
        "fail weights: nothing passes over tcp from a (10.0.0.1) (eth0) to b (10.0.0.2) (eth1): "
        "connection refused (weightbus.listen, weightbus.transport, weightbus.timeout_s)"
    )


def test_another_model_on_a_host_is_named_by_its_part():
    ours = {"config.json": "a" * 12, "weights": "b" * 12, "tokenizer": "c" * 32}
    assert judge_models(ours, dict(ours)).outcome == "ok"
    other = judge_models(ours, ours | {"weights": "d" * 12})
    assert other.line == (
        "fail same model: weights is dddddddddddd here, bbbbbbbbbbbb on the learner's (run.model)"
    )
    assert "tokenizer is missing here" in judge_models(ours, {"config.json": "a" * 12}).found
