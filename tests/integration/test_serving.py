"""The unmodified SDK against a real server, learner and SGLang engine, killed in the middle."""

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.served_tenants import Served, serving

pytest.importorskip("tinker")

pytestmark = pytest.mark.integration
TOLERANCE = 1e-4  # of float32 logprobs; other weights are off by a nat
SAID = {
    "rank": "BadRequestError.*from 1 to 8 here",
    "base": "BadRequestError.*is not served",
    "loss": "BadRequestError.*reduction of its loss",
    "shape": "BadRequestError.*must have the shape of target_tokens",
    "adam": "BadRequestError.*adam_params",
    "rate": "BadRequestError.*learning_rate",
    "load": "NotFoundError.*there are no weights",
    "infinite": "RequestFailedError.*the loss is not finite",
    "next": "True",
    "other's": "NotFoundError.*there are no weights",
    "other's state": "NotFoundError.*there are no weights",
    "damaged": "RequestFailedError.*is damaged or gone",
    "key": "AuthenticationError.*no such key",
    "base version": "base",
    "listed": "sampler_weights/mine weights/state",
    "left": "weights/state",
    "run": "4 weights/state",
}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with (
        tempfile.TemporaryDirectory(prefix="sp-", dir="/tmp") as name,
        serving(Path(name), "server", "learner", "engine", serve={"adapters": 2}) as running,
    ):
        yield running


def test_a_loop_of_the_sdk_ends_as_if_nothing_had_died(served: Served):
    killed = served.play("loop", key=served.key("alice"), kills=True)
    alone = served.play("loop", key=served.key("bob"), kills=False)
    for found in (killed, alone):
        for answer, replayed in zip(found["logprobs"], found["replayed"], strict=True):
            assert replayed == pytest.approx(answer, abs=TOLERANCE)
        *_, last = found["replayed"]
        assert found["scored"][0] is None
        assert found["scored"][-len(last) :] == pytest.approx(last, abs=TOLERANCE)
        with_optimizer, without = map(served.version_of, found["loaded"])
        assert with_optimizer == found["version"], "to the bit"
        assert without != found["version"]
    assert killed["version"] == alone["version"], "to the bit"
    assert (killed["seen"], killed["tokens"]) == (alone["seen"], alone["tokens"])


def test_what_a_client_does_wrong_is_said_and_the_next_command_is_carried_out(served: Served):
    said = served.play(
        "refusals",
        key=served.key("carol"),
        other_key=served.key("dave"),
        weights=str(served.folder / "s" / "serve" / "weights"),
    )
    assert said.keys() == SAID.keys()
    for what, pattern in SAID.items():
        assert re.search(pattern, said[what]), (what, said[what])
