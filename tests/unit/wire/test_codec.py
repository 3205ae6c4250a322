"""Every message survives the wire; everything else is refused at the boundary."""

from typing import get_args

import msgspec
import pytest

from wire import bus, codec, control
from wire.arrays import PackedArray
from wire.dead_letters import DeadLetter, Failure
from wire.errors import ProtocolError
from wire.ledger_view import HolderView, ItemView, LedgerView
from wire.manifest import Bucket, TensorSpec, WeightManifest
from wire.status import (
    EvalFigures,
    EvalPoint,
    LengthQuartile,
    RoleStatus,
    RunStatus,
    StepPoint,
    Survivorship,
)
from wire.trajectory import (
    ChatMessage,
    Prompt,
    Score,
    TrajectoryHeader,
    TrajectoryPayload,
    Transcript,
    VersionRun,
)
from wire.versions import PolicyVersion

VERSION = PolicyVersion(2, 5)
PROMPT = Prompt(
    prompt=(ChatMessage("system", "Answer."), ChatMessage("user", "1+1=")),
    ground_truth={"target": 2, "numbers": [1, 1]},
    extra_info={"level": 1, "note": None},
    row=3,
)
HEADER = TrajectoryHeader(
    group_id=1,
    sibling=0,
    lease_id=4,
    num_prompt_tokens=3,
    num_tokens=9,
    version_runs=(VersionRun(3, PolicyVersion(2, 4)), VersionRun(7, VERSION)),
    temperature=0.7,
    finish_reason="length",
)
RECORD = bus.PublishRecord(
    version=VERSION, at_s=1.5, adopted_by={"generator-0": 0.25}, failed={"generator-1": "gone"}
)
MANIFEST = WeightManifest(
    version=VERSION,
    buckets=(Bucket((TensorSpec("model.norm.weight", "float32", (4,), "ab"),), 16),),
    parent=PolicyVersion(2, 4),
)
FIGURES = EvalFigures(num_problems=2, num_answers=2, num_dropped=0, metrics={"mean@1": 0.5})
EVALUATION = EvalPoint(
    step=0, overall=FIGURES, by_source={"held_out": FIGURES}, versions=(VERSION,)
)
STATUS = RunStatus(
    run_name="run",
    outcome="running",
    finished=False,
    stop_reason="",
    elapsed_s=1.0,
    steps=5,
    total_steps=9,
    max_staleness_steps=1,
    group_size=2,
    groups_per_step=2,
    issued=4,
    trained=2,
    sealed=0,
    requeued=0,
    dropped={"zero_variance": 1},
    in_flight={"leased": 1},
    unaccounted=0,
    trajectories={"issued": 8},
    staleness_histogram={"0": 7},
    survivorship=Survivorship(
        generated_mean=9.5,
        trained_mean=8.0,
        cancelled=1,
        quartiles=[LengthQuartile(up_to_tokens=9, trajectories=4, dropped_for_age=1)],
        alarm="",
    ),
    queue={"ready_groups": 0},
    waiting_for="",
    eval=[
        EVALUATION,
    ],
    steps_history=[StepPoint(step=1, at_s=0.5, metrics={"policy/loss": 0.1})],
    publishes=1,
    publishes_while_generating=0,
    publish_history=[RECORD],
    tokens_per_second={"generator": 10.0},
    busy={"learner": 0.5},
    roles=[
        RoleStatus(
            name="generator-0",
            role="generator",
            age_s=1.0,
            silent_s=0.1,
            busy=0.9,
            phase_seconds={"wait": 0.1},
            tokens_per_second=3.0,
            adopted=VERSION,
        )
    ],
    data={"rows": 40},
    versions={"torch": "2.11"},
)

LEDGER = LedgerView(
    run_name="run",
    version=VERSION,
    last_step=9,
    finished=False,
    stop_reason="",
    group_size=2,
    issued=4,
    trained=2,
    sealed=1,
    dropped={"zero_variance": 1},
    in_flight={"leased": 1},
    unaccounted=0,
    trajectories={"issued": 8},
    prompts_taken=4,
    prompts=None,
    dead_letters=1,
    retried=1,
    requeued=0,
    redelivered_steps=1,
    untrained_bytes=10,
    replay_bytes=20,
    replay_steps=(4,),
    broker_generation=2,
    store="valkey 9.1.2, appendfsync always",
    oldest=(
        ItemView(
            group_id=1,
            item="train",
            position=7,
            prompt="1+1=",
            state="leased",
            age_s=None,
            holder="generator-0",
            missing=(1,),
            deadline=6,
        ),
    ),
    holders=(HolderView(name="generator-0", work="generation", leases=1, trajectories=1),),
)
REQUESTS: list[control.Request] = [
    control.Hello(role="generator", name="generator-0", packages={"torch": "2.11"}),
    control.Hello(
        role="generator", name="generator-0", incarnation="a1", reconnects=True, held=(4,)
    ),
    control.RoleReport(phase_seconds={"wait": 1.0}, counters={"tokens": 3.0}, adopted=VERSION),
    control.GetStatus(),
    control.LeaseGroups(adopted=VERSION, max_sequences=8, wait_s=2.0),
    control.Heartbeat(lease_ids=(1, 2)),
    control.Goodbye(),
    control.RejectPrompt(lease_id=4, reason="overlong_prompt", detail="row 3 has 99 tokens"),
    control.SubmitTrajectory(header=HEADER),
    control.SubmitTrajectory(
        header=HEADER, score=Score(group_id=1, sibling=0, lease_id=-1, reward=1.0, version="1")
    ),
    control.ReleaseLease(lease_id=1, reason="engine failed"),
    control.LeaseScoring(credits=4, wait_s=1.0),
    control.LeaseScoring(credits=4, wait_s=1.0, whole_groups=True),
    control.GetDeadLetters(after=3, limit=10),
    control.RetryDeadLetters(groups=(1,)),
    control.DropDeadLetters(groups=(1, 2)),
    control.SubmitScores(
        scores=(
            Score(group_id=1, sibling=0, lease_id=2, reward=0.5, parts={"format": 1.0}),
            Score(group_id=1, sibling=1, lease_id=3, unavailable="raised"),
        )
    ),
    control.TakeOver(step=5, checkpoint="step-000005"),
    control.RequestBatch(version=VERSION, step=6, wait_s=1.0),
    control.RejectBatch(
        version=VERSION, step=5, reason="invalid", groups=(1,), detail="logprobs are nan"
    ),
    control.SealSteps(version=VERSION, step=5, oldest_kept=3),
    control.GetLedger(num_items=3),
    control.FetchPayloads(keys=((1, 0), (1, 1))),
    control.StepCommit(version=VERSION, metrics={"policy/loss": -0.5}),
    control.GetLedgerSnapshot(version=VERSION),
    control.PublishReport(record=RECORD),
]
ANSWERS: list[control.Answer] = [
    control.Welcome(run_name="run", session=b"0" * 16, learner_step=5, heartbeat_s=7.5),
    control.Done(),
    control.Refusal(reason="say hello first", code="hello_first"),
    control.LedgerAnswer(view=LEDGER),
    control.StatusAnswer(status=STATUS),
    control.GroupsLeased(
        groups=(
            control.LeasedGroup(
                group_id=1, lease_id=4, item="train", position=7, prompt=PROMPT, siblings=(0, 2)
            ),
        ),
        finished=True,
    ),
    control.HeartbeatAnswer(lost=(2,)),
    control.ScoringLeased(items=(control.ScoringItem(group_id=1, sibling=0, lease_id=2),)),
    control.DeadLetters(
        letters=(
            DeadLetter(
                group_id=1,
                item="train",
                position=7,
                prompt=PROMPT,
                reason="reward_unavailable",
                step=5,
                failures=(Failure(sibling=0, by="worker", reason="raised", excerpt="42"),),
            ),
        ),
        total=1,
        forgotten=0,
    ),
    control.DeadLettersHandled(done={1: 9}, refused={2: "no such dead letter"}),
    control.TookOver(version=VERSION),
    control.BatchDelivered(
        step=5,
        groups=(
            control.DeliveredGroup(
                group_id=1,
                trajectories=(
                    control.DeliveredTrajectory(header=HEADER, reward=1.0, parts={"format": 0.5}),
                ),
            ),
        ),
    ),
    control.BatchNotReady(waiting_for=(1,), reason="groups 1 (leased)", last_step=9),
    control.RunComplete(evaluations=(EVALUATION,)),
    control.StepCommitted(evaluations=(EVALUATION,), last_step=9),
    control.LedgerSnapshotAnswer(data=b"ledger"),
    control.Payloads(num_frames=2),
]
COMMANDS: list[bus.Command] = [
    bus.OpenGroup(command_id=1, host="127.0.0.1", port=5, group_name="g", backend="gloo"),
    bus.CloseGroup(command_id=2, group_name="g", reason="the engine stopped receiving"),
    bus.Offer(command_id=3, manifest=MANIFEST),
    bus.Pause(command_id=4),
    bus.LoadBucket(command_id=5, index=0, group_name="g"),
    bus.Verify(command_id=6),
    bus.Commit(command_id=7),
]
AGENT_MESSAGES: list[bus.AgentMessage] = [
    bus.Join(
        name="generator-0", incarnation="a1", device="cpu", torch_version="2.11", adopted=VERSION
    ),
    bus.Leave(name="generator-0"),
    bus.Outcome(command_id=1, error="", num_in_flight=3, checksums={"norm": "00ff"}),
]


def name_of(message: object) -> str:
    return type(message).__name__


def array(values: bytes, dtype: str, count: int) -> PackedArray:
    return PackedArray(dtype, (count,), memoryview(values))


@pytest.mark.parametrize("request_", REQUESTS, ids=name_of)
def test_a_request_survives_the_wire(request_: control.Request):
    assert codec.decode_request(codec.encode(request_)) == request_


@pytest.mark.parametrize("answer", ANSWERS, ids=name_of)
def test_an_answer_survives_the_wire(answer: control.Answer):
    assert codec.decode_answer(codec.encode(answer)) == answer


@pytest.mark.parametrize("command", COMMANDS, ids=name_of)
def test_a_command_of_the_weight_bus_survives_the_wire(command: bus.Command):
    assert codec.decode_command(codec.encode(command)) == command


@pytest.mark.parametrize("message", AGENT_MESSAGES, ids=name_of)
def test_a_message_of_an_agent_survives_the_wire(message: bus.AgentMessage):
    assert codec.decode_agent_message(codec.encode(message)) == message


@pytest.mark.parametrize(
    ("union", "samples"),
    [
        (control.Request, REQUESTS),
        (control.Answer, ANSWERS),
        (bus.Command, COMMANDS),
        (bus.AgentMessage, AGENT_MESSAGES),
    ],
)
def test_no_kind_of_message_is_missing_above(union: object, samples: list[object]):
    assert {type(sample) for sample in samples} == set(get_args(union))


def test_a_payload_survives_the_wire_and_shares_the_memory_of_its_frame():
    sent = TrajectoryPayload(
        token_ids=array(bytes(range(12)), "int32", 3),
        loss_mask=array(b"\0\1\1", "bool", 3),
        behavior_logprobs=array(bytes(range(12, 24)), "float32", 3),
    )
    frame = codec.encode(sent)
    got = codec.decode_payload(frame)
    assert got.token_ids.data.tobytes() == bytes(range(12))
    assert got.loss_mask.data.tobytes() == b"\0\1\1"
    assert got.behavior_logprobs.data.tobytes() == bytes(range(12, 24))
    for one in (got.token_ids, got.loss_mask, got.behavior_logprobs):
        assert one.data.obj is frame


def test_a_payload_is_decoded_from_a_view_of_a_larger_buffer():
    frame = codec.encode(
        TrajectoryPayload(
            token_ids=array(b"\7\0\0\0", "int32", 1),
            loss_mask=array(b"\1", "bool", 1),
            behavior_logprobs=array(bytes(4), "float32", 1),
        )
    )
    received = bytearray(b"head" + frame)
    got = codec.decode_payload(memoryview(received)[4:])
    received[4 + frame.index(b"\7\0\0\0")] = 9
    assert got.token_ids.data.tobytes() == b"\x09\0\0\0"


def test_a_transcript_survives_the_wire():
    sent = Transcript(prompt=PROMPT, response=" 2 ", num_response_tokens=2, finish_reason="stop")
    assert codec.decode_transcript(codec.encode(sent)) == sent


@pytest.mark.parametrize(
    ("decode", "what"),
    [
        (codec.decode_request, "request"),
        (codec.decode_answer, "answer of the broker"),
        (codec.decode_command, "weight bus command"),
        (codec.decode_agent_message, "weight bus message"),
    ],
)
def test_an_unknown_kind_is_named(decode: "type[object]", what: str):
    with pytest.raises(ProtocolError, match=f"not a valid {what}: .*gossip"):
        decode(msgspec.msgpack.encode({"kind": "gossip"}))


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"not msgpack at all",
        b"\x80",
        b"\x93\1\2\3",
        b"\xff" * 64,
        codec.encode(control.Hello(role="learner", name="x"))[:-3],
        codec.encode(control.GetStatus()) + b"\0",
        b"\x81\xa4kind\xa4\xff\xfe\xff\xfe",
    ],
)
def test_garbage_is_a_protocol_error(frame: bytes):
    for decode in (codec.decode_request, codec.decode_payload, codec.decode_transcript):
        with pytest.raises(ProtocolError, match="not a valid"):
            decode(frame)


def test_a_header_that_contradicts_itself_is_refused_by_the_decoder():
    request = msgspec.to_builtins(control.SubmitTrajectory(header=HEADER))
    request["header"]["num_tokens"] = 5
    with pytest.raises(ProtocolError, match=r"the response is \[3, 5\)"):
        codec.decode_request(msgspec.msgpack.encode(request))


def test_a_field_of_a_newer_revision_is_ignored():
    plain = msgspec.to_builtins(control.TakeOver(step=3)) | {"mood": "good"}
    assert codec.decode_request(msgspec.msgpack.encode(plain)) == control.TakeOver(step=3)


def test_a_message_with_the_wrong_number_of_frames_is_refused():
    codec.expect_frames([b"a", b"b"], 2, "SubmitTrajectory")
    with pytest.raises(ProtocolError, match="SubmitTrajectory needs 2 attached frames, got 1"):
        codec.expect_frames([b"a"], 2, "SubmitTrajectory")


def test_a_deeply_nested_frame_is_a_protocol_error():
    frame = b"\x82\xa4kind\xa9getstatus\xa1x" + b"\x91" * 100_000 + b"\x01"
    with pytest.raises(ProtocolError):
        codec.decode_request(frame)
