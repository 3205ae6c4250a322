"""Commands of the relay, at an engine that pauses for a version."""

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from torch import Tensor

from slipstream.weightbus.agent.fetcher import BucketFetcher
from slipstream.weightbus.agent.staging import Staging
from slipstream.weightbus.agent.tensor_set import TensorSet
from slipstream.weightbus.agent.updates import EngineUpdates, Order
from slipstream.weightbus.version.disk import write_version
from slipstream.weightbus.version.engine_checksums import differing, digest_of, expected_checksums
from slipstream.wire.errors import EngineError
from slipstream.wire.messages.probe import ProbeLogprobs
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import (
    Abandon,
    Adopt,
    CommandOutcome,
    Commit,
    LoadBucket,
    Offer,
    Pause,
    ReceiveVersion,
    Verify,
)
from tests.support.bus.engine import BusEngine, random_tensors
from tests.support.bus.snapshots import CopiedSnapshot

_copies = itertools.count(1)
PROBE = ProbeLogprobs(sequences=((3, 5, 1),), logprobs=((-0.5, -2.0),), num_context=1)


class Agent:
    """An engine of plain tensors with its updates, and versions on disk."""

    def __init__(self, folder: Path, *, has_shadow: bool = False) -> None:
        tensors = version(0)
        self.failing = ""
        self.told: list[str] = []
        self.probes: list[ProbeLogprobs | None] = []
        self.engine = BusEngine(
            tensors,
            log=folder / "tokens",
            group_timeout_s=1.0,
            fault=self._fault,
            has_shadow=has_shadow,
        )
        self.staging = Staging(folder, "a")
        self.updates = EngineUpdates(
            self.engine,
            tensors=TensorSet({name: tuple(t.shape) for name, t in tensors.items()}, "float32"),
            staging=self.staging,
            on_pause=lambda: self.told.append("pause"),
            on_adopt=lambda version, _stood_s: self.told.append(f"adopt {version.label}"),
            on_probe=self._on_probe,
        )
        self._folder = folder

    def _on_probe(
        self, version: PolicyVersion, probe: ProbeLogprobs | None, _engines: Sequence[str]
    ) -> None:
        self.told.append(f"probe {version.label}")
        self.probes.append(probe)

    def _fault(self, step: str) -> None:
        if step == self.failing:
            raise EngineError(f"injected at {step}")

    def do(self, command: Order) -> CommandOutcome:
        fetcher: BucketFetcher = None  # type: ignore[assignment]  # nothing is fetched
        return asyncio.run(self.updates.execute(command, fetcher))

    def receive(
        self, step: int, tensors: dict[str, Tensor], *, is_checked: bool = False
    ) -> CommandOutcome:
        sent = CopiedSnapshot.of(PolicyVersion(1, step), tensors, bucket_bytes=50)
        manifest = sent.manifest()
        folder = write_version(
            self._folder, manifest, sent.memory.numpy().data, number=next(_copies)
        )
        return self.do(
            ReceiveVersion(command_id=2, manifest=manifest, path=str(folder), is_checked=is_checked)
        )

    def adopt(
        self, step: int, probe: ProbeLogprobs | None = None, *, expected: str = ""
    ) -> CommandOutcome:
        version = PolicyVersion(1, step)
        return self.do(Adopt(command_id=3, version=version, digest=expected, probe=probe))

    def adopted(self, step: int, tensors: dict[str, Tensor]) -> None:
        assert not self.receive(step, tensors).error
        outcome = self.adopt(step, expected=digest(tensors))
        assert not outcome.error
        assert not outcome.checksums


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(tmp_path)
    yield agent
    agent.engine.close()
    agent.staging.close()


@pytest.fixture
def shadowed(tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(tmp_path, has_shadow=True)
    yield agent
    agent.engine.close()
    agent.staging.close()


def version(seed: int) -> dict[str, Tensor]:
    return random_tensors(seed=seed, count=3, size=8)


def digest(tensors: dict[str, Tensor]) -> str:
    return digest_of(expected_checksums(tensors))


@pytest.mark.parametrize("is_checked", [False, True])
def test_the_engine_is_compared_with_the_digest_of_the_relay_or_of_what_was_received(
    agent: Agent, is_checked: bool
):
    newer = version(1)
    agent.receive(1, newer, is_checked=is_checked)
    outcome = agent.adopt(1, expected="" if is_checked else digest(newer))
    assert outcome.digest == digest(newer)
    assert not outcome.checksums
    assert outcome.phase_seconds.keys() == {"pause", "load", "verify", "commit"}
    assert agent.updates.adopted == PolicyVersion(1, 1)
    assert not agent.updates.is_paused
    assert not agent.staging.may_be_read
    assert agent.told == ["pause", "adopt v1.1", "probe v1.1"]
    assert agent.probes == [None]


def test_a_version_is_received_next_to_the_live_weights_and_the_pause_is_a_copy(shadowed: Agent):
    shadowed.adopted(0, version(0))
    received = shadowed.receive(1, version(1))
    assert received.phase_seconds.keys() == {"expect", "stage"}
    assert shadowed.engine.runs
    assert digest(shadowed.engine.tensors) == digest(version(0))
    assert not shadowed.staging.may_be_read, "the engine has read it all"
    assert shadowed.adopt(1, expected=digest(version(1))).phase_seconds.keys() == {"load"}
    assert digest(shadowed.engine.tensors) == digest(version(1))


def test_a_shadow_with_other_bytes_than_expected_never_becomes_live(shadowed: Agent):
    shadowed.adopted(0, version(0))
    shadowed.receive(1, version(1))
    outcome = shadowed.adopt(1, expected=digest(version(2)))
    assert digest_of(outcome.checksums) == digest(version(1))
    assert (shadowed.updates.adopted, shadowed.updates.is_paused) == (PolicyVersion(1, 0), False)
    shadowed.do(Abandon(command_id=4, reason="it differs"))
    assert shadowed.engine.runs
    assert digest(shadowed.engine.tensors) == digest(version(0))
    assert shadowed.updates.failures == ["it differs"]
    repaired = shadowed.receive(1, version(1))
    assert "stage" not in repaired.phase_seconds, "it goes into the live weights"
    assert not shadowed.adopt(1, expected=digest(version(1))).error
    shadowed.adopted(2, version(2))
    assert "stage" in shadowed.receive(3, version(3)).phase_seconds


def test_a_shadow_that_differs_makes_no_torn_engine_whole(shadowed: Agent):
    shadowed.adopted(0, version(0))
    shadowed.receive(1, version(1))
    shadowed.failing = "in_copy"
    assert shadowed.adopt(1, expected=digest(version(1))).error
    shadowed.failing = ""
    shadowed.receive(2, version(2))  # no failure is known yet
    outcome = shadowed.adopt(2, expected=digest(version(3)))
    assert outcome.checksums
    assert (shadowed.updates.adopted, shadowed.updates.is_paused) == (None, True)
    assert not shadowed.engine.runs
    shadowed.do(Abandon(command_id=4, reason="it differs"))
    assert not shadowed.engine.runs, "it is a mixture"


def test_a_load_that_fails_next_to_the_live_weights_pauses_nothing(shadowed: Agent):
    shadowed.adopted(0, version(0))
    shadowed.told.clear()
    shadowed.failing = "in_stage"
    assert shadowed.receive(1, version(1)).error == "injected at in_stage"
    assert shadowed.adopt(1).error
    shadowed.do(Abandon(command_id=4, reason="it failed"))
    assert (shadowed.updates.adopted, shadowed.told) == (PolicyVersion(1, 0), [])
    assert shadowed.staging.may_be_read, "another rank may still read it"
    shadowed.failing = ""
    shadowed.adopted(1, version(1))


def test_the_probe_of_an_adopted_version_is_handed_on(agent: Agent):
    agent.receive(1, version(1))
    assert not agent.adopt(1, PROBE).error
    assert agent.told == ["pause", "adopt v1.1", "probe v1.1"]
    assert agent.probes == [PROBE]


def test_the_probe_of_a_version_that_is_not_adopted_is_not_handed_on(agent: Agent):
    agent.adopted(1, version(1))
    agent.receive(2, version(2))
    agent.engine.loads_wrongly = "model.layers.1.norm.weight"
    assert agent.adopt(2, PROBE, expected=digest(version(2))).checksums
    agent.do(Abandon(command_id=4, reason="it differs"))
    assert agent.probes == [None]


@pytest.mark.parametrize("is_checked", [False, True])
def test_an_engine_with_a_tensor_that_differs_stays_paused(agent: Agent, is_checked: bool):
    agent.adopted(1, version(1))
    newer, name = version(2), "model.layers.1.norm.weight"
    agent.receive(2, newer, is_checked=is_checked)
    agent.engine.loads_wrongly = name
    outcome = agent.adopt(2, expected="" if is_checked else digest(newer))
    if is_checked:
        assert outcome.error == f"1 tensors differ in the engine: ['{name}']"
    else:
        assert differing(expected_checksums(newer), outcome.checksums) == [name]
    assert not outcome.digest
    agent.do(Abandon(command_id=4, reason="it differs"))
    assert agent.updates.is_paused
    assert agent.updates.adopted is None
    assert not agent.engine.runs
    agent.engine.loads_wrongly = ""
    agent.adopted(2, newer)
    assert agent.engine.runs


@pytest.mark.parametrize("step", ["pause", "before_folder", "in_folder", "checksums", "label"])
def test_an_engine_that_fails_in_an_adoption_is_not_resumed_until_it_has_a_whole_version(
    agent: Agent, step: str
):
    agent.adopted(1, version(1))
    agent.receive(2, version(2))
    agent.failing = step
    assert f"injected at {step}" in agent.adopt(2, expected=digest(version(2))).error
    assert agent.staging.may_be_read, "it may not have ended"
    agent.failing = ""
    agent.do(Abandon(command_id=4, reason="it failed"))
    assert agent.updates.adopted is None
    assert agent.updates.failures == ["it failed"]
    assert not agent.engine.runs or step == "pause"  # then it runs what it had
    agent.adopted(2, version(2))
    assert agent.updates.failures == []


def test_without_a_check_nothing_is_computed(agent: Agent):
    agent.receive(1, version(1))
    agent.engine.loads_wrongly = "model.layers.1.norm.weight"
    outcome = agent.adopt(1)
    assert (outcome.error, outcome.digest) == ("", "")


def test_only_what_was_received_is_adopted(agent: Agent):
    assert "v1.1 was not received" in agent.adopt(1).error
    agent.receive(1, version(1))
    assert "v1.2 was not received" in agent.adopt(2).error
    assert not agent.told


def test_an_older_version_is_refused(agent: Agent):
    agent.adopted(2, version(2))
    assert agent.receive(1, version(1)).error == "refused v1.1: this engine ran v1.2"
    assert "v1.1 was not received" in agent.adopt(1).error
    assert agent.updates.adopted == PolicyVersion(1, 2)


def collective(agent: Agent, step: int) -> None:
    """Bring an engine to where all buckets are in."""
    sent = CopiedSnapshot.of(PolicyVersion(1, step), version(step), bucket_bytes=500)
    assert not agent.do(Offer(command_id=1, manifest=sent.manifest())).error
    agent.updates._group = "g"
    assert not agent.do(Pause(command_id=2)).error
    agent.engine.arrives = {name: tensor.clone() for name, tensor in sent.tensors.items()}
    assert not agent.do(LoadBucket(command_id=3, index=0, group_name="g")).error


def commit(agent: Agent, step: int, digest: str) -> CommandOutcome:
    return agent.do(
        Commit(command_id=4, version=PolicyVersion(1, step), digest=digest, probe=PROBE)
    )


def test_commit_compares_with_the_digest_that_it_brings(agent: Agent):
    collective(agent, 1)
    wanted = digest(version(1))
    assert commit(agent, 1, wanted) == CommandOutcome(command_id=4, digest=wanted)
    assert agent.told == ["pause", "adopt v1.1", "probe v1.1"]
    assert agent.probes == [PROBE]
    assert agent.engine.runs
    assert agent.updates.adopted == PolicyVersion(1, 1)


def test_commit_with_another_digest_leaves_the_engine_paused_and_names_its_checksums(agent: Agent):
    collective(agent, 1)
    outcome = commit(agent, 1, "d" * 32)
    assert outcome.checksums == expected_checksums(version(1))
    assert agent.probes == []
    assert agent.updates.adopted is None
    assert agent.updates.is_paused
    assert not agent.engine.runs
    agent.adopted(1, version(1))


def test_commit_after_a_verify_compares_nothing_again(agent: Agent):
    collective(agent, 1)
    assert agent.do(Verify(command_id=5)).digest == digest(version(1))
    assert commit(agent, 1, "") == CommandOutcome(command_id=4)
    assert agent.engine.runs


def test_an_update_is_opened_again_in_a_group_that_was_made_anew(agent: Agent):
    collective(agent, 1)
    commit(agent, 1, "")
    manifest = CopiedSnapshot.of(PolicyVersion(1, 2), version(2), bucket_bytes=500)
    agent.do(Offer(command_id=1, manifest=manifest.manifest()))
    agent.do(Pause(command_id=2))
    asyncio.run(agent.updates._leave_group())
    agent.updates._group = "h"
    agent.engine.arrives = dict(manifest.tensors)
    assert not agent.do(LoadBucket(command_id=3, index=0, group_name="h")).error
    assert not commit(agent, 2, digest(version(2))).checksums


def test_nothing_is_committed_that_was_not_loaded(agent: Agent):
    collective(agent, 1)
    assert commit(agent, 2, "").error == "v1.2 was not loaded"


def test_checksums_are_sent_where_the_relay_asks_for_them(agent: Agent):
    found = agent.do(Verify(command_id=5)).digest  # after a collective nothing was received
    every = agent.do(Verify(command_id=6, wants="checksums")).checksums
    assert every == expected_checksums(agent.engine.tensors)
    assert found == digest_of(every)
