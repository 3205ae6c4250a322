"""Keys: made for a host and a role, private to their owner, gone when revoked."""

import os
from pathlib import Path

import pytest

from slipstream.broker.server.keyring import KeyRing, broker_key, holders, make_client_key, revoke
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.keys import read_client_key


def test_key_is_made_once_per_name_and_records_its_role(tmp_path: Path):
    path = make_client_key(tmp_path, "gpu7", "generator")
    key = read_client_key(path)
    assert (key.name, key.role) == ("gpu7", "generator")
    assert key.broker.encode() == broker_key(tmp_path).public
    holder = KeyRing(tmp_path).holder(key.public)
    assert holder is not None
    assert (holder.name, holder.role) == ("gpu7", "generator")
    with pytest.raises(ConfigError, match="there is a key gpu7 already"):
        make_client_key(tmp_path, "gpu7", "learner")


def test_secrets_are_readable_by_their_owner_only(tmp_path: Path):
    make_client_key(tmp_path, "gpu7", "generator")
    for path in [*tmp_path.rglob("*.key"), *tmp_path.rglob("*.toml")]:
        assert path.stat().st_mode & 0o077 == 0, path
    assert (tmp_path / "clients").stat().st_mode & 0o077 == 0


def test_a_key_that_others_can_read_is_refused_with_the_way_out(tmp_path: Path):
    path = make_client_key(tmp_path, "gpu7", "generator")
    path.chmod(0o640)
    with pytest.raises(
        ConfigError, match=r"gpu7\.key \(run\.key_file\) can be read by others.*chmod"
    ):
        read_client_key(path)


@pytest.mark.parametrize("text", ["", "name = 3", 'name = "a"\nrole = "king"', "\x00"])
def test_a_file_that_is_no_key_is_named(tmp_path: Path, text: str):
    path = tmp_path / "x.key"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=r"x\.key \(run\.key_file\) is no key file"):
        read_client_key(path)


def test_a_ring_notices_keys_that_are_made_and_revoked_while_it_is_used(tmp_path: Path):
    ring = KeyRing(tmp_path)
    public = read_client_key(make_client_key(tmp_path, "a", "reward_worker")).public
    assert ring.holder(public) is None
    assert ring.refresh() == []
    assert ring.holder(public) is not None
    revoke(tmp_path, "a")
    assert [holder.name for holder in ring.refresh()] == ["a"]
    assert ring.holder(public) is None
    assert [holder.name for holder in holders(tmp_path, "revoked")] == ["a"]
    assert not (tmp_path / "clients" / "a.key").exists()
    with pytest.raises(ConfigError, match="there is no key a"):
        revoke(tmp_path, "a")


@pytest.mark.parametrize("name", ["", "../a", ".hidden", "a\nb", 'a"b', "a/b", "x" * 70])
def test_a_name_that_is_none_for_a_file_is_refused(tmp_path: Path, name: str):
    with pytest.raises(ConfigError, match="cannot be the name of a key"):
        make_client_key(tmp_path, name, "generator")


def test_one_bad_key_file_does_not_lock_out_other_keys(tmp_path: Path):
    ring = KeyRing(tmp_path)
    public = read_client_key(make_client_key(tmp_path, "good", "generator")).public
    (tmp_path / "authorized" / "bad.toml").write_bytes(b"\xff\xfe")
    (tmp_path / "authorized" / "worse.toml").write_text("name = ")
    assert ring.refresh() == []
    assert ring.holder(public) is not None
    assert KeyRing(tmp_path).holder(public) is not None


def test_a_revocation_right_after_another_change_is_noticed(tmp_path: Path):
    """Two changes within one tick of the file system's clock."""
    ring = KeyRing(tmp_path)
    keys = [read_client_key(make_client_key(tmp_path, name, "generator")) for name in "abc"]
    ring.refresh()
    folder = tmp_path / "authorized"
    before = folder.stat()
    revoke(tmp_path, "a")
    os.utime(folder, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert [holder.name for holder in ring.refresh()] == ["a"]
    revoke(tmp_path, "b")
    os.utime(folder, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert [holder.name for holder in ring.refresh()] == ["b"]
    assert ring.holder(keys[2].public) is not None


def test_the_brokers_key_is_made_once_and_the_folder_of_a_user_stays_as_it_is(tmp_path: Path):
    tmp_path.chmod(0o755)
    first = broker_key(tmp_path)
    assert broker_key(tmp_path) == first
    assert tmp_path.stat().st_mode & 0o777 == 0o755
    assert [path.name for path in tmp_path.iterdir()] == ["broker.key"]


def test_a_secret_does_not_show_in_what_is_printed(tmp_path: Path):
    key = read_client_key(make_client_key(tmp_path, "a", "generator"))
    assert key.secret not in repr(key)
    own = broker_key(tmp_path)
    assert own.secret.decode() not in repr(own)


def test_only_a_generators_key_is_revoked_with_what_it_delivered(tmp_path: Path):
    make_client_key(tmp_path, "gpu7", "generator")
    make_client_key(tmp_path, "judge", "reward_worker")
    ring = KeyRing(tmp_path)
    with pytest.raises(ConfigError, match="--discard drops answers, and judge is the key of a rew"):
        revoke(tmp_path, "judge", discard=True)
    assert len(holders(tmp_path)) == 2
    revoke(tmp_path, "gpu7", discard=True)
    ring.refresh()
    assert ring.discarded == {"gpu7"}
    assert KeyRing(tmp_path).discarded == {"gpu7"}, "a broker that was away drops them, too"
    make_client_key(tmp_path, "gpu7", "generator")  # another key of that name
    ring.refresh()
    assert ring.discarded == set()
