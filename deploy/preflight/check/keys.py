"""The keys of a run: this host's key, and the keys known to the broker."""

from collections.abc import Collection, Sequence
from pathlib import Path

from slipstream.broker.server.keyring import KeyHolder, admits, holders
from slipstream.deploy.config import RunConfig
from slipstream.deploy.launch.plan import key_role
from slipstream.deploy.preflight.check.facts import Fact, fail, ok, warn
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.keys import ClientKey, read_client_key, read_private

_SETTING = "run.key_file"


def judge_key(key: ClientKey, names: Collection[str], known: Sequence[KeyHolder] | None) -> Fact:
    """Return whether a host's key admits its processes.

    Args:
        key: The host's key.
        names: Names of the processes that prove it.
        known: keys known to the broker; None if its folder is on another host.
    """
    name = "key file"
    wanted = {key_role(process) for process in names if process != "broker"}
    if not any(admits(key.role, role) for role in wanted):
        expected = " or ".join(sorted(wanted)) or "none: no role here needs one"
        return fail(
            name, f"{key.name} is a key of the role {key.role}, expected {expected}", _SETTING
        )
    if known is None:
        return ok(
            name, f"{key.name}, of the role {key.role}; the broker's keys are not here", _SETTING
        )
    if not any((holder.public, holder.role) == (key.public, key.role) for holder in known):
        return fail(
            name, f"{key.name} is unknown to the broker, or revoked (broker.keys)", _SETTING
        )
    return ok(name, f"{key.name}, of the role {key.role}, is known to the broker", _SETTING)


def judge_keys(folder: Path, known: Sequence[KeyHolder]) -> Fact:
    """Return whether roles on other hosts can connect to this broker.

    Args:
        folder: Folder of the broker's keys.
        known: Keys in the folder.
    """
    if not known:
        made = (
            "no key admits a role on another host; slipstream keys make NAME --role ROLE makes one"
        )
        return warn("broker keys", f"{folder}: {made}", "broker.keys")
    shown = ", ".join(f"{holder.name} ({holder.role})" for holder in known)
    return ok("broker keys", f"{folder}: {shown}", "broker.keys")


def observe_keys(config: RunConfig, names: Collection[str], *, made_by_run: bool) -> list[Fact]:
    """Return the facts of the keys on this host.

    Args:
        config: The run.
        names: Names of the processes here.
        made_by_run: True if the run makes the keys of its hosts.
    """
    if made_by_run:
        return []
    folder = config.broker.keys_folder
    facts = []
    if "broker" in names and config.broker.broker.listen:
        facts.append(_judged_keys(folder))
    if config.run.key_file:
        try:
            key = read_client_key(Path(config.run.key_file))
        except ConfigError as error:
            return [*facts, fail("key file", str(error), _SETTING)]
        known = holders(folder) if (folder / "authorized").is_dir() else None
        facts.append(judge_key(key, names, known))
    elif config.run.broker.startswith("tcp://"):
        facts.append(fail("key file", f"{config.run.broker} asks for a key: none is set", _SETTING))
    return facts


def _judged_keys(folder: Path) -> Fact:
    own = folder / "broker.key"
    if not own.exists():
        return judge_keys(folder, [])
    try:
        read_private(own, "broker.keys")
    except ConfigError as error:
        return fail("broker keys", str(error), "broker.keys")
    return judge_keys(folder, holders(folder))
