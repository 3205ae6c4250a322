from pathlib import Path

from slipstream.broker.server.keyring import Holder
from slipstream.deploy.check.keys import judge_key, judge_keys
from slipstream.wire.files.keys import ClientKey

KEY = ClientKey(name="far", role="generator", public="p", secret="", broker="b")
KNOWN = [Holder(name="far", role="generator", public="p")]


def test_a_key_must_be_of_a_role_of_its_host_and_known():
    assert judge_key(KEY, {"generator"}, KNOWN).outcome == "ok"
    wrong = judge_key(KEY, {"learner", "reward-worker"}, KNOWN)
    assert wrong.outcome == "fail"
    assert wrong.found.endswith("of the role generator, expected learner or reward_worker")
    assert judge_key(KEY, {"generator"}, []).outcome == "fail"
    other = [Holder(name="far", role="generator", public="q")]
    assert judge_key(KEY, {"generator"}, other).outcome == "fail", "made again meanwhile"


def test_keys_of_a_broker_elsewhere_are_not_needed_here():
    seen = judge_key(KEY, {"generator"}, None)
    assert (seen.outcome, "not here" in seen.found) == ("ok", True)


def test_a_broker_that_knows_no_key_admits_nobody():
    assert judge_keys(Path("keys"), []).outcome == "warn"
    assert judge_keys(Path("keys"), KNOWN).found == "keys: far (generator)"
