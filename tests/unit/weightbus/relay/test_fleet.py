"""Which engines are served next, with which version, and in which group."""

from slipstream.weightbus.relay.fleet import Fleet, Seat, Serving
from slipstream.wire.messages.versions import PolicyVersion

V1, V2 = PolicyVersion(1, 1), PolicyVersion(1, 2)


def fleet(engines_per_group: int = 2) -> Fleet:
    return Fleet(silence_s=30.0, retry_s=1.0, engines_per_group=engines_per_group)


def join(
    it: Fleet,
    name: str,
    transport: str = "collective",
    *,
    device: str = "cpu",
    adopted: PolicyVersion | None = None,
) -> None:
    shares = transport == "collective"
    it.join(Seat(name, transport, device, adopted, last_message_s=0.0, shares_group=shares))


def due(it: Fleet, newest: PolicyVersion | None = V1, now_s: float = 0.0) -> list[list[str]]:
    return [[seat.name for seat in serving.seats] for serving in it.due(newest, now_s)]


def serve(it: Fleet, newest: PolicyVersion = V1, *, fails: str = "", now_s: float = 0.0) -> None:
    for serving in it.due(newest, now_s):
        it.started(serving)
        names = {seat.name for seat in serving.seats}
        it.finished(serving, names - {fails}, now_s)


def test_first_version_comes_alone_and_the_next_one_with_the_group():
    it = fleet()
    for name in ("a", "b", "c"):
        join(it, name)
    assert due(it, None) == []
    assert due(it) == [["a"], ["b"], ["c"]]
    serve(it)
    assert due(it) == []
    assert due(it, V2) == [["a", "b"], ["c"]]


def test_only_like_devices_share_a_group_and_only_collectives_are_in_one():
    it = fleet()
    join(it, "a", adopted=V1)
    join(it, "b", device="cuda", adopted=V1)
    join(it, "c", "tcp", adopted=V1)
    assert due(it, V2) == [["c"], ["a"], ["b"]]


def test_engine_being_served_is_not_due_and_the_others_are():
    it = fleet()
    join(it, "slow", "tcp")
    join(it, "fast", "tcp")
    slow, fast = it.due(V1, 0.0)
    it.started(slow)
    it.started(fast)
    it.finished(fast, {"fast"}, 0.0)
    assert due(it, V2) == [["fast"]]


def test_failed_member_leaves_its_group_and_is_served_alone_after_a_while():
    it = fleet()
    join(it, "a", adopted=V1)
    join(it, "b", adopted=V1)
    serve(it, V2, fails="b")
    assert due(it, V2) == []
    assert it.wait_s(0.25) == 0.75
    assert due(it, V2, now_s=1.0) == [["b"]]
    assert it.wait_s(1.0) is None


def test_failed_member_that_kept_its_version_joins_a_group_again():
    it = fleet()
    join(it, "a", adopted=V1)
    serve(it, V2, fails="a")
    it.heartbeat("a", V1, 0.5)
    (serving,) = it.due(V2, 1.0)
    assert serving.group is not None


def test_heartbeat_while_being_served_keeps_the_adopted_version():
    it = fleet()
    join(it, "a", "tcp", adopted=V1)
    (serving,) = it.due(V2, 0.0)
    it.started(serving)
    it.heartbeat("a", None, 1.0)
    assert it.seats["a"].adopted == V1
    assert it.silent(30.5) == []
    assert it.silent(31.5) == ["a"]


def test_group_whose_last_member_failed_is_dissolved():
    it = fleet()
    join(it, "a", adopted=V1)
    (serving,) = it.due(V2, 0.0)
    it.started(serving)
    assert it.finished(serving, set(), 0.0) is serving.group


def test_empty_group_is_dissolved_once_no_publish_runs():
    it = fleet()
    join(it, "a", adopted=V1)
    (serving,) = it.due(V2, 0.0)
    it.started(serving)
    assert it.forget("a") is None, "its collective is in use"
    assert it.finished(serving, set(), 0.0) is serving.group
    assert it.finished(Serving(V2, (), serving.group), set(), 0.0) is None
