import pytest

from slipstream.generators.sglang.adapter_versions import AdapterVersions
from slipstream.wire.messages.versions import PolicyVersion

V = [PolicyVersion(1, step) for step in range(6)]


def adopted(kept: int, count: int) -> AdapterVersions:
    versions = AdapterVersions(kept)
    for version in V[:count]:
        versions.load(version)
        versions.adopt(version)
    return versions


def test_new_requests_use_the_version_that_was_adopted_last():
    versions = AdapterVersions(2)
    assert versions.newest is None
    versions.load(V[0])
    assert versions.newest is None
    versions.adopt(V[0])
    versions.load(V[1])
    assert versions.newest == V[0]
    versions.adopt(V[1])
    assert versions.newest == V[1]
    with pytest.raises(ValueError, match=r"v1\.2 is not loaded"):
        versions.adopt(V[2])


def test_the_newest_ones_stay_and_older_ones_go():
    assert adopted(3, 3).unneeded() == []
    versions = adopted(3, 5)
    assert versions.unneeded() == [V[0], V[1]]
    versions.drop(V[0])
    assert versions.unneeded() == [V[1]]
    assert versions.loaded == (V[1], V[2], V[3], V[4])
    assert versions.staying == (V[2], V[3], V[4])
    versions.load(V[5])
    assert versions.staying == (V[2], V[3], V[4], V[5]), "it was not adopted yet"


def test_a_version_stays_while_an_answer_uses_it():
    versions = adopted(1, 1)
    with versions.used(V[0], 2):
        for version in V[1:4]:
            versions.load(version)
            versions.adopt(version)
        assert versions.unneeded() == [V[1], V[2]]
    assert versions.unneeded() == [V[0], V[1], V[2]]


def test_a_version_is_used_no_more_when_its_request_fails():
    versions = adopted(1, 2)

    def fail() -> None:
        with versions.used(V[0], 1):
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert versions.unneeded() == [V[0]]


def test_a_version_that_is_loaded_and_not_adopted_is_for_nobody_to_remove():
    versions = adopted(1, 1)
    versions.load(V[1])
    assert versions.unneeded() == []
    versions.drop(V[1])
    assert versions.loaded == (V[0],)
    assert versions.newest == V[0]


def test_a_version_that_is_adopted_again_is_the_newest():
    versions = adopted(2, 3)
    versions.adopt(V[0])
    assert versions.newest == V[0]
    assert versions.unneeded() == [V[1]]
