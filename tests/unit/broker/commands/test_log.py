"""What a command log promises and refuses, one rule at a time."""

import resource
import sqlite3
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from slipstream.broker.commands.log import GRACE_S, MOST_LIVES, Ask, CommandLog, SaveDetails
from slipstream.broker.commands.refusals import RequestRefusedError
from slipstream.wire.messages.codec import encode
from slipstream.wire.messages.commands import (
    CommandFailed,
    Losses,
    Made,
    Sample,
    Sampled,
    SampledAnswer,
    Saved,
)
from slipstream.wire.settings.serve import ServeSection
from tests.support.command_log import SPEC, ask, open_log, open_model

LOSSES = Losses(logprobs=(), widths=(), metrics={"loss:sum": 1.0})
SAMPLE = Sample(version="", tokens=b"\0\0\0\0", count=1, max_tokens=1)


def sampler_of(log: CommandLog, name: str = "q", tenant: str = "alice") -> None:
    log.open_session(tenant, f"s-{tenant}", "key", b"", now=0.0)
    log.open_sampler(tenant, f"s-{tenant}", name, "", now=0.0)


def sample(number: int, name: str = "q", tenant: str = "alice", body: Sample = SAMPLE) -> Ask:
    data = encode(body)
    return Ask(tenant, name, number, "sample", data, data)


def answered(version: str = "") -> Sampled:
    answer = SampledAnswer(tokens=b"\1\0\0\0", logprobs=b"\0\0\0\0", finish="stop")
    return Sampled(version=version, answers=(answer,))


def refused(status: int, call: object, *arguments: object, **named: object) -> str:
    with pytest.raises(RequestRefusedError) as caught:
        call(*arguments, **named)  # type: ignore[operator]
    assert caught.value.status == status
    return str(caught.value)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (ServeSection(max_commands=2), "serve.max_commands"),
        (ServeSection(max_bytes=160), "serve.max_bytes"),
    ],
)
def test_a_tenant_that_fills_its_quota_waits_and_others_do_not(limits: ServeSection, message: str):
    log = open_log(":memory:", limits=limits)
    open_model(log)
    log.accept(ask("m", 1, "forward"), now=1.0)
    assert message in refused(429, log.accept, ask("m", 2, "forward"), now=1.0)
    open_model(log, "n", "bob")
    assert log.accept(ask("n", 1, "forward", tenant="bob"), now=1.0) == "n:1"
    assert log.accept(ask("m", 1, "forward"), now=1.0) == "m:1", "a repetition costs nothing"
    log.report("m", 0, Made(), applied=0, now=2.0)
    log.report("m", 1, LOSSES, applied=0, now=2.0)
    log.fetched("alice", ["m:0", "m:1"], now=3.0)
    assert log.accept(ask("m", 2, "forward"), now=4.0) == "m:2"


def test_models_checkpoints_and_samples_have_quotas():
    limits = ServeSection(max_models=1, max_checkpoints=1, max_samples=1)
    log = open_log(":memory:", limits=limits)
    open_model(log)
    second = ask("m2", 0, "create")
    assert "serve.max_models" in refused(429, log.make_model, second, "s-alice", SPEC, now=0.0)
    log.accept(ask("m", 1, "save", path="tinker://m/weights/a"), now=0.0)
    more = ask("m", 2, "save", path="tinker://m/weights/b")
    assert "serve.max_checkpoints" in refused(429, log.accept, more, now=0.0)
    sampler_of(log)
    log.accept(sample(0), now=0.0)
    assert "serve.max_samples" in refused(429, log.accept, sample(1), now=0.0)
    log.unload("alice", "m", now=0.0)
    assert log.make_model(second, "s-alice", SPEC, now=0.0) == "m2:0"


def test_a_result_is_kept_until_it_is_fetched_and_a_while_longer():
    log = open_log(":memory:", limits=ServeSection(keep_s=10 * GRACE_S))
    open_model(log)
    log.accept(ask("m", 1, "forward"), now=0.0)
    for number in (0, 1):
        log.report("m", number, LOSSES, applied=0, now=1.0)
    log.fetched("alice", ["m:0"], now=2.0)
    log.expire(now=GRACE_S)
    assert log.future("alice", "m:0").outcome == LOSSES, "its answer may not have arrived"
    log.expire(now=GRACE_S + 3)
    assert log.future("alice", "m:0").outcome is None
    assert "was fetched more than" in log.future("alice", "m:0").expired
    assert log.future("alice", "m:1").outcome == LOSSES
    log.expire(now=10 * GRACE_S + 2)
    assert "was not fetched for 6000 s (serve.keep_s)" in log.future("alice", "m:1").expired
    assert log.accept(ask("m", 1, "forward"), now=1e4) == "m:1", "it is not carried out again"
    assert log.next_command({"m": 0}, now=1e4) is not None
    found = log.next_command({"m": 0}, now=1e4)
    assert found is not None
    assert found.what == "passed"


def test_a_session_without_a_sign_of_life_ends_with_its_models():
    log = open_log(":memory:", limits=ServeSection(session_s=100.0))
    open_model(log)
    log.accept(ask("m", 2, "step"), now=0.0)  # number 1 never comes
    log.touch("alice", "s-alice", now=50.0)
    assert not log.expire(now=149.0)
    assert log.expire(now=151.0)
    outcome = log.future("alice", "m:2").outcome
    assert isinstance(outcome, CommandFailed)
    assert "gave no sign of life for 100 s" in outcome.reason
    assert "has ended" in refused(410, log.touch, "alice", "s-alice", now=152.0)
    assert "has ended" in refused(410, log.accept, ask("m", 1, "step"), now=152.0)
    assert log.live_models == ()


def test_a_model_whose_state_was_lost_ends():
    log = open_log(":memory:")
    open_model(log)
    log.accept(ask("m", 1, "step"), now=0.0)
    log.accept(ask("m", 2, "step"), now=0.0)
    log.report("m", 0, Made(), applied=0, now=1.0)
    log.report("m", 1, Made(), applied=1, now=1.0)
    assert log.next_command({"m": 0}, now=2.0) is None
    outcome = log.future("alice", "m:2").outcome
    assert isinstance(outcome, CommandFailed)
    assert "lost its state" in outcome.reason


def test_a_model_whose_command_ends_every_learner_ends_alone():
    log = open_log(":memory:")
    open_model(log)
    open_model(log, "n", "bob")
    at = {"m": -1, "n": 0}
    for life in range(MOST_LIVES):
        assert log.next_command(at, life=str(life), now=0.0) is not None
        assert log.next_command(at, life=str(life), now=0.0) is not None, "asked again"
    assert log.next_command(at, life="one more", now=1.0) is None
    outcome = log.future("alice", "m:0").outcome
    assert isinstance(outcome, CommandFailed)
    assert "ended 8 times while it carried out 0" in outcome.reason
    assert log.live_models == ("n",)


def test_learners_that_end_by_other_commands_do_not_end_a_model():
    log = open_log(":memory:")
    open_model(log)
    log.accept(ask("m", 1, "backward"), now=0.0)
    for number in (0, 1):
        log.report("m", number, LOSSES, applied=0, now=1.0)
    for life in range(2 * MOST_LIVES):
        found = log.next_command({"m": 0}, life=str(life), now=2.0)
        assert found is not None
        assert found.what == "again"
        assert log.next_command({"m": 1}, life=str(life), now=2.0) is None, "it was carried out"
    assert log.live_models == ("m",)


def test_a_model_ends_whose_results_were_never_fetched():
    log = open_log(":memory:", limits=ServeSection(keep_s=10.0, session_s=100.0))
    open_model(log)
    log.accept(ask("m", 1, "backward"), now=0.0)
    for number in (0, 1):
        log.report("m", number, LOSSES, applied=0, now=1.0)
    log.expire(now=50.0)
    assert log.expire(now=200.0), "its session has ended"
    assert log.live_models == ()


def test_a_full_disk_is_survived(tmp_path: Path):
    path = tmp_path / "commands.db"
    log = open_log(path)
    open_model(log)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    body = encode(Losses(logprobs=(bytes(1 << 20),), widths=(1,), metrics={}))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, hard))
    try:
        with pytest.raises(sqlite3.OperationalError):
            log.accept(Ask("alice", "m", 1, "forward", b"1", body), now=0.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert log.accept(ask("m", 1, "forward"), now=0.0) == "m:1"


def test_a_log_is_of_one_base_model(tmp_path: Path):
    path = tmp_path / "commands.db"
    log = open_log(path)
    assert log.base_model("m") == "m"
    log.close()
    assert open_log(path).base_model("another") == "m"


def test_tenants_are_served_in_turns():
    log = open_log(":memory:")
    for tenant in ("alice", "bob"):
        open_model(log, f"m-{tenant}", tenant)
        for number in range(1, 4):
            log.accept(ask(f"m-{tenant}", number, "forward", tenant=tenant), now=0.0)
    open_model(log, "m2-alice")
    at: dict[str, int] = {}
    served = []
    for _ in range(6):
        found = log.next_command(at, now=0.0)
        assert found is not None
        at[found.model] = found.number
        served.append(found.model.rpartition("-")[2])
    assert served.count("alice") == 3
    assert at["m2-alice"] == 0, "and a tenant's models"
    assert all(one != other for one, other in pairwise(served))


def test_samples_go_to_who_asks_and_count_once():
    log = open_log(":memory:")
    sampler_of(log)
    sampler_of(log, "b", "bob")
    for number in range(3):
        log.accept(sample(number), now=0.0)
    log.accept(sample(0, "b", "bob"), now=0.0)
    assert [name for name, _ in log.waiting_samples((), 2)] == ["q:0", "b:0"], "in turns"
    assert [name for name, _ in log.waiting_samples(["q:0", "b:0"], 9)] == ["q:1", "q:2"]
    log.report_sample("q:0", answered(), now=1.0)
    log.report_sample("q:0", CommandFailed(reason="late", category="server"), now=2.0)
    assert log.future("alice", "q:0").outcome == answered()
    with pytest.raises(ValueError, match="is of ab, not of "):
        log.report_sample("q:1", answered("ab"), now=2.0)
    log.cancel("alice", "q:1", now=3.0)
    log.cancel("alice", "b:0", now=3.0)
    assert [name for name, _ in log.waiting_samples((), 9)] == ["b:0", "q:2"]
    done = log.completions("alice", "q", 0, 0, block=1000)
    assert [(name, failed) for _, name, failed, _ in done] == [("q:0", False), ("q:1", True)]
    assert log.completions("alice", "q", 0, done[-1][0], block=1000) == []
    assert log.completions("alice", "q", 1, 0, block=1000) == [], "of another copy"


def test_a_tenant_with_many_samples_waits_for_another_even_on_one_lane():
    log = open_log(":memory:")
    sampler_of(log)
    sampler_of(log, "b", "bob")
    for number in range(4):
        log.accept(sample(number), now=0.0)
    for number in range(2):
        log.accept(sample(number, "b", "bob"), now=0.0)
    served = []
    for _ in range(4):
        ((name, _),) = log.waiting_samples((), 1)
        served.append(name)
        log.report_sample(name, answered(), now=1.0)
    assert served == ["q:0", "b:0", "q:1", "b:1"]


def test_there_is_room_for_answers_and_not_for_as_many_samples():
    log = open_log(":memory:")
    sampler_of(log)
    for number in range(4):
        log.accept(sample(number, body=msgspec.structs.replace(SAMPLE, count=3)), now=0.0)
    assert [name for name, _ in log.waiting_samples((), 6)] == ["q:0", "q:1"]
    assert [name for name, _ in log.waiting_samples((), 1)] == ["q:0"], "one alone may have more"
    assert log.waiting_samples((), 0) == []


def test_versions_without_a_name_go_when_others_were_sampled_from_later():
    log = open_log(":memory:", limits=ServeSection(max_checkpoints=2))
    open_model(log)
    log.report("m", 0, Made(), applied=0, now=1.0)
    body = ask("m", 1, "save").body

    def save(number: int, details: SaveDetails) -> None:
        log.accept(Ask("alice", "m", number, "save", bytes([number]), body, details), now=1.0)
        log.report("m", number, Saved(digest=f"d{number}", num_bytes=7), applied=0, now=number)

    path = "tinker://m/sampler_weights/kept"
    save(1, SaveDetails(path=path, kind="sampler"))
    log.open_sampler("alice", "s-alice", "kept", path, now=1.0)
    for number in (2, 3):
        save(number, SaveDetails(kind="sampler", sampler=f"q{number}"))
    log.accept(sample(0, "q2"), now=4.0)
    save(5, SaveDetails(kind="sampler", sampler="q5"))
    assert log.used_digests() == {"d1", "d2", "d5"}
    assert "serve.max_checkpoints" in refused(410, log.accept, sample(0, "q3"), now=6.0)


def test_saved_weights_have_a_path_until_it_is_deleted_or_expires():
    log = open_log(":memory:")
    open_model(log)
    saving = ask("m", 1, "save", path="tinker://m/weights/a")
    brief = SaveDetails(path="tinker://m/sampler_weights/b", kind="sampler", ttl_s=3600.0)
    log.accept(saving, now=0.0)
    log.accept(Ask("alice", "m", 2, "save", b"2", saving.body, brief), now=0.0)
    alone = SaveDetails(kind="sampler", sampler="q")
    log.accept(Ask("alice", "m", 3, "save", b"3", saving.body, alone), now=0.0)
    for number, digest in enumerate(("", "aa", "bb", "cc")):
        done = Saved(digest=digest, num_bytes=7) if number else Made()
        log.report("m", number, done, applied=0, now=1.0)
    row, spec = log.checkpoint("alice", "tinker://m/weights/a", "training", now=2.0)
    assert (row["digest"], row["size"], spec) == ("aa", 7, SPEC)
    refused(404, log.checkpoint, "bob", "tinker://m/weights/a", now=2.0)
    refused(400, log.checkpoint, "alice", "tinker://m/weights/a", "sampler", now=2.0)
    log.open_sampler("alice", "s-alice", "q2", "tinker://m/sampler_weights/b", now=2.0)
    assert log.sampler("alice", "q")["version"] == "cc"
    assert log.used_digests() == {"aa", "bb", "cc"}
    log.delete_checkpoint("alice", "tinker://m/weights/a", now=2.0)
    refused(404, log.checkpoint, "alice", "tinker://m/sampler_weights/b", now=4000.0)
    log.expire(now=4000.0)
    assert log.used_digests() == {"bb", "cc"}, "samplers have versions of their own"
    log.end_session("alice", "s-alice", "done", now=4001.0)
    assert log.used_digests() == set()


def test_a_checkpoint_is_not_overwritten_unless_that_is_asked_for():
    log = open_log(":memory:")
    open_model(log)
    body = ask("m", 1, "save").body
    once = SaveDetails(path="tinker://m/weights/a", kind="training", overwrite=False)
    log.accept(Ask("alice", "m", 1, "save", b"1", body, once), now=0.0)
    log.report("m", 0, Made(), applied=0, now=1.0)
    log.report("m", 1, Saved(digest="aa", num_bytes=7), applied=0, now=1.0)
    assert log.accept(Ask("alice", "m", 1, "save", b"1", body, once), now=2.0) == "m:1"
    again = Ask("alice", "m", 2, "save", b"2", body, once)
    assert "is there already" in refused(400, log.accept, again, now=2.0)
    assert isinstance(log.future("alice", "m:2").outcome, CommandFailed), "its number is used up"
    over = SaveDetails(path="tinker://m/weights/a", kind="training")
    assert log.accept(Ask("alice", "m", 3, "save", b"3", body, over), now=2.0) == "m:3"


def test_a_session_is_opened_once_for_each_key(tmp_path: Path):
    path = tmp_path / "commands.db"
    log = open_log(path)
    assert log.open_session("alice", "s1", "k", b"{}", now=0.0) == "s1"
    log.close()
    log = open_log(path)
    assert log.open_session("alice", "s2", "k", b"{}", now=1.0) == "s1"
    assert log.open_session("bob", "s3", "k", b"{}", now=1.0) == "s3"
    refused(404, log.touch, "bob", "s1", now=2.0)
