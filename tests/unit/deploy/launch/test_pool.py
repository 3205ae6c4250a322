"""Pools of tenants: their settings, processes, memory, and where each resumes."""

import argparse
import json
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from slipstream.deploy.commands import scale
from slipstream.deploy.config import RunConfig, run_config, write_resolved
from slipstream.deploy.launch.plan import RolePlan
from slipstream.deploy.launch.pool import TenantRun, pool_plans, resumed_pool, tenant_plans
from slipstream.deploy.launch.resume import newest_pool
from slipstream.deploy.predict.memory.gpu import adapters_bytes
from slipstream.deploy.terminal.observe import run_of_folder
from slipstream.generators.sglang.start_order import server_flags
from slipstream.wire.errors import ChildDiedError, ConfigError
from slipstream.wire.files.run_folder import SETTINGS, SUMMARY, TRAIL
from slipstream.wire.files.tenant_end import write_tenant_end
from slipstream.wire.models.hf_config import load_hf_config
from slipstream.wire.settings.load import Table, load_table
from slipstream.wire.settings.sections import RunSection
from tests.support.blank_model import write_blank_model
from tests.support.checkpoint_infos import write_checkpoint

WIDE = '[run]\nmax_staleness_steps = 3\n[lora]\nrank = 8\ntargets = ["q_proj", "v_proj"]\n'
NARROW = "[run]\nmax_staleness_steps = 0\nsteps = 5\n[lora]\nrank = 2\n"


def pool_table(folder: Path, **changes: str) -> Table:
    write_blank_model(folder / "model", hidden=128, layers=2)
    (folder / "train.jsonl").write_text('{"prompt": "1+1=", "ground_truth": "2"}\n')
    text = f"""
        [run]
        name = "pool"
        dir = "{folder / "runs"}"
        model = "{folder / "model"}"
        steps = 9
        [data]
        file = "{folder / "train.jsonl"}"
        [sampling]
        max_prompt_tokens = 16
        max_response_tokens = 16
        [generators]
        device = "cpu"
        count = 2
        [reward]
        workers = 1
    """
    for name, own in ({"narrow": NARROW, "wide": WIDE} | changes).items():
        (folder / f"{name}.toml").write_text(own)
        text += f'[tenants.{name}]\nsettings = "{folder / name}.toml"\n'
    (folder / "pool.toml").write_text(text)
    return load_table(folder / "pool.toml")


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return run_config(pool_table(tmp_path))


def test_a_pool_has_one_learner_and_each_tenant_its_broker_and_reward_workers(config: RunConfig):
    resolved = Path("pool.toml")
    assert [plan.name for plan in pool_plans(config, resolved)] == [
        *("generator-0", "generator-1", "learner")
    ]
    assert [tenant.name for tenant in config.tenants] == ["narrow", "wide"]
    for tenant in config.tenants:
        run = tenant.settings.run
        assert run.folder == config.run.folder / "tenants" / tenant.name
        names = [plan.name for plan in tenant_plans(tenant.settings, resolved)]
        assert names == ["broker", "reward-worker-0"]
    keys = {tenant.settings.broker.keys_folder for tenant in config.tenants}
    assert len(keys) == 2


def test_an_engine_has_room_for_the_adapters_of_all_tenants(config: RunConfig):
    generators = config.generators
    flags = server_flags(generators, port=1, api_key="k", seed_of="g")
    assert flags["max_loras_per_batch"] == (0 + 1) + (3 + 1) + 1
    assert flags["max_lora_rank"] == 8
    targets = flags["lora_target_modules"]
    assert isinstance(targets, list)
    assert {"q_proj", "down_proj"} <= set(targets), "of both tenants"
    hf = load_hf_config(Path(config.run.model))
    (narrow, wide) = (tenant.settings.generators for tenant in config.tenants)
    per_place = adapters_bytes(hf, generators) / 6
    assert per_place > adapters_bytes(hf, wide) / 5, (
        "places are of the greatest rank and all layers"
    )
    assert per_place == pytest.approx(adapters_bytes(hf, narrow) / 2 * 8 / 2)


def test_what_is_written_for_the_roles_is_read_as_the_same_pool(config: RunConfig):
    tables = {}
    for tenant in config.tenants:
        folder = tenant.settings.run.folder
        folder.mkdir(parents=True)
        write_resolved(tenant.settings, folder / SETTINGS)
        tables[tenant.name] = {"settings": str(folder / SETTINGS), "weight": tenant.weight}
    resolved = config.run.folder / SETTINGS
    write_resolved(config, resolved, tenants=tables)
    again = run_config(load_table(resolved))
    assert tomllib.loads(resolved.read_text())["tenants"] == tables
    for before, after in zip(config.tenants, again.tenants, strict=True):
        assert after.settings.learner == before.settings.learner
        assert after.settings.broker == before.settings.broker
        seen = [replace(one.settings.generators, hidden=()) for one in (before, after)]
        assert seen[0] == seen[1]  # what is hidden are files of neighbors that are there now


@pytest.mark.parametrize(
    ("own", "reason"),
    [
        ("", "tenants.other: a tenant trains adapters: set lora.rank"),
        (
            "[lora]\nrank = 4\npublish = 'merged'",
            "tenants.other: a tenant's adapters are held next to the weights of all (lora.publish: "
            "merged, as lora.publish says)",
        ),
        ("[lora]\nrank = 4\ntargets = ['up_proj']", "(lora.publish: merged, because "),
        ("[lora]\nrank = 4\n[run]\ngroup_size = 0", "tenants.other: run.group_size must be"),
        ("[lora]\nrank = 4\n[learner]\nranks = 2", "tenants.other: learner.ranks is shared"),
    ],
)
def test_a_tenant_that_cannot_be_is_named(tmp_path: Path, own: str, reason: str):
    with pytest.raises(ConfigError) as refused:
        run_config(pool_table(tmp_path, other=own))
    assert reason in str(refused.value)


def test_weights_that_all_tenants_use_stay_on_the_device(tmp_path: Path):
    table = pool_table(tmp_path)
    table["learner"] = {"offload": ["weights"]}
    with pytest.raises(ConfigError, match=r'tenants.narrow: learner.offload has "weights"'):
        run_config(table)


def test_a_pool_keeps_its_generators(tmp_path: Path):
    table = pool_table(tmp_path) | {"deploy": {"min_generators": 1, "max_generators": 4}}
    with pytest.raises(ConfigError, match=r"deploy.max_generators with \[tenants\]"):
        run_config(table)


def test_each_tenant_resumes_where_it_was_and_the_complete_ones_stay_so(config: RunConfig):
    narrow, wide = (tenant.settings.run.folder for tenant in config.tenants)
    write_checkpoint(narrow, 1, 5)  # its last step
    saved = write_checkpoint(wide, 1, 4)
    resumed, done = resumed_pool(config)
    assert done == ["narrow"]
    (only,) = resumed.tenants
    assert (only.name, only.settings.run.resume_from) == ("wide", str(saved))
    assert only.settings.run.folder == wide


def test_a_tenant_without_a_checkpoint_resumes_its_ledger_or_begins(config: RunConfig):
    narrow = config.tenants[0].settings.run.folder
    (narrow / TRAIL).mkdir(parents=True)
    resumed, done = resumed_pool(config)
    assert done == []
    assert [tenant.settings.run.resume_from for tenant in resumed.tenants] == ["", ""]
    assert [tenant.settings.run.folder for tenant in resumed.tenants] == [
        tenant.settings.run.folder for tenant in config.tenants
    ]


def test_a_pool_whose_runs_are_complete_is_refused(config: RunConfig):
    for tenant in config.tenants:
        folder = tenant.settings.run.folder
        folder.mkdir(parents=True)
        (folder / SUMMARY).write_text(json.dumps({"outcome": "finished"}))
    with pytest.raises(ConfigError, match=r"the runs of all tenants of .* are complete"):
        resumed_pool(config)


def test_the_newest_folder_of_a_pool_is_resumed(config: RunConfig, tmp_path: Path):
    assert newest_pool(config.run) == "pool"
    for name in ("pool", "pool-2", "pool-3"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    assert newest_pool(config.run) == "pool-3"


def test_a_tenant_does_not_resume_from_another_whose_name_has_a_number_more(tmp_path: Path):
    config = run_config(pool_table(tmp_path, **{"wide-2": WIDE}))
    wide, other = (tenant.settings.run.folder for tenant in config.tenants[1:])
    assert other.name == "wide-2"
    saved = write_checkpoint(wide, 1, 3), write_checkpoint(other, 1, 4)
    resumed, _ = resumed_pool(config)
    runs = [tenant.settings.run for tenant in resumed.tenants[1:]]
    assert [run.folder for run in runs] == [wide, other]
    assert [run.resume_from for run in runs] == [str(path) for path in saved]


def test_a_finished_tenant_goes_on_where_its_settings_make_its_run_longer(config: RunConfig):
    narrow = config.tenants[0].settings
    write_checkpoint(narrow.run.folder, 1, 3)  # it ended by another limit than run.steps
    (narrow.run.folder / SUMMARY).write_text(json.dumps({"outcome": "finished"}))
    write_resolved(narrow, narrow.run.folder / SETTINGS)
    assert resumed_pool(config)[1] == ["narrow"]
    write_resolved(narrow.with_settings("run", steps=3), narrow.run.folder / SETTINGS)
    assert resumed_pool(config)[1] == []


def test_an_engine_records_kept_tokens_if_a_tenant_needs_them(tmp_path: Path):
    changes = {"wide": f"{WIDE}[sampling]\ntop_p = 0.9\nmax_kept_tokens = 99"}
    generators = run_config(pool_table(tmp_path, **changes)).generators
    assert server_flags(generators, port=1, api_key="k", seed_of="g")["sampling_mask_max_tokens"]


class Site:
    """The place of a tenant's run, whose broker listens."""

    def __init__(self, run: RunSection) -> None:
        self.run = run

    def plans(self) -> list[RolePlan]:
        return [RolePlan(name, ()) for name in ("broker", "reward-worker-0")]

    def broker_listens(self) -> bool:
        return True


def test_a_tenant_is_over_once_its_learner_has_exported_and_uploaded(config: RunConfig):
    run = config.tenants[0].settings.run
    folder, status = run.folder, SimpleNamespace(finished=False)
    process: Any = SimpleNamespace(signs=lambda: None)
    supervisor: Any = SimpleNamespace(
        children={"broker": SimpleNamespace(process=process), "reward-worker-0": None},
        start=lambda _plan: None,
        check=lambda: None,
        finished=lambda _names: True,
    )
    watcher: Any = SimpleNamespace(start=lambda _run: None, newest=status, asked_s=5.0)
    site: Any = Site(run)
    tenant = TenantRun(run.name, site, supervisor, watcher)
    folder.mkdir(parents=True)
    write_tenant_end(folder, "an earlier failure")
    tenant.begin()
    assert not tenant.look()
    assert not tenant.is_beginning
    tenant.require_over("generator", ended_s=5.0)  # the broker was asked before
    with pytest.raises(ChildDiedError, match="generator ended before the run was complete"):
        tenant.require_over("generator", ended_s=4.0)
    status.finished = True
    tenant.require_over("generator", ended_s=4.0)
    assert not tenant.look(), "the learner writes its model"
    write_tenant_end(folder, "")
    assert tenant.look()
    write_tenant_end(folder, "generator-0 gave it up: no")
    with pytest.raises(ChildDiedError, match=r"^generator-0 gave it up: no"):
        tenant.look()


def test_commands_on_a_pool_name_the_runs_of_its_tenants(config: RunConfig):
    tables = {tenant.name: {"settings": "x"} for tenant in config.tenants}
    folder = config.run.folder
    (folder / "tenants").mkdir(parents=True)
    write_resolved(config, folder / SETTINGS, tenants=tables)
    with pytest.raises(ConfigError, match=r"is a pool; .*tenants/narrow, .*tenants/wide"):
        run_of_folder(folder)
    for place in (folder, folder / "tenants" / "wide"):
        words = argparse.Namespace(folder=place, count="generators=3")
        with pytest.raises(ConfigError, match="generators stay as many as they are"):
            scale.main(words)
