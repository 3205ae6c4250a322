"""Every number, text and collection that one process sends another has a bound, or a reason."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slipstream.broker.reward_worker import messages as rewards
from slipstream.broker.sandbox import keeper
from slipstream.generators.environments import messages as environments
from slipstream.generators.environments.remote import messages as remote
from slipstream.wire.errors import ProtocolError
from slipstream.wire.messages import broker, codec
from slipstream.wire.messages.bounds import Body, Several
from slipstream.wire.messages.commands import (
    Operation,
    Outcome,
    Sample,
    WorkerAnswer,
    WorkerRequest,
)
from slipstream.wire.messages.followers import ToFollower, ToLeader
from slipstream.wire.messages.part_relays import HeadCommand, PartReport
from slipstream.wire.messages.relay import RelayAnswer, RelayRequest
from slipstream.wire.messages.trajectory import TrajectoryPayload, Transcript
from slipstream.wire.messages.weightbus import AgentMessage, BucketAnswer, Command, FetchBucket
from tests.support.running_broker import bare_socket, running
from tests.support.wire_bounds import past_bounds, unbounded

DATA = "the user's own data, in any JSON; the size of what holds it is bounded"
CLAMPED = "a reward that is none is told as such: broker/ledger/scores.py"
WORDS = "of foreign programs, in any JSON; a frame of theirs has at most MAX_OBSERVATION_BYTES"
WITHOUT_A_BOUND = {
    "Prompt.ground_truth": DATA,
    "Prompt.extra_info": DATA,
    "LoadEnvironment.options": DATA,
    "NamedReward.options": DATA,
    "Load.offered": DATA,
    "Turned.messages": WORDS,
    "Turned.tools": WORDS,
    "Replied.tool_calls": WORDS,
    "Score.reward": CLAMPED,
    "Score.turn_rewards": CLAMPED,
}
# Modules that decode what no peer sends: files of the run and the user's own.
OWN = {
    "broker/ledger/events.py",
    "broker/ledger/state.py",
    "learner/batches/orders.py",  # among the ranks of a learner, which authenticate nobody
    "wire/files/trajectory_file.py",
}
DECODERS: dict[Any, Callable[[bytes], object]] = {
    broker.Request: codec.decode_request,
    broker.Answer: codec.decode_answer,
    Command: codec.decode_command,
    AgentMessage: codec.decode_agent_message,
    FetchBucket: codec.decode_fetch,
    BucketAnswer: codec.decode_bucket_answer,
    RelayRequest: codec.decode_relay_request,
    RelayAnswer: codec.decode_relay_answer,
    PartReport: codec.decode_part_report,
    HeadCommand: codec.decode_head_command,
    ToLeader: codec.decode_to_leader,
    ToFollower: codec.decode_to_follower,
    TrajectoryPayload: codec.decode_payload,
    WorkerRequest: codec.decode_worker_request,
    WorkerAnswer: codec.decode_worker_answer,
    Operation: codec.decode_operation,
    Sample: codec.decode_sample,
    Outcome: codec.decode_outcome,
    Several[Body]: codec.decode_texts,
    Transcript: codec.decode_transcript,
    remote.ToServer: lambda data: remote.to_server([data]),
    remote.FromServer: lambda data: remote.from_server([data]),
    environments.ToLoader: environments.to_loader.decode,
    environments.FromLoader: environments.from_loader.decode,
    environments.ToEnvironment: environments.to_environment.decode,
    environments.FromEnvironment: environments.from_environment.decode,
    keeper.RunProgram | keeper.RunInConsole: keeper.requests.decode,
    rewards.ToChild: rewards.to_child.decode,
    rewards.FromChild: rewards.from_child.decode,
}


ROOT = Path(__file__).parents[4]
PACKAGES = ("algos", "broker", "deploy", "generators", "learner", "weightbus", "wire")
REFUSED = r"Expected `|a message of \d+ bytes; there may be \d+"


def test_every_decoder_of_messages_is_known():
    of_codec = {one for name, one in vars(codec).items() if name.startswith("decode_")}
    assert of_codec - {codec.decode_text} <= set(DECODERS.values())
    walked = {"broker/sandbox/keeper.py", "wire/messages/codec.py"} | {
        module.__name__.removeprefix("slipstream.").replace(".", "/") + ".py"
        for module in (rewards, environments, remote)
    }
    found = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if "msgpack.Decoder(" in path.read_text("utf-8")
    }
    assert found == walked | OWN


def test_every_field_has_a_bound_or_a_reason():
    seen: set[type] = set()
    found = [
        place for kind in DECODERS for place in unbounded(msgspec.inspect.type_info(kind), "", seen)
    ]
    assert set(found) == set(WITHOUT_A_BOUND)
    assert len(WITHOUT_A_BOUND) <= 10


def test_every_decoder_refuses_what_is_past_a_bound():
    count = 0
    for kind, decode in DECODERS.items():
        for place, value in past_bounds(msgspec.inspect.type_info(kind)):
            count += 1
            try:
                with pytest.raises((ProtocolError, msgspec.ValidationError), match=REFUSED):
                    decode(msgspec.msgpack.encode(value))
            except BaseException as error:
                raise AssertionError(f"{kind}: {place}") from error
    assert count > 500


async def test_a_broker_refuses_every_request_past_a_bound_and_goes_on(short_folder: Path):
    requests = [*past_bounds(msgspec.inspect.type_info(broker.Request))]
    async with running(short_folder) as it, bare_socket(it.endpoint) as ask:
        await ask(b"0", codec.encode(broker.Hello(role="learner", name="learner")))
        for place, value in requests:
            answer = await ask(b"1", msgspec.msgpack.encode(value))
            assert isinstance(answer, broker.Refusal), place
            assert answer.reason.startswith("not a valid request: Expected `"), place
        assert it.server.telemetry.rejected == {"malformed": len(requests)}
        assert isinstance(await ask(b"2", codec.encode(broker.GetStatus())), broker.StatusAnswer)
