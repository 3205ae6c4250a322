from pathlib import Path

import pytest

from slipstream.broker.server.keyring import KeyHolder
from slipstream.deploy.preflight.check.keys import judge_key, judge_keys
from slipstream.wire.files.keys import ClientKey
from slipstream.wire.messages.broker import Role

KEY = ClientKey(name="far", role="generator", public="p", secret="", broker="b")
KNOWN = [KeyHolder(name="far", role="generator", public="p")]


def test_a_key_must_be_of_a_role_of_its_host_and_known():
    assert judge_key(KEY, {"generator-0"}, KNOWN).outcome == "ok"
    wrong = judge_key(KEY, {"learner", "reward-worker-1"}, KNOWN)
    assert wrong.outcome == "fail"
    assert wrong.found.endswith("of the role generator, expected learner or reward_worker")
    assert judge_key(KEY, {"generator-0"}, []).outcome == "fail"
    other = [KeyHolder(name="far", role="generator", public="q")]
    assert judge_key(KEY, {"generator-0"}, other).outcome == "fail", "made again meanwhile"


@pytest.mark.parametrize(
    ("role", "name", "outcome"),
    [
        ("learner_part", "learner-1", "ok"),
        ("learner_part", "learner", "fail"),
        ("learner", "learner-1", "ok"),
    ],
)
def test_the_first_host_of_a_learner_alone_needs_a_learners_key(
    role: Role, name: str, outcome: str
):
    key = ClientKey(name="far", role=role, public="p", secret="", broker="b")
    assert judge_key(key, {name, "broker"}, None).outcome == outcome


def test_keys_of_a_broker_elsewhere_are_not_needed_here():
    seen = judge_key(KEY, {"generator-0"}, None)
    assert (seen.outcome, "not here" in seen.found) == ("ok", True)


def test_a_broker_that_knows_no_key_admits_nobody():
    assert judge_keys(Path("keys"), []).outcome == "warn"
    assert judge_keys(Path("keys"), KNOWN).found == "keys: far (generator)"
