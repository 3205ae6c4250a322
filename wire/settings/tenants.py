"""[tenants]: several runs that train adapters of one model, in one learner and one pool of engines.

Each tenant is a run of its own: its settings are those of the pool's file with those of its own
file in their place, its folder is ``POOL/tenants/NAME``. What all of them use at once is the
pool's.
"""

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from slipstream.wire.errors import ConfigError
from slipstream.wire.files.run_folder import SETTINGS
from slipstream.wire.settings.load import Section, Table, load_table, section
from slipstream.wire.settings.sections import Positive, RunSection, run_section

S = TypeVar("S")
FOLDER = "tenants"  # folder of the tenants' run folders, in the pool's
_SECTION = "tenants"
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
_MOST = 256
# What a tenant may set: whole sections, or some settings of a section.
_OWN_SECTIONS = {
    *("data", "sampling", "broker", "reward", "environment", "lora", "algo", "eval"),
    *("checkpoint", "logging"),
}
_OWN_SETTINGS = {
    "learner": {
        *("lr", "lr_min", "lr_schedule", "lr_warmup_steps", "lr_decay_steps", "wsd_decay_steps"),
        *("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "clip_grad"),
        *("minibatches", "max_tokens_per_microbatch", "rollouts_per_step", "max_rejected_batches"),
    },
    "weightbus": {"listen"},
}
_NEVER_SHARED = (  # places of one run alone
    ("run", "broker"),
    ("broker", "listen"),
    ("weightbus", "listen"),
    ("checkpoint", "upload"),
)
_SHARED_SETTINGS = {  # exceptions in a tenant's own sections
    "run": {"model", "routing_replay", "cache_dir"},
    "sampling": {"seed_per_sibling"},
}


class TenantTable(Section, frozen=True, kw_only=True):
    """[tenants.NAME]: a run that trains adapters in this pool, as those of other tenants do.

    The pool's file has what all tenants share: `run.model`, `[generators]`, `[weightbus]`, ranks
    and memory of the `[learner]`, and the defaults of everything else. See [lora.md](lora.md).
    """

    settings: str = ""
    """File of the tenant's own settings, which win over the pool's; needed."""
    weight: Positive = 1.0
    """Its share of the learner's time and of the engines' lanes, relative to other tenants that
    want them at the same time."""


@dataclass(frozen=True, slots=True)
class Tenant(Generic[S]):
    """One tenant, with its settings in some form."""

    name: str
    weight: float
    settings: S


def tenants_of(table: Table, decode: Callable[[Table], S]) -> tuple[Tenant[S], ...]:
    """Return the tenants of a pool in the order of their names, decoded; none if it is no pool.

    Raises:
        ConfigError: a name is invalid, a file cannot be read, a tenant sets what all of them share,
            two have a place that is for one run, or ``decode`` refuses its settings; the tenant is
            named.
    """
    names = sorted(table.get(_SECTION, {}))
    if len(names) > _MOST:
        raise ConfigError(f"[tenants] has {len(names)} tables, expected at most {_MOST}")
    found = list[Tenant[S]]()
    holders: dict[tuple[str, str, str], str] = {}
    for name in names:
        own, settled = _tenant(table, name), tenant_table(table, name)
        for section_name, setting in _NEVER_SHARED:
            value = settled.get(section_name, {}).get(setting)
            holder = holders.setdefault((section_name, setting, repr(value)), name)
            if value and holder != name:
                raise ConfigError(
                    f"tenants.{holder} and tenants.{name} have the same {section_name}.{setting} "
                    f"{value!r}: set one in each tenant's file"
                )
        try:
            settings = decode(settled)
        except ConfigError as error:
            raise ConfigError(f"tenants.{name}: {error}") from error
        found.append(Tenant(name, own.weight, settings))
    return tuple(found)


def tenant_table(table: Table, name: str) -> Table:
    """Return all settings of a tenant's run.

    Raises:
        ConfigError: there is no such tenant, its file cannot be read, or it sets what all share.
    """
    own = load_table(Path(_tenant(table, name).settings))
    if _SECTION in own:
        raise ConfigError(f"tenants.{name}: a tenant has no [tenants] of its own")
    for key, values in own.items():
        for setting, value in values.items():
            if not _is_own(key, setting) and table.get(key, {}).get(setting) != value:
                raise ConfigError(
                    f"tenants.{name}: {key}.{setting} is shared by all tenants of a pool: set it "
                    "in the pool's file"
                )
    pool = run_section(table)
    merged = {
        key: {**table.get(key, {}), **own.get(key, {})}
        for key in (table.keys() | own.keys()) - {_SECTION}
    }
    run: Table = merged.setdefault("run", {})
    run |= {"name": name, "dir": str(pool.folder / FOLDER)}
    if pool.socket_dir and "socket_dir" not in own.get("run", {}):
        run["socket_dir"] = str(Path(pool.socket_dir) / name)
    broker: Table = merged.setdefault("broker", {})
    if "keys" not in own.get("broker", {}):  # the key of one tenant opens no other's broker
        keys = str(table.get("broker", {}).get("keys", "")) or pool.folder / "keys"
        broker["keys"] = str(Path(keys) / name)
    return merged


def neighbors(run: RunSection) -> list[Table]:
    """Return the settings of the other tenants of a tenant's pool that have begun on this host."""
    folder = Path(run.dir)
    if folder.name != FOLDER:
        return []
    found = list[Table]()
    for path in sorted(folder.glob(f"*/{SETTINGS}")):
        if path.parent.name != run.name:
            with suppress(ConfigError):
                found.append(load_table(path))
    return found


def is_pool(table: Table) -> bool:
    """Return True if a run's settings name tenants."""
    return bool(table.get(_SECTION))


def _tenant(table: Table, name: str) -> TenantTable:
    tables: dict[str, Any] = table.get(_SECTION, {})
    if name not in tables:
        known = ", ".join(sorted(tables)) or "none"
        raise ConfigError(f"there is no tenant {name!r}; [tenants] names {known}")
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"tenants.{name}: a tenant's name has at most 32 of a-z, 0-9, _ and -, and begins with "
            "a letter or digit"
        )
    found = section({f"tenants.{name}": tables[name]}, f"tenants.{name}", TenantTable)
    if not found.settings:
        raise ConfigError(f"tenants.{name}.settings must name the file of the tenant's settings")
    return found


def _is_own(key: str, setting: str) -> bool:
    """Return True if a tenant may set this."""
    if setting in _SHARED_SETTINGS.get(key, ()):
        return False
    return key in _OWN_SECTIONS | {"run"} or setting in _OWN_SETTINGS.get(key, ())
