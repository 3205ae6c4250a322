"""Tenants of a pool: whose settings they have, and what they must not set."""

import argparse
from pathlib import Path

import pytest

from slipstream.wire.errors import ConfigError
from slipstream.wire.files.run_folder import SETTINGS
from slipstream.wire.process.command_line import load_arguments, role_parser, settings_arguments
from slipstream.wire.settings.load import Table, load_table
from slipstream.wire.settings.sections import run_section
from slipstream.wire.settings.tenants import neighbors, tenant_table, tenants_of

POOL = """
[run]
name = "pool"
dir = "runs"
model = "models/base"
group_size = 4
[generators]
count = 2
[learner]
ranks = 2
lr = 1e-4
[lora]
rank = 8
"""


def pool(folder: Path, **tenants: str) -> Path:
    text = POOL
    for name, own in tenants.items():
        (folder / f"{name}.toml").write_text(own)
        text += f'[tenants.{name}]\nsettings = "{folder / name}.toml"\n'
    path = folder / "pool.toml"
    path.write_text(text)
    return path


def named(table: Table) -> tuple[str, float]:
    return table["run"]["name"], table["learner"]["lr"]


def test_a_tenant_has_the_settings_of_its_pool_with_its_own_in_their_place(tmp_path: Path):
    path = pool(tmp_path, math="[learner]\nlr = 1e-3\n[run]\nseed = 7", code="")
    table = load_table(path)
    math = tenant_table(table, "math")
    assert math["run"] == {
        "name": "math",
        "dir": "runs/pool/tenants",
        "model": "models/base",
        "group_size": 4,
        "seed": 7,
    }
    assert math["learner"] == {"ranks": 2, "lr": 1e-3}
    assert math["broker"] == {"keys": "runs/pool/keys/math"}
    assert "tenants" not in math
    found = tenants_of(table, named)
    assert [(tenant.name, tenant.weight, tenant.settings) for tenant in found] == [
        ("code", 1.0, ("code", 1e-4)),
        ("math", 1.0, ("math", 1e-3)),
    ]


def test_sockets_of_tenants_are_apart(tmp_path: Path):
    table = load_table(pool(tmp_path, math=""), ["run.socket_dir=pools/x"])
    assert tenant_table(table, "math")["run"]["socket_dir"] == "pools/x/math"


@pytest.mark.parametrize(
    ("own", "reason"),
    [
        ("[generators]\ncount = 3", "tenants.math: generators.count is shared by all tenants"),
        ('[run]\nmodel = "other"', "tenants.math: run.model is shared"),
        ("[learner]\nranks = 4", "tenants.math: learner.ranks is shared"),
        ("[deploy]\nmax_restarts = 1", "tenants.math: deploy.max_restarts is shared"),
        ('[tenants.x]\nsettings = "x"', "a tenant has no [tenants] of its own"),
        ("[lern]\nlr = 1", "unknown section [lern]"),
    ],
)
def test_what_all_tenants_share_is_set_in_the_pool_alone(tmp_path: Path, own: str, reason: str):
    with pytest.raises(ConfigError) as refused:
        tenant_table(load_table(pool(tmp_path, math=own)), "math")
    assert reason in str(refused.value)


def test_a_shared_setting_of_the_same_value_is_allowed(tmp_path: Path):
    path = pool(tmp_path, math='[run]\nmodel = "models/base"\n[generators]\ncount = 2')
    assert tenant_table(load_table(path), "math")["generators"] == {"count": 2}


@pytest.mark.parametrize(
    "place",
    [
        'checkpoint.upload="file:///up"',
        'run.broker="tcp://10.0.0.1:5"',
        'broker.listen="tcp://10.0.0.1:5"',
        'weightbus.listen="tcp://10.0.0.1:5"',
    ],
)
def test_a_place_of_one_run_is_not_that_of_two_tenants(tmp_path: Path, place: str):
    table = load_table(pool(tmp_path, math="", code=""), [place])
    with pytest.raises(ConfigError) as refused:
        tenants_of(table, named)
    setting = place.partition("=")[0]
    assert f"tenants.code and tenants.math have the same {setting} " in str(refused.value)
    tenants_of(load_table(pool(tmp_path, math=""), [place]), named)


def test_neighbors_are_those_of_the_same_pool_that_have_begun(tmp_path: Path):
    for name in ("math", "code", "broken"):
        (tmp_path / "tenants" / name).mkdir(parents=True)
        text = "not toml" if name == "broken" else f'[run]\nname = "{name}"'
        (tmp_path / "tenants" / name / SETTINGS).write_text(text)
    (tmp_path / "tenants" / "waits").mkdir()
    math = run_section({"run": {"name": "math", "dir": str(tmp_path / "tenants"), "model": "m"}})
    assert neighbors(math) == [{"run": {"name": "code"}}]
    alone = run_section({"run": {"name": "math", "dir": str(tmp_path), "model": "m"}})
    assert neighbors(alone) == []


def test_an_error_in_a_tenants_settings_names_it(tmp_path: Path):
    def decode(_table: Table) -> None:
        raise ConfigError("learner.lr must be above 0")

    with pytest.raises(ConfigError, match=r"^tenants.math: learner.lr must be above 0"):
        tenants_of(load_table(pool(tmp_path, math="")), decode)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('[tenants."../up"]\nsettings = "x"', "a tenant's name has at most 32"),
        ("[tenants.math]\nweight = 1.0", "settings"),
        ('[tenants.math]\nsettings = "x"\nweight = 0.0', "tenants.math.weight"),
        ('[tenants.math]\nsetings = "x"', "did you mean settings"),
    ],
)
def test_a_bad_table_is_refused(tmp_path: Path, line: str, reason: str):
    path = tmp_path / "pool.toml"
    path.write_text(POOL + line)
    with pytest.raises(ConfigError) as refused:
        tenants_of(load_table(path), named)
    assert reason in str(refused.value)


def parsed(*words: str) -> argparse.Namespace:
    return role_parser("start-broker", "", []).parse_args(words)


def test_a_role_of_a_tenant_reads_its_settings_and_hands_them_on(tmp_path: Path):
    path = pool(tmp_path, math="[learner]\nlr = 1e-3", code="")
    words = ("--config", str(path), "--tenant", "math", "learner.lr=0.5", "tenants.math.weight=2")
    arguments = parsed(*words)
    assert named(load_arguments(arguments)) == ("math", 0.5)
    assert parsed(*settings_arguments(arguments)) == arguments
    with pytest.raises(ConfigError, match=r"there is no tenant 'physics'; .* code, math"):
        load_arguments(parsed("--config", str(path), "--tenant", "physics"))
