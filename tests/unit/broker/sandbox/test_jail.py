"""What a trusted command is started with."""

from pathlib import Path

from slipstream.broker.sandbox.jail import jailed


def test_a_file_in_a_hidden_folder_is_hidden_with_it(tmp_path: Path):
    """As the key of a reward worker on the broker's host: bwrap cannot cover it once more."""
    folder, key, other = tmp_path / "keys", tmp_path / "keys" / "judge.key", tmp_path / "keys.txt"
    folder.mkdir()
    key.touch()
    other.touch()
    words = jailed(["true"], hide=[key, folder, other])
    assert str(key) not in words
    assert words[words.index("--tmpfs") + 1] == str(folder)
    assert str(other) in words


def test_a_file_that_a_link_leads_to_from_a_hidden_folder_is_hidden_too(tmp_path: Path):
    folder, elsewhere = tmp_path / "keys", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    (elsewhere / "judge.key").touch()
    (folder / "clients").symlink_to(elsewhere)
    words = jailed(["true"], hide=[folder, folder / "clients" / "judge.key"])
    assert str(elsewhere / "judge.key") in words


def test_shared_memory_of_its_own_is_of_a_size():
    words = jailed(["true"], shared_bytes=4096)
    assert words[words.index("--tmpfs") - 1 :][:3] == ["4096", "--tmpfs", "/dev/shm"]  # noqa: S108
    assert "--unshare-ipc" in words
    assert "--tmpfs" not in jailed(["true"])
