"""What a client may do with the items of others."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from slipstream.broker.ledger.scores import MAX_PARTS_OF_RUN, OTHER_PARTS
from slipstream.wire.errors import ForbiddenError, RefusedError
from slipstream.wire.messages import broker
from slipstream.wire.messages.codec import decode_transcript, encode
from slipstream.wire.messages.trajectory import (
    Prompt,
    Score,
    TrajectoryHeader,
    Turn,
    VersionRun,
    transcript_of,
)
from tests.support.ledger_driver import (
    RESPONSE_TOKENS,
    generate,
    header,
    lease,
    make_ledger,
    make_rules,
)
from tests.support.running_broker import SCORING, V0, Running, one_group, running, submit
from tests.support.wire_samples import MEMBERS, RECORD


async def test_an_observer_changes_nothing(it: Running):
    observer = await it.client("observer", "observer")
    answer, _ = await observer.ask(broker.GetStatus(), broker.StatusAnswer)
    status = answer.status
    names = [role.name for role in status.roles]
    assert (status.run_name, names, status.issued) == ("run", ["broker"], 0)


async def test_only_a_relay_may_report_engines_and_observers_see_the_report(it: Running):
    reports: list[broker.Request] = [
        broker.PublishReport(record=RECORD),
        broker.RelayReport(members=MEMBERS),
    ]
    relay = await it.client("relay", "relay")
    others: tuple[broker.Role, ...] = ("learner", "generator", "reward_worker", "operator")
    for role in others:
        client = await it.client(role, role)
        for report in reports:
            with pytest.raises(ForbiddenError, match=f"is a {role}, which may not send"):
                await client.ask(report, broker.Done)
        if role == "learner":
            await client.ask(broker.TakeOver(step=0), broker.TookOver)
    assert (it.status.members, it.status.publish_history) == ([], [])
    await relay.ask(reports[0], broker.Done)
    assert (await relay.ask(reports[1], broker.RelayHeard))[0].generator_keys == {}
    with pytest.raises(ForbiddenError, match="is a relay, which may not send TakeOver"):
        await relay.ask(broker.TakeOver(step=0), broker.TookOver)
    answer, _ = await (await it.client("observer", "o")).ask(
        broker.GetStatus(), broker.StatusAnswer
    )
    status, forbidden = answer.status, it.server.telemetry.rejected["forbidden"]
    assert (status.members, status.publish_history) == (MEMBERS, [RECORD])
    assert forbidden == 9
    assert next(one.role for one in status.roles if one.name == "relay") == "relay"


# ---- rights by item ----------------------------------------------------------


async def test_a_generator_scores_what_it_delivered_and_nothing_else(it: Running):
    _, generator, group = await it.opened(0, 1)
    other = await it.client("generator", "generator-1")
    now = broker.LeaseScoring(credits=8, wait_s=0.0)
    assert (await other.ask(now, broker.ScoringLeased))[0].items == ()
    leased, _ = await generator.ask(now, broker.ScoringLeased)
    assert [(one.group_id, one.sibling) for one in leased.items] == [(0, 0), (0, 1)]
    scores = tuple(
        Score(group_id=0, sibling=one.sibling, lease_id=one.lease_id, reward=1.0 + one.sibling)
        for one in leased.items
    )
    await other.ask(broker.SubmitScores(scores=scores), broker.Done)
    assert it.ledger.book.groups[group.group_id].scores == {}, "it holds no lease of them"
    await generator.ask(broker.SubmitScores(scores=scores), broker.Done)
    assert it.ledger.book.groups[group.group_id].values_of("reward") == [1.0, 2.0]


async def test_no_learner_but_the_one_that_took_over_trains(it: Running):
    await it.opened(0, 1)
    await it.scored()
    other = await it.client("learner", "learner-rank-1")
    version = it.ledger.book.version
    for request_ in (
        broker.RequestBatch(version=version, step=0, wait_s=0.0),
        broker.StepCommit(version=version.next(), metrics={}),
        broker.RejectBatch(version=version, step=0, reason="invalid", groups=(0,), detail=""),
        broker.SealSteps(version=version, step=0, oldest_kept=0),
        broker.GetLedgerSnapshot(version=version),
    ):
        with pytest.raises(ForbiddenError, match="does not train this run"):
            await other.ask_any(request_)
    with pytest.raises(RefusedError, match="in no delivered batch"):  # a rank's right
        await other.ask_any(broker.FetchPayloads(keys=((0, 0),)))
    await other.ask(broker.Goodbye(), broker.Done)
    assert not it.ledger.book.state.learner_left


# ---- a broker that dies ------------------------------------------------------


async def test_a_worker_scores_the_prompt_that_was_issued_whatever_a_generator_sends(it: Running):
    _, generator, group = await it.opened()
    message = broker.SubmitTrajectory(header=header(group.group_id, 0, V0, lease_id=0))
    forged = transcript_of(message.header, Prompt(prompt="?", ground_truth="mine"), "mine")
    with pytest.raises(RefusedError, match="not a valid response"):
        await generator.ask(message, broker.Done, frames=[b"payload", encode(forged)])
    assert not it.ledger.book.groups[0].headers
    await generator.ask(message, broker.Done, frames=[b"payload", b"mine"])
    worker = await it.client("reward_worker", "reward-worker-0")
    _, (transcript,) = await worker.ask(SCORING, broker.ScoringLeased)
    assert decode_transcript(transcript).prompt == it.ledger.book.groups[0].prompt
    transcript = decode_transcript(transcript)
    assert (transcript.response, transcript.num_response_tokens) == ("mine", RESPONSE_TOKENS)


async def test_a_worker_is_shown_what_the_policy_said_by_turn(it: Running):
    _, generator, group = await it.opened()
    sent = header(group.group_id, 0, V0, lease_id=group.lease_id)
    sent = replace(sent, turns=(Turn(2, 1), Turn(4, sent.num_tokens - 4)))
    message = broker.SubmitTrajectory(header=sent)
    for frames, why in (
        ([b"payload", b"text"], "needs 3 attached frames, got 2"),
        ([b"payload", b"text", encode(["one"])], "1 replies came with 2 turns"),
        ([b"payload", b"text", b"\xc1"], "not a valid list of texts"),
    ):
        with pytest.raises(RefusedError, match=why):
            await generator.ask(message, broker.Done, frames=frames)
    assert not it.ledger.book.groups[0].headers
    frames = [b"payload", b"text", encode(["one", "two"])]
    await generator.ask(message, broker.Done, frames=frames)
    worker = await it.client("reward_worker", "reward-worker-0")
    _, (transcript,) = await worker.ask(SCORING, broker.ScoringLeased)
    transcript = decode_transcript(transcript)
    assert (transcript.response, transcript.turns) == ("text", ("one", "two"))


async def test_answers_to_the_lease_of_another_are_refused(it: Running):
    generator = await it.client("generator", "generator-0")
    thief = await it.client("generator", "thief")
    group = await one_group(await it.client("learner", "learner"), generator)
    for lease_id in (group.lease_id, 999_999):
        sent = broker.SubmitTrajectory(header=header(group.group_id, 0, V0, lease_id=lease_id))
        with pytest.raises(RefusedError, match="group 0 was not leased to thief@"):
            await thief.ask(sent, broker.Done, frames=[b"payload", b"response"])
    assert not it.ledger.book.groups[0].headers
    await submit(generator, group.group_id, 0)
    assert dict(+it.server.telemetry.rejected) == {"refused": 2}


async def test_what_is_longer_than_the_settings_allow_is_refused(short_folder: Path):
    most = 2 + RESPONSE_TOKENS
    rules = make_rules(
        max_prompt_tokens=2,
        max_response_tokens={"train": RESPONSE_TOKENS},
        max_tokens={"train": most},
        max_turns=0,
    )
    async with running(short_folder, make_ledger(rules)) as it:
        _, generator, _ = await it.opened()
        fits = header(0, 0, V0)
        long = (
            (replace(fits, num_tokens=fits.num_tokens + 1), "a response of 5 tokens.*is 4"),
            (
                replace(fits, num_prompt_tokens=3, num_tokens=7, version_runs=(VersionRun(3, V0),)),
                "a prompt of 3 tokens.*sampling.max_prompt_tokens is 2",
            ),
            (
                replace(fits, num_tokens=200_004, turns=(Turn(2, 1), Turn(200_003, 1))),
                f"200004 tokens in group 0, context included.* {most} at most",
            ),
            (
                replace(fits, num_tokens=most, turns=(Turn(2, 1), Turn(4, 2))),
                r"2 turns in group 0.*no environment \(environment.function\)",
            ),
        )
        for sent, message in long:
            replies = [encode(["a", "b"])] if sent.turns else []
            with pytest.raises(RefusedError, match=message):
                await generator.ask(
                    broker.SubmitTrajectory(header=sent),
                    broker.Done,
                    frames=[b"payload", b"response", *replies],
                )
        await submit(generator, 0, 0)


async def test_texts_and_arrays_of_an_answer_have_no_more_bytes_than_its_tokens_can(
    short_folder: Path,
):
    turns = replace(header(0, 0, V0), num_tokens=9, turns=(Turn(2, 1), Turn(7, 2)))
    rules = make_rules(max_token_bytes=9)
    async with running(short_folder, make_ledger(rules)) as it:
        _, generator, _ = await it.opened()
        whole = header(0, 0, V0)
        text = 1_024 * (1 + whole.num_tokens)
        large: list[tuple[TrajectoryHeader, list[bytes], str]] = [
            (whole, [b"", b"x" * (text + 1)], f"a response of {text + 1} bytes.*{text} at most"),
            (whole, [b"x" * 1_079, b""], "a payload of 1079 bytes.*1078.*sampling.max_kept_tokens"),
            (turns, [b"", b"", encode(["x" * 9_000, ""])], "a text of turns of 9005 bytes"),
        ]
        for sent, frames, message in large:
            with pytest.raises(RefusedError, match=message):
                await generator.ask(
                    broker.SubmitTrajectory(header=sent), broker.Done, frames=frames
                )
        assert it.server.telemetry.rejected["refused"] == len(large)
        frames = [b"x" * 1_078, b"x" * text]
        await generator.ask(broker.SubmitTrajectory(header=whole), broker.Done, frames=frames)


async def test_parts_of_rewards_with_ever_new_names_are_summed_up(
    short_folder: Path, caplog: pytest.LogCaptureFixture
):
    ledger = make_ledger(make_rules(groups_per_step=MAX_PARTS_OF_RUN, drop_zero_variance=False))
    names = [f"{'x' * 40}{i}" for i in range(MAX_PARTS_OF_RUN + 10)]
    for first in range(0, len(names), 2):
        (group,) = lease(ledger, max_sequences=2)
        generate(ledger, group)
        for sibling in (0, 1):
            parts = {names[first + sibling]: 2.0, "known": 1.0}
            score = Score(group_id=group.group_id, sibling=sibling, lease_id=0, reward=0.5)
            ledger.score(replace(score, parts=parts))
    scores = [score for group in ledger.book.groups.values() for score in group.scores.values()]
    assert scores[-1].parts == {"known": 1.0, OTHER_PARTS: 2.0}
    assert len({name for score in scores for name in score.parts}) == MAX_PARTS_OF_RUN + 1
    async with running(short_folder, ledger) as it:
        assert it.status.queue["other_reward_parts"] == 11
    assert caplog.text.count("as many as a run may have") == 1
