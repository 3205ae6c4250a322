"""The key that the hosts of a learner share through the run folder."""

import errno
import os
import socket
from pathlib import Path

import pytest

from slipstream.learner.nodes.membership import is_listened_at, new_key, newest_key, shown_key
from slipstream.wire.errors import ConfigError
from slipstream.wire.settings.rendezvous import Address


def test_a_key_is_shown_to_the_owner_alone_while_node_0_leads(tmp_path: Path):
    file = tmp_path / "runs" / "a" / "hosts" / "key"
    assert newest_key(file) is None
    key = new_key()
    with shown_key(file, key):
        assert newest_key(file) == key
        assert file.stat().st_mode & 0o777 == 0o600
        assert file.parent.stat().st_mode & 0o777 == 0o700
    assert newest_key(file) is None


def test_the_key_of_a_later_node_0_stays(tmp_path: Path):
    file, later = tmp_path / "key", new_key()
    with shown_key(file, new_key()), shown_key(file, later):
        assert newest_key(file) == later
    later_still = new_key()
    with shown_key(file, new_key()):
        file.unlink()
        with shown_key(file, later_still):
            pass
    assert newest_key(file) is None


def test_a_key_that_others_can_read_is_refused(tmp_path: Path):
    file = tmp_path / "key"
    with shown_key(file, new_key()):
        file.chmod(0o644)
        with pytest.raises(ConfigError, match=r"\(run\.dir, .* keep modes\) can be read by others"):
            newest_key(file)
        file.chmod(0o600)


@pytest.mark.parametrize("fault", ["it is no key", "it is gone", "its file system hangs"])
def test_what_became_of_the_file_does_not_keep_node_0(tmp_path: Path, fault: str):
    file = tmp_path / "hosts" / "key"
    with shown_key(file, new_key(), remove_s=0.1):
        file.unlink()
        if fault == "it is no key":
            file.write_text("=")
        elif fault == "its file system hangs":
            os.mkfifo(file, 0o600)
    if fault == "its file system hangs":
        os.close(os.open(file, os.O_WRONLY | os.O_NONBLOCK))  # frees the thread that reads


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ESTALE])
def test_a_key_that_goes_while_it_is_read_is_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
):
    def gone(_self: Path) -> str:
        raise OSError(number, os.strerror(number))

    with shown_key(tmp_path / "key", new_key()), monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", gone)
        assert newest_key(tmp_path / "key") is None
    assert newest_key(tmp_path / "key") is None


def test_keys_differ_at_each_start():
    assert new_key().secret != new_key().secret


def test_whether_a_process_listens_is_seen():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = Address("127.0.0.1", server.getsockname()[1])
        assert is_listened_at(address)
    assert not is_listened_at(address)
