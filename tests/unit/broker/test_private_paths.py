"""What a reward function must not see, from the settings of the role that runs it."""

from pathlib import Path

import pytest
import tomli_w

from slipstream.broker.config import broker_settings, private_paths
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.run_folder import SETTINGS
from slipstream.wire.settings.load import Table


def test_keys_sockets_the_store_and_the_page_are_private_whether_they_are_there_or_not(
    tmp_path: Path,
):
    table: Table = {"run": {"name": "r", "dir": str(tmp_path), "socket_dir": "/s/sockets"}}
    of_run = (tmp_path / "r" / name for name in ("redis", "dashboard", "hosts"))
    assert private_paths(table) == (tmp_path / "keys", Path("/s/sockets"), *of_run)


def test_a_tenants_functions_do_not_see_what_is_private_to_its_neighbors(tmp_path: Path):
    keys, tables = tmp_path / "keys", dict[str, Table]()
    for name in ("math", "code"):
        run = {"name": name, "dir": str(tmp_path / "tenants"), "socket_dir": f"/s/{name}"}
        tables[name] = {"run": run, "broker": {"keys": str(keys / name)}}
        folder = tmp_path / "tenants" / name
        folder.mkdir(parents=True)
        (folder / SETTINGS).write_text(tomli_w.dumps(tables[name]))
    hidden = private_paths(tables["math"])
    assert {keys / "math", keys / "code", Path("/s/math"), Path("/s/code")} <= set(hidden)
    assert tmp_path / "tenants" / "code" / "redis" in hidden
    assert set(hidden) == set(private_paths(tables["code"]))


def test_a_role_of_a_broker_elsewhere_makes_no_folder_of_a_run(tmp_path: Path):
    run = {"name": "r", "dir": str(tmp_path), "broker": "tcp://10.0.0.1:1", "key_file": "/k.key"}
    assert private_paths({"run": run}) == (tmp_path / "keys", Path("/k.key"))
    (tmp_path / "r" / "redis").mkdir(parents=True)
    assert tmp_path / "r" / "redis" in private_paths({"run": run})
    assert tmp_path / "r" / "hosts" in private_paths({"run": run})  # before a learner's hosts meet


def test_files_with_a_password_or_a_token_are_private_where_they_are(tmp_path: Path):
    password, address = tmp_path / "password", tmp_path / "r" / "dashboard.url"
    table: Table = {
        "run": {"name": "r", "dir": str(tmp_path)},
        "broker": {"keys": "/keys", "redis": {"password_file": str(password)}},
    }
    assert private_paths(table)[0] == Path("/keys")
    assert password not in private_paths(table)
    address.parent.mkdir()
    for file in (password, address):
        file.touch()
        assert file in private_paths(table)


@pytest.mark.parametrize("algo", [3, "grpo", [], {"teacher": 3}, {"teacher": {"api_key_file": 3}}])
def test_faults_in_the_learner_section_are_left_to_the_learner(tmp_path: Path, algo: object):
    table: Table = {"run": {"name": "r", "dir": str(tmp_path)}}
    assert private_paths({**table, "algo": algo}) == private_paths(table)


def test_a_run_in_the_folder_of_the_keys_is_refused(tmp_path: Path):
    table: Table = {"run": {"name": "keys", "dir": str(tmp_path), "model": "m"}}
    with pytest.raises(ConfigError, match=r"run\.name = 'keys'.*\(broker\.keys\)"):
        broker_settings(table)
    elsewhere = table | {"broker": {"keys": "/keys"}, "data": {"file": "a.jsonl"}}
    assert broker_settings(elsewhere).run.name == "keys"
