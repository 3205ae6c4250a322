"""One sample of every message on the wire; golden bytes, the codec's tests and fuzzing start here.

An entry that changes is a change of the golden bytes: see tests/golden/make_wire.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from slipstream.wire.messages import broker, codec, followers, part_relays, relay, weightbus
from slipstream.wire.messages.arrays import PackedArray
from slipstream.wire.messages.dead_letters import DeadLetter, Failure
from slipstream.wire.messages.images import Image, ImageSpan
from slipstream.wire.messages.ledger_view import HolderView, ItemView, LedgerView
from slipstream.wire.messages.manifest import Bucket, TensorSpec, WeightManifest
from slipstream.wire.messages.probe import ProbeLogprobs
from slipstream.wire.messages.status import (
    EvalFigures,
    EvalPoint,
    LengthQuartile,
    RoleStatus,
    RunStatus,
    StepPoint,
    Survivorship,
)
from slipstream.wire.messages.trajectory import (
    ChatMessage,
    ContentPart,
    Decisions,
    Prompt,
    Score,
    TrajectoryHeader,
    TrajectoryPayload,
    Transcript,
    VersionRun,
)
from slipstream.wire.messages.versions import PolicyVersion

T = TypeVar("T", bound=msgspec.Struct)

VERSION = PolicyVersion(2, 5)
PROMPT = Prompt(
    prompt=(ChatMessage("system", "Answer."), ChatMessage("user", "1+1=")),
    ground_truth={"target": 2, "numbers": [1, 1]},
    extra_info={"level": 1, "note": None},
    row=3,
)
IMAGE = Image("5e" * 32, 640, 480, 77_001)
SEEN = msgspec.structs.replace(
    PROMPT,
    prompt=(ChatMessage("user", (ContentPart(image=IMAGE), ContentPart(text="What is it?"))),),
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
PROBE = ProbeLogprobs(
    sequences=((5, 2, 7, 1), (3, 3, 0, 9)), logprobs=((-0.5, -1.25), (-2.0, -0.125)), num_context=2
)
RECORD = weightbus.PublishRecord(
    version=VERSION,
    at_s=1.5,
    adopted_by={"generator-0": 0.25},
    failed={"generator-1": "gone"},
    num_in_flight={"generator-0": 3},
    engine_digests={"generator-0": "00ff"},
    phase_seconds={"receive": 0.125, "load": 0.0625},
    num_bytes=16,
    fetched_bytes={"generator-0": 8},
    transports={"generator-0": "tcp", "generator-1": "collective"},
)
QUARANTINED = weightbus.PublishRecord(
    version=VERSION,
    at_s=2.5,
    adopted_by={},
    quarantined={"generator-0": "its logprobs of the probe differ"},
)
MEMBERS = [
    weightbus.MemberState(
        name="generator-0", state="current", version=VERSION, since_s=2.5, transport="tcp"
    ),
    weightbus.MemberState(
        name="generator-1",
        state="torn",
        version=None,
        since_s=3.5,
        transport="collective",
        reason="gone",
    ),
]
DOOR = weightbus.RelayAddress(
    endpoint="tcp://10.0.0.1:7000",
    bulk_endpoint="tcp://10.0.0.1:7001",
    key="k" * 40,
    is_bulk_plain=True,
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
COUNTS: dict[str, Any] = {  # of the ledger, in its views
    "run_name": "run",
    "finished": False,
    "stop_reason": "",
    "group_size": 2,
    "issued": 4,
    "trained": 2,
    "requeued": 0,
    "unaccounted": 0,
    "dropped": {"zero_variance": 1},
    "in_flight": {"leased": 1},
    "trajectories": {"issued": 8},
}
STATUS = RunStatus(
    **COUNTS,
    outcome="running",
    elapsed_s=1.0,
    steps=5,
    total_steps=9,
    max_staleness_steps=1,
    groups_per_step=2,
    sealed=0,
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
    eval=[EVALUATION],
    steps_history=[StepPoint(step=1, at_s=0.5, metrics={"policy/loss": 0.1})],
    publishes=1,
    publishes_while_generating=0,
    publish_history=[RECORD],
    members=MEMBERS,
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
            kv_use=0.25,
            sequences=6,
            sequence_limit=8,
            probes=6.0,
            probe_difference=0.015,
            probe_bound=0.0375,
            acting=3,
            environment_failed=2.0,
            engine_s=6.0,
            environment_s=1.5,
            cpu_cores=1.25,
            memory_bytes=2.5e9,
            gpu_bytes=6e10,
            gpu_busy=0.75,
        )
    ],
    data={"rows": 40},
    versions={"torch": "2.11"},
)

LEDGER = LedgerView(
    **COUNTS,
    version=VERSION,
    last_step=9,
    sealed=1,
    prompts_taken=4,
    prompts=None,
    dead_letters=1,
    retried=1,
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
REQUESTS: list[broker.Request] = [
    broker.Hello(role="generator", name="generator-0", packages={"torch": "2.11"}),
    broker.Hello(
        role="generator", name="generator-0", incarnation="a1", reconnects=True, held=(4,)
    ),
    broker.RoleReport(
        phase_seconds={"wait": 1.0},
        counters={"tokens": 3.0},
        adopted=VERSION,
        gauges={"kv_use": 0.25},
        rewritten="after 'a' came 'b', and now 'c'",
    ),
    broker.GetStatus(),
    broker.LeaseGroups(adopted=VERSION, max_sequences=8, wait_s=2.0),
    broker.Heartbeat(lease_ids=(1, 2)),
    broker.Goodbye(),
    broker.RejectPrompt(lease_id=4, reason="overlong_prompt", detail="row 3 has 99 tokens"),
    broker.SubmitTrajectory(header=HEADER),
    broker.SubmitTrajectory(
        header=HEADER, score=Score(group_id=1, sibling=0, lease_id=-1, reward=1.0, version="1")
    ),
    broker.ReleaseLease(lease_id=1, reason="engine failed", is_stranded=True),
    broker.LeaseScoring(credits=4, wait_s=1.0),
    broker.LeaseScoring(credits=4, wait_s=1.0, whole_groups=True),
    broker.GetDeadLetters(after=3, limit=10),
    broker.RetryDeadLetters(groups=(1,)),
    broker.DropDeadLetters(groups=(1, 2)),
    broker.SubmitScores(
        scores=(
            Score(
                group_id=1,
                sibling=0,
                lease_id=2,
                reward=0.5,
                parts={"format": 1.0},
                turn_rewards=(0.75, -0.25),
            ),
            Score(group_id=1, sibling=1, lease_id=3, unavailable="raised"),
        )
    ),
    broker.TakeOver(step=5, checkpoint="step-000005"),
    broker.RequestBatch(version=VERSION, step=6, wait_s=1.0),
    broker.RejectBatch(
        version=VERSION, step=5, reason="invalid", groups=(1,), detail="logprobs are nan"
    ),
    broker.SealSteps(version=VERSION, step=5, oldest_kept=3),
    broker.GetLedger(num_items=3),
    broker.FetchPayloads(keys=((1, 0), (1, 1))),
    broker.FetchImage(digest=IMAGE.digest),
    broker.StoreImage(digest=IMAGE.digest),
    broker.StepCommit(version=VERSION, metrics={"policy/loss": -0.5}),
    broker.GetLedgerSnapshot(version=VERSION),
    broker.PublishReport(record=RECORD),
    broker.PublishReport(record=QUARANTINED),
    broker.EngineQuarantined(version=VERSION, reason="its logprobs of the probe differ"),
    broker.RelayReport(members=MEMBERS),
    broker.RelayReport(members=[], door=DOOR),
    broker.FindRelay(),
]
ANSWERS: list[broker.Answer] = [
    broker.Welcome(run_name="run", session=b"0" * 16, learner_step=5, heartbeat_s=7.5),
    broker.Done(),
    broker.Refusal(reason="say hello first", code="hello_first"),
    broker.LedgerAnswer(view=LEDGER),
    broker.StatusAnswer(status=STATUS),
    broker.GroupsLeased(
        groups=(
            broker.LeasedGroup(
                group_id=1, lease_id=4, item="train", position=7, prompt=PROMPT, siblings=(0, 2)
            ),
        ),
        finished=True,
    ),
    broker.HeartbeatAnswer(lost=(2,)),
    broker.ScoringLeased(items=(broker.ScoringItem(group_id=1, sibling=0, lease_id=2),)),
    broker.DeadLetters(
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
    broker.DeadLettersHandled(done={1: 9}, refused={2: "no such dead letter"}),
    broker.TookOver(version=VERSION),
    broker.RelayHeard(generator_keys={DOOR.key: "gpu-7"}),
    broker.RelayPlace(is_known=True, door=DOOR),
    broker.BatchDelivered(
        step=5,
        groups=(
            broker.DeliveredGroup(
                group_id=1,
                trajectories=(
                    broker.DeliveredTrajectory(
                        header=HEADER, reward=1.0, parts={"format": 0.5}, turn_rewards=(1.0,)
                    ),
                ),
            ),
        ),
    ),
    broker.BatchNotReady(waiting_for=(1,), reason="groups 1 (leased)", last_step=9),
    broker.RunComplete(evaluations=(EVALUATION,)),
    broker.StepCommitted(evaluations=(EVALUATION,), last_step=9),
    broker.LedgerSnapshotAnswer(data=b"ledger"),
    broker.Payloads(num_frames=2),
    broker.ImageBytes(),
]
COMMANDS: list[weightbus.Command] = [
    weightbus.JoinAcknowledged(relay="r1"),
    weightbus.OpenGroup(
        command_id=1, host="127.0.0.1", port=5, group_name="g", backend="gloo", rank=2, world_size=3
    ),
    weightbus.Abandon(command_id=2, reason="the engine stopped receiving"),
    weightbus.Offer(command_id=3, manifest=MANIFEST, transport="disk"),
    weightbus.ReceiveVersion(command_id=4, manifest=MANIFEST, path="/weights/v2.5"),
    weightbus.ReceiveVersion(
        command_id=4, manifest=MANIFEST, mapped="/proc/1/fd/9", may_be_read=True
    ),
    weightbus.ReceiveVersion(
        command_id=10,
        manifest=MANIFEST,
        sources=(
            (
                weightbus.BulkDoor(endpoint="tcp://10.0.0.7:5700", key="k" * 40, is_plain=True),
                weightbus.BulkDoor(endpoint="tcp://10.0.0.1:7001", key="k" * 40),
            ),
        ),
        first_part=3,
    ),
    weightbus.Admit(command_id=11, version=VERSION, keys=("k" * 40,)),
    weightbus.Pause(command_id=5),
    weightbus.LoadBucket(command_id=6, index=0, group_name="g"),
    weightbus.Adopt(command_id=7, version=VERSION),
    weightbus.Adopt(command_id=12, version=VERSION, digest="00ff", probe=PROBE),
    weightbus.Verify(command_id=8, wants="checksums"),
    weightbus.Commit(command_id=9, version=VERSION, digest="0f"),
    weightbus.Commit(command_id=13, version=VERSION, digest="0f", probe=PROBE),
]
AGENT_MESSAGES: list[weightbus.AgentMessage] = [
    weightbus.Join(
        name="generator-0",
        incarnation="a1",
        device="cuda",
        torch_version="2.11",
        nccl_version="2.27.5",
        num_ranks=2,
        transport="tcp",
        adopted=VERSION,
        forward=weightbus.BulkDoor(endpoint="tcp://10.0.0.7:5700", key="k" * 40),
        host="8f1c/4026531836/1000",
    ),
    weightbus.Leave(name="generator-0"),
    weightbus.CommandOutcome(
        command_id=1, error="refused", num_in_flight=3, num_bytes=7, checksums={"norm": "00ff"}
    ),
    weightbus.CommandOutcome(command_id=2, num_bytes=7, path="/proc/1/fd/9"),
]
FETCHES = [
    weightbus.FetchBucket(version=VERSION, index=1),
    weightbus.FetchBucket(version=VERSION, index=1, base=PolicyVersion(2, 3)),
]
BUCKET_ANSWERS = [
    weightbus.BucketAnswer(version=VERSION, index=1),
    weightbus.BucketAnswer(version=VERSION, index=1, error="it is not served any more"),
    weightbus.BucketAnswer(
        version=VERSION, index=1, base=PolicyVersion(2, 3), num_steps=2, whole=(0, 4)
    ),
]
RELAY_REQUESTS: list[relay.RelayRequest] = [
    relay.OpenMemory(
        epoch=2,
        paths=("/proc/1/fd/9", "/proc/1/fd/10", "/proc/1/fd/11"),
        layout=MANIFEST,
        whole=PolicyVersion(2, 4),
        slot=1,
    ),
    relay.ServeHead(
        epoch=2,
        head=weightbus.RelayAddress(endpoint="tcp://10.0.0.1:5600", bulk_endpoint="", key="k"),
        public="p",
        secret="s",  # noqa: S106 of nobody
    ),
    relay.Writing(epoch=2, slot=1),
    relay.Reserve(epoch=2),
    relay.Written(epoch=2, version=VERSION, slot=2),
    relay.Written(epoch=2, version=VERSION, slot=2, probe=PROBE),
    relay.Alive(),
    relay.EndRelay(epoch=2),
]
RELAY_ANSWERS: list[relay.RelayAnswer] = [
    relay.Reserved(slot=2),
    relay.Ok(error="a newer learner publishes now", superseded=True, pid=7),
]
DOOR = weightbus.BulkDoor(endpoint="tcp://10.0.0.2:5601", key="k")
PART_REPORTS: list[part_relays.PartReport] = [
    part_relays.PartState(
        part=1,
        epoch=2,
        incarnation="a1",
        door=DOOR,
        whole=(VERSION,),
        keys_digest="0f",
        held=(VERSION,),
    ),
    part_relays.PartHeld(command_id=1, error="it is not whole there", digests={"norm": "00ff"}),
    part_relays.PartHashed(
        command_id=2,
        hashes={
            "norm": (
                part_relays.HashPart(
                    total=40_000,
                    num_bytes=7,
                    whole=(1, 2**32 - 1),
                    edges={1: (3, 4)},
                    cut={8193: 5},
                ),
            )
        },
    ),
]
HEAD_COMMANDS: list[part_relays.HeadCommand] = [
    part_relays.PartHeard(relay="b2", keys_digest="0f", generator_keys={"k": "gpu-7"}),
    part_relays.Hold(command_id=1, epoch=2, version=VERSION),
    part_relays.Hash(command_id=2, version=VERSION, num_ranks=2, attention_groups=1),
    part_relays.Release(epoch=2, version=VERSION),
]

TO_LEADER: list[followers.ToLeader] = [
    followers.HostAnswered(node=1, incarnation="c3", number=3, answer="{}"),
    followers.Follow(
        node=1, incarnation="c3", host="gpu-8", pid=7, facts={"generators.dtype": "bfloat16"}
    ),
    followers.Following(node=1, incarnation="c3", state="running"),
    followers.FollowerEnds(node=1, incarnation="c3", reason="SGLang ended with code -9"),
    followers.FetchedThere(
        node=1, incarnation="c3", command_id=1, error="bucket 0 did not arrive", num_bytes=7
    ),
]
TO_FOLLOWER: list[followers.ToFollower] = [
    followers.AskHost(number=3, process="generator-0", request="{}", limit_s=60.0),
    followers.FollowerAccepted(leader="d4", host="gpu-7"),
    followers.FollowerRefused(reason="two processes came as node 1", is_taken=True),
    followers.StartNode(host="10.0.0.7", port=40001),
    followers.FetchToo(
        command_id=1,
        receive=weightbus.ReceiveVersion(command_id=9, manifest=MANIFEST, sources=((DOOR,),)),
        relay=weightbus.RelayAddress(
            endpoint="tcp://10.0.0.1:5600", bulk_endpoint="tcp://10.0.0.1:5601", key="k"
        ),
        may_be_read=True,
    ),
    followers.EndNode(reason="it was asked to end", node=1, host="gpu-8", is_orderly=True),
]


def array(values: bytes, dtype: str, count: int) -> PackedArray:
    return PackedArray(dtype, (count,), memoryview(values))


PAYLOAD = TrajectoryPayload(
    token_ids=array(bytes(range(12)), "int32", 3),
    loss_mask=array(b"\0\1\1", "bool", 3),
    behavior_logprobs=array(bytes(range(12, 24)), "float32", 3),
)
DECIDED = msgspec.structs.replace(
    PAYLOAD,
    decisions=Decisions(
        kept_counts=array(b"\2\1", "uint8", 2),
        kept_ids=array(bytes(range(6)), "uint16", 3),
        experts=PackedArray("uint8", (2, 1, 2), memoryview(b"\0\3\1\2")),
    ),
)
TRANSCRIPT = Transcript(prompt=PROMPT, response=" 2 ", num_response_tokens=2, finish_reason="stop")

ILLUSTRATED = msgspec.structs.replace(
    PAYLOAD,
    token_ids=array(bytes(range(28)), "int32", 7),
    loss_mask=array(b"\0\0\0\0\0\1\1", "bool", 7),
    behavior_logprobs=array(bytes(range(28)), "float32", 7),
    images=(ImageSpan(IMAGE.digest, 1, 4, 4, 4),),
)
OF_IMAGES = msgspec.structs.replace(TRANSCRIPT, prompt=SEEN)
OF_TURNS = msgspec.structs.replace(TRANSCRIPT, replies=(" 2 ", "\u00e9"))


def named(samples: Sequence[T]) -> dict[str, T]:
    """The samples by kind; a second one of a kind is KIND-2."""
    found: dict[str, T] = {}
    for sample in samples:
        kind = type(sample).__name__.lower()
        count = sum(name.partition("-")[0] == kind for name in found)
        found[kind if not count else f"{kind}-{count + 1}"] = sample
    return found


FAMILIES: dict[str, Mapping[str, msgspec.Struct]] = {
    "request": named(REQUESTS),
    "answer": named(ANSWERS),
    "command": named(COMMANDS),
    "agent_message": named(AGENT_MESSAGES),
    "fetch": named(FETCHES),
    "bucket_answer": named(BUCKET_ANSWERS),
    "relay_request": named(RELAY_REQUESTS),
    "relay_answer": named(RELAY_ANSWERS),
    "part_report": named(PART_REPORTS),
    "head_command": named(HEAD_COMMANDS),
    "to_leader": named(TO_LEADER),
    "to_follower": named(TO_FOLLOWER),
    "payload": {"trajectorypayload": PAYLOAD, "decided": DECIDED, "illustrated": ILLUSTRATED},
    "transcript": {"transcript": TRANSCRIPT, "of_turns": OF_TURNS, "of_images": OF_IMAGES},
}
DECODERS = {
    "request": codec.decode_request,
    "answer": codec.decode_answer,
    "command": codec.decode_command,
    "agent_message": codec.decode_agent_message,
    "fetch": codec.decode_fetch,
    "bucket_answer": codec.decode_bucket_answer,
    "relay_request": codec.decode_relay_request,
    "relay_answer": codec.decode_relay_answer,
    "part_report": codec.decode_part_report,
    "head_command": codec.decode_head_command,
    "to_leader": codec.decode_to_leader,
    "to_follower": codec.decode_to_follower,
    "payload": codec.decode_payload,
    "transcript": codec.decode_transcript,
}
