"""docs/wire.md states what the code does: kinds, roles, answers, codes and limits."""

from itertools import dropwhile, takewhile
from pathlib import Path
from typing import get_args

from slipstream.broker import client
from slipstream.broker.listening import router as listening_router
from slipstream.broker.server import limits, loop, router, scoring, sessions
from slipstream.broker.server.permissions import ALLOWED
from slipstream.learner.publish import relay_link
from slipstream.wire.messages import broker, followers, part_relays, pieces, relay, weightbus
from slipstream.wire.messages.broker import WIRE_REVISION, RefusalCode, Role, SubmitTrajectory
from slipstream.wire.messages.trajectory import MAX_TOKENS
from tests.support.wire_samples import HEADER

PAGE = (Path(__file__).parents[3] / "docs" / "wire.md").read_text("utf-8")


def table(heading: str) -> list[list[str]]:
    """The rows of the first table under a heading, cells without backticks."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = dropwhile(lambda line: not line.startswith("|"), section.splitlines())
    rows = list(takewhile(lambda line: line.startswith("|"), lines))[2:]
    return [[cell.strip().replace("`", "") for cell in row.strip("|").split("|")] for row in rows]


def words(cell: str) -> set[str]:
    return {word.strip() for word in cell.split(",")}


def test_the_revision_is_todays():
    assert f"Today's revision is **{WIRE_REVISION}**" in PAGE


def roles(cell: str) -> set[str]:
    everybody = set(get_args(Role))
    if cell == "all":
        return everybody
    if cell.startswith("all but "):
        return everybody - words(cell.removeprefix("all but "))
    return words(cell)


def test_every_kind_of_request_is_taken_from_the_roles_that_the_table_names():
    documented = {row[0]: roles(row[1]) for row in table("Requests")}
    assert documented == {kind.__name__: set(roles) for kind, roles in ALLOWED.items()}


def test_every_kind_of_answer_answers_something():
    documented = set().union(*(words(row[2]) for row in table("Requests")))
    assert documented | {"Refusal"} == {kind.__name__ for kind in get_args(broker.Answer)}


def test_each_answer_is_what_the_requests_own_text_names():
    for kind, _, answers, *_ in table("Requests"):
        text = getattr(broker, kind).__doc__
        if "nswered by" in text:
            assert any(answer in text for answer in words(answers)), kind


def test_trajectories_and_images_alone_come_with_attached_frames():
    attached = {row[0]: row[3] for row in table("Requests") if row[3] and "answer" not in row[3]}
    assert attached == {
        "SubmitTrajectory": "payload, response; texts of its turns, if its header names any",
        "StoreImage": "the image's bytes",
    }
    assert "payload, response" in (SubmitTrajectory.__doc__ or "")


def names(union: object) -> set[str]:
    return {kind.__name__ for kind in get_args(union)}


def test_every_socket_of_the_weight_bus_is_documented_with_its_messages():
    stated = {row[0]: words(row[2]) for row in table("The weight bus")}
    answered = {row[0]: words(row[3]) for row in table("The weight bus")}
    assert stated == {
        "weightbus": names(weightbus.AgentMessage),
        "weights": {weightbus.FetchBucket.__name__},
        "relay": names(relay.RelayRequest),
        "--rendezvous": names(followers.ToLeader),
        "weightbus.listen": names(part_relays.PartReport),
    }
    assert answered == {
        "weightbus": names(weightbus.Command),
        "weights": {weightbus.BucketAnswer.__name__},
        "relay": names(relay.RelayAnswer),
        "--rendezvous": names(followers.ToFollower),
        "weightbus.listen": names(part_relays.HeadCommand),
    }


def test_documented_wait_for_the_relay_is_that_of_the_code():
    assert f"| learner | `Reserved`, `Ok` | {relay_link._ANSWER_S:.0f} s |" in PAGE


def test_every_code_of_a_refusal_is_explained():
    codes = {row[0].replace("(empty)", "") for row in table("Refusals")}
    assert codes == set(get_args(RefusalCode))


def test_limits_are_those_of_the_code():
    documented = {row[0]: row[1] for row in table("Limits")}
    most = 1 << 40
    assert documented["a message of a learner, a part of one, relay or reward worker"] == "16 MiB"
    workers: tuple[Role, ...] = ("learner", "relay", "reward_worker")
    assert {limits.max_bytes(role, most) for role in workers} == {16 << 20}
    assert documented["a message of an observer, an operator or before the hello"] == "64 KiB"
    assert limits.max_bytes("operator", most) == limits.max_bytes(None, most) == 64 << 10
    assert documented["a message of a generator"] == "broker.max_message_bytes, its body 1 MiB"
    assert limits.max_body_bytes("generator", most) == 1 << 20
    assert documented["a piece of a frame, with or without a key"] == "64 KiB"
    assert pieces.PIECE_BYTES == 64 << 10
    assert documented["frames of a message"] == str(limits.MAX_FRAMES)
    assert documented["requests that wait for payloads, per client"] == str(loop.MAX_JOBS)
    assert documented["clients at a time, by name"] == f"{sessions.MAX_CLIENTS:,}"
    assert documented["observers and operators at a time"] == str(sessions.MAX_READERS)
    assert documented["scoring credits at a time"] == f"{scoring.MAX_CREDITS:,}"
    assert (
        documented["time to prove a key on a new connection"]
        == f"{listening_router._HANDSHAKE_MS / 1000:.0f} s"
    )
    assert documented["answers that a client does not read"] == f"{router._SEND_LIMIT:,}"
    assert HEADER.num_tokens < MAX_TOKENS == 2**31 - 1


def test_documented_times_of_reconnecting_are_those_of_the_code():
    section = PAGE.split("## A broker that is gone")[1].split("\n## ")[0]
    for stated in (
        f"no answer for {client._REPEAT_S:.0f} s",
        f"for {client._DEAD_AFTER_MS / 1000:.0f} s",
        f"({client.OUTAGE_S:.0f} s)",
    ):
        assert stated in " ".join(section.split())
    assert f"lasts {loop.MAX_WAIT_S:.0f} s at most" in " ".join(PAGE.split())
