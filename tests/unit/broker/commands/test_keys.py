"""Keys of tenants."""

from pathlib import Path

import pytest

from slipstream.broker.commands.keys import TenantKeys, make_tenant_key, revoke_tenant_key
from slipstream.wire.errors import ConfigError
from tests.support.commands import call_command


def test_only_the_hash_of_a_key_is_kept(tmp_path: Path):
    carried = make_tenant_key(tmp_path, "alice")
    key = carried.read_text().strip()
    assert key.startswith("tml-")
    assert carried.stat().st_mode & 0o777 == 0o600
    assert key not in (tmp_path / "alice.toml").read_text()
    carried.unlink()
    keys = TenantKeys(tmp_path)
    assert keys.tenant(key) == "alice"
    assert keys.tenant(key + "x") == keys.tenant("") == ""
    with pytest.raises(ConfigError, match="there is a tenant alice already"):
        make_tenant_key(tmp_path, "alice")
    revoke_tenant_key(tmp_path, "alice")
    keys.refresh()
    assert keys.tenant(key) == ""
    with pytest.raises(ConfigError, match="cannot be the name"):
        make_tenant_key(tmp_path, "../alice")


def test_the_command_makes_lists_and_revokes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert call_command("keys", "make", "alice", role="tenant", keys=tmp_path) == 0
    assert "TINKER_API_KEY" in capsys.readouterr().out
    assert call_command("keys", "list", keys=tmp_path) == 0
    assert "alice" in capsys.readouterr().out
    assert call_command("keys", "revoke", "alice", keys=tmp_path) == 0
    assert TenantKeys(tmp_path / "tenants").tenant("") == ""
    assert not list((tmp_path / "tenants").glob("*.toml"))
