"""SkyPilot: a task that runs every role on its nodes, by their ranks and addresses."""

import shlex
from importlib.resources import files
from pathlib import Path

from slipstream.deploy.config import RunConfig
from slipstream.deploy.interop.render.layout import layout_of
from slipstream.deploy.interop.render.settings_file import SETTINGS_FILE, settings_text
from slipstream.deploy.interop.render.yaml_text import Yaml, documents
from slipstream.wire.errors import ConfigError
from slipstream.wire.settings.load import Table

TASK_FILE, KEYS_SCRIPT = "task.yaml", "make-keys.sh"
_FOLDER = files("slipstream.deploy.interop.render")
_FILES, _KEYS = "~/slipstream-files", "~/slipstream-keys"
_HEAD = """\
Written by `slipstream render skypilot`. First run make-keys.sh here, once: SkyPilot copies the
keys to the nodes over SSH."""


def render_skypilot(config: RunConfig, there: Table, *, out: Path) -> dict[str, str]:
    """Return the files of a task; ``there`` are the settings with the nodes' paths.

    Raises:
        ConfigError: the run does not fit on such nodes.
    """
    sky = config.deploy.skypilot
    uses_gpus = config.generators.device != "cpu"
    _, _, count = sky.accelerators.partition(":")
    if uses_gpus and count and not count.isdecimal():
        raise ConfigError(
            f"deploy.skypilot.accelerators must be like H100:8, got {sky.accelerators!r}"
        )
    places = layout_of(
        config,
        gpus_per_node=int(count or 1),
        generators_per_node=1,
        setting="deploy.skypilot.accelerators",
    )
    if 0 < sky.nodes < places.num_nodes:
        raise ConfigError(
            f"deploy.skypilot.nodes = {sky.nodes}, but the run needs {places.num_nodes}"
        )
    engines = [f"{place.node}:{place.visible}" for place in places.generators]
    runs = "/shared/runs" if sky.storage else "$HOME/runs"
    variables: dict[str, str | int] = {
        "config": f"$HOME/{_FILES[2:]}/{SETTINGS_FILE}",
        "run_dir": runs,
        "keys": f"$HOME/{_KEYS[2:]}",
        "port": sky.port,
        "learner_nodes": len(places.learner),
        "learner_gpus": places.learner[0].visible,
        "reward_workers": places.reward_workers,
        "collectives": int(config.learner.weightbus.transport == "collective"),
    }
    lines = [f'{name}="{value}"' for name, value in variables.items()]
    lines.append(f"generators=({' '.join(map(shlex.quote, engines))}) # node:GPUs of each")
    body = (_FOLDER / "skypilot_node.sh").read_text("utf-8")
    mounts: dict[str, Yaml] = {
        f"{_FILES}/{SETTINGS_FILE}": str(out / SETTINGS_FILE),
        _KEYS: str(out / "keys"),
    }
    if sky.storage:  # MOUNT cannot append to files
        mounts["/shared"] = {"source": sky.storage, "mode": "MOUNT_CACHED"}
    resources: dict[str, Yaml] = {"use_spot": sky.use_spot}
    if uses_gpus:
        resources["accelerators"] = sky.accelerators
    if sky.cloud:
        resources["cloud"] = sky.cloud
    task: Yaml = {
        "name": "slipstream",
        "num_nodes": sky.nodes or places.num_nodes,
        "workdir": sky.workdir,
        "resources": resources,
        "file_mounts": mounts,
        "setup": "\n".join(sky.setup) + "\n",
        "run": "\n".join(lines) + "\n" + body,
    }
    keys = f"#!/bin/bash\nkeys={shlex.quote(str(out / 'keys'))}\n"
    return {
        TASK_FILE: documents(task, head=_HEAD),
        SETTINGS_FILE: settings_text(there),
        KEYS_SCRIPT: keys + (_FOLDER / "skypilot_keys.sh").read_text("utf-8"),
    }
