"""What clients may send and must not matter: faults that fuzzing found, one test each."""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from slipstream.broker.ledger.groups import Group
from slipstream.broker.report.run_files import FolderRecords
from slipstream.broker.report.telemetry import Telemetry
from slipstream.broker.server.limits import max_body_bytes
from slipstream.broker.server.router import EventLoopRouter, Peer
from slipstream.broker.server.sessions import Sessions
from slipstream.broker.store.base import StoredTrajectory
from slipstream.wire.errors import RefusedError, SupersededError
from slipstream.wire.messages import broker
from slipstream.wire.messages.bounds import MOST
from slipstream.wire.messages.codec import encode
from slipstream.wire.messages.pieces import cut
from slipstream.wire.messages.trajectory import Score
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.settings.sections import RunSection
from tests.support.ledger_driver import (
    eval_plan,
    generate,
    header,
    lease,
    make_ledger,
    make_rules,
    reward,
)
from tests.support.running_broker import BATCH, V0, Running, bare_socket, running
from tests.support.waiting import HANG_S

NAN, INF = float("nan"), float("inf")


class Silent:
    def log(self, step: int, figures: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def answers_to(folder: Path, role: broker.Role, *requests: broker.Request) -> list[broker.Answer]:
    """The answers to a few requests of one client after its hello."""

    async def body() -> list[broker.Answer]:
        async with running(folder) as it, bare_socket(it.endpoint) as ask:
            await ask(b"0", encode(broker.Hello(role=role, name="x", incarnation="a")))
            found = [await ask(b"%d" % i, encode(one)) for i, one in enumerate(requests)]
            assert it.server.telemetry.rejected["internal"] == 0
            return found

    return asyncio.run(body())


@pytest.fixture
def it(short_folder: Path) -> AbstractAsyncContextManager[Running]:
    return running(short_folder)


async def test_request_before_hello_is_counted(it: Running):
    async with bare_socket(it.endpoint) as ask:
        await ask(b"1", encode(broker.GetStatus()))
        assert it.server.telemetry.rejected["hello_first"] == 1


@pytest.mark.parametrize("num_items", [0, MOST])
def test_any_number_of_items_may_be_asked_for(short_folder: Path, num_items: int):
    (answer,) = answers_to(short_folder, "observer", broker.GetLedger(num_items=num_items))
    assert isinstance(answer, broker.LedgerAnswer)


async def test_no_wait_is_longer_than_the_longest_one(it: Running):
    """The event loop keeps its timers in order; NaN has none."""
    async with bare_socket(it.endpoint) as ask:
        await ask(b"0", encode(broker.Hello(role="generator", name="g")))
        for wait_s in (NAN, INF, -INF):
            refusal = await ask(b"1", encode(broker.LeaseScoring(credits=1, wait_s=wait_s)))
            assert isinstance(refusal, broker.Refusal)
        await ask(b"1", encode(broker.LeaseScoring(credits=1, wait_s=1e308)), answered=False)
        answer = await ask(
            b"2", encode(broker.LeaseGroups(adopted=V0, max_sequences=1, wait_s=-1e308))
        )
        (parked,) = it.server.pending._by_key.values()
        assert parked.timer is not None
        left_s = parked.timer.when() - asyncio.get_running_loop().time()
    assert isinstance(answer, broker.GroupsLeased)
    assert 25.0 < left_s <= 30.0


@pytest.mark.parametrize("tokens", [NAN, INF, -INF, 1e308])
def test_a_report_of_no_number_leaves_the_state_of_the_run_readable(
    short_folder: Path, tokens: float
):
    report = broker.RoleReport(phase_seconds={"wait": tokens}, counters={"tokens": tokens})
    sent_before = [
        broker.TakeOver(step=0),
        report,
        broker.Hello(role="learner", name="x", incarnation="b"),
    ]
    *_, answer = answers_to(short_folder, "learner", *sent_before, report, broker.GetStatus())
    assert isinstance(answer, broker.StatusAnswer)
    assert answer.status.tokens_per_second.get("learner", 0.0) == 0.0


def test_what_is_remembered_of_a_hello_is_bounded():
    telemetry = Telemetry(RunSection(name="run"))
    for i in range(300):
        packages = {f"package-{i}": "1" * 1_000, "torch": str(i)}
        telemetry.hello(broker.Hello(role="operator", name=f"operator-{i}", packages=packages))
        telemetry.hello(
            broker.Hello(role="generator", name="g", packages=packages, held=(1,) * 1_000)
        )
    assert list(telemetry._roles) == ["g"]
    assert telemetry._roles["g"].hello == broker.Hello(role="generator", name="g")
    assert len(telemetry.versions) == 256
    assert telemetry.versions["torch"] == "299"
    assert max(map(len, telemetry.versions.values())) == 100


@pytest.mark.parametrize("step", [1, 2**63])
def test_no_work_is_granted_for_weights_that_no_learner_has_made(step: int):
    ledger = make_ledger()
    version = ledger.training.take_over(0)
    ahead = msgspec.structs.replace(version, step=step)
    assert lease(ledger, adopted=ahead) == []
    assert len(lease(ledger, adopted=version)) == 4


def test_a_header_with_numbers_that_cannot_be_is_refused():
    for wrong in [{"num_tokens": 2**31}, {"temperature": NAN}, {"temperature": -1.0}]:
        good = header(0, 0, PolicyVersion(1, 0))
        fields = msgspec.to_builtins(good) | wrong
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(fields, type(good))


def test_an_evaluated_answer_whose_text_cannot_be_read_is_recorded_all_the_same(tmp_path: Path):
    ledger = make_ledger(make_rules(plan=eval_plan(1, samples=1, every_steps=1, before_train=True)))
    ledger.training.take_over(0)
    group = next(one for one in lease(ledger) if one.item == "eval")
    generate(ledger, group)
    held: Group = ledger.book.groups[group.group_id]
    reward(ledger, group.group_id, [1.0])
    run = RunSection(name="run", dir=str(tmp_path))
    run.folder.mkdir()
    records = FolderRecords(run, Silent(), keep_answers=9, batches=None)
    records.eval_answers(held, {0: StoredTrajectory(payload=b"", transcript=b"\xc1garbage")})
    (path,) = (run.folder / "eval").iterdir()
    assert '"answer": "(not a valid transcript' in path.read_text()


def test_a_text_of_a_client_is_one_short_line_of_the_log(
    short_folder: Path, caplog: pytest.LogCaptureFixture
):
    reason = "no\n2026-01-01 ERROR forged \x1b[2J" + "x" * 60_000
    with caplog.at_level(logging.WARNING):
        answers_to(short_folder, "generator", broker.ReleaseLease(lease_id=1, reason=reason))
    (line,) = (one.getMessage() for one in caplog.records if "handed back" in one.getMessage())
    assert len(line) < 600
    assert line.isprintable()


async def test_a_payload_is_not_sent_twice_in_one_answer(it: Running):
    learner, _, group = await it.opened(0, 1)
    await it.scored()
    await learner.ask(BATCH, broker.BatchDelivered)
    with pytest.raises(RefusedError, match="names a trajectory twice"):
        await learner.ask_any(broker.FetchPayloads(keys=((group.group_id, 0),) * 2))


def test_a_generators_body_is_small_though_its_payload_may_be_large():
    assert max_body_bytes("generator", 1 << 30) == 1 << 20
    assert max_body_bytes("reward_worker", 1 << 30) == 16 << 20
    assert max_body_bytes("generator", 1000) == 1000


def test_a_hello_that_is_refused_decides_nothing():
    sessions = Sessions()
    first, second = (Peer(None, one) for one in (b"1", b"2"))  # type: ignore[arg-type]  # not used
    known = sessions.hello(first, broker.Hello(role="generator", name="g", incarnation="b"))
    late = broker.Hello(
        role="generator", name="g", incarnation="a", reconnects=True, tokenizer="wrong"
    )
    own = sessions.hello(second, broker.Hello(role="observer", name="o"))
    with pytest.raises(SupersededError):
        sessions.hello(second, late)
    assert sessions.find(own.token, second) is own
    assert sessions.find(known.token, first) is known
    sessions.hello(
        first, broker.Hello(role="generator", name="g", incarnation="b", tokenizer="right")
    )


async def test_a_message_that_brings_a_fault_to_light_does_not_hold_up_those_behind_it(
    short_folder: Path,
):
    """The socket reports changes only, so the router has to check again by itself."""
    received: list[bytes] = []
    is_good = asyncio.Event()

    def on_message(_peer: Peer, frames: list[zmq.Frame]) -> None:
        received.append(frames[0].bytes)
        if frames[0].bytes == b"bad":
            raise RuntimeError
        is_good.set()

    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    endpoint = f"ipc://{short_folder}/r.sock"
    router = EventLoopRouter(context, endpoint, on_message=on_message)
    client = context.socket(zmq.DEALER)
    client.connect(endpoint)
    for text in (b"bad", b"bad", b"good"):
        client.send(text)
    with suppress(TimeoutError):
        async with asyncio.timeout(HANG_S):
            await is_good.wait()
    router.close()
    client.close(0)
    context.term()
    assert received == [b"bad", b"bad", b"good"]


async def test_a_message_that_is_too_large_is_refused_with_both_sizes(it: Running):
    async with bare_socket(it.endpoint) as ask:
        await ask(b"0", encode(broker.Hello(role="observer", name="o")))
        answer = await ask(b"1", *cut([b"x" * 70_000]))
    assert isinstance(answer, broker.Refusal)
    assert "a observer may send 65536" in answer.reason


async def test_score_of_an_answer_not_yet_generated_queues_nothing(it: Running):
    _, generator, group = await it.opened()
    scores = tuple(
        Score(group_id=group.group_id, sibling=sibling, lease_id=1, reward=1.0)
        for sibling in (0, 7)
    )
    await generator.ask_any(broker.SubmitScores(scores=scores))
    assert it.server._leases._scoring.num_waiting == 0
