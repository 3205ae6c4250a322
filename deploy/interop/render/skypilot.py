"""SkyPilot: a task that runs every role on its nodes, by their ranks and addresses."""

from pathlib import Path

from slipstream.deploy.config import RunConfig
from slipstream.deploy.interop.render.layout import layout_of, script_variables
from slipstream.deploy.interop.render.settings_file import SETTINGS_FILE, settings_text
from slipstream.deploy.interop.render.template import assignments, fill
from slipstream.wire.errors import ConfigError
from slipstream.wire.settings.load import Table

TASK_FILE, KEYS_SCRIPT = "task.yaml", "make-keys.sh"


def render_skypilot(config: RunConfig, there: Table, *, out: Path) -> dict[str, str]:
    """Return the files of a task; ``there`` are the settings with the nodes' paths.

    Raises:
        ConfigError: The run needs more or larger nodes.
    """
    sky = config.deploy.skypilot
    uses_gpus = config.generators.device != "cpu"
    _, _, count = sky.accelerators.partition(":")
    if uses_gpus and count and not count.isdecimal():
        raise ConfigError(
            f"deploy.skypilot.accelerators must be like H100:8, got {sky.accelerators!r}"
        )
    layout = layout_of(
        config, gpus_per_node=int(count or 1), setting="deploy.skypilot.accelerators"
    )
    if 0 < sky.nodes < layout.num_nodes:
        raise ConfigError(
            f"deploy.skypilot.nodes = {sky.nodes}, but the run needs {layout.num_nodes}"
        )
    task = fill(
        "skypilot.yaml",
        nodes=sky.nodes or layout.num_nodes,
        workdir=sky.workdir,
        use_spot=sky.use_spot,
        accelerators=sky.accelerators if uses_gpus else None,
        cloud=sky.cloud or None,
        settings_file=str(out / SETTINGS_FILE),
        keys=str(out / "keys"),
        storage=sky.storage or None,
        setup="\n".join(sky.setup) + "\n",
        bucket="shared" if sky.storage else None,
        port=sky.port,
        variables=script_variables(config, layout),
        node=fill("skypilot-node.sh"),
    )
    return {
        TASK_FILE: task,
        SETTINGS_FILE: settings_text(there),
        KEYS_SCRIPT: fill("skypilot-keys.sh", variables=assignments(keys=out / "keys")),
    }
