"""Slurm: one batch script that runs every role, and queues itself again until the run is complete.

One plain job, no heterogeneous one: all nodes are alike, the broker needs a core or two and shares
the first node, and a plain job is preempted, queued again and resumed as a whole.
"""

import shlex
import sys
from pathlib import Path

from slipstream.broker.config import keys_folder
from slipstream.deploy.config import RunConfig
from slipstream.deploy.interop.render.layout import NodeLayout, layout_of, script_variables
from slipstream.deploy.interop.render.settings_file import SETTINGS_FILE, settings_text
from slipstream.deploy.interop.render.template import FilledText, assignments, fill
from slipstream.wire.errors import ConfigError

JOB_FILE = "job.sbatch"
_NAME_CHARACTERS = "-_."


def render_slurm(config: RunConfig, *, out: Path, folder: Path) -> dict[str, str]:
    """Return the files of a job.

    Args:
        config: Settings of the run.
        out: Folder of the files, on a file system that every node sees.
        folder: Base of relative paths in the settings.

    Raises:
        ConfigError: The run needs larger nodes, or an option is invalid in a script.
    """
    slurm = config.deploy.slurm
    layout = layout_of(
        config,
        gpus_per_node=slurm.gpus_per_node,
        generators_per_node=slurm.generators_per_node,
        setting="deploy.slurm.gpus_per_node",
    )
    return {
        JOB_FILE: job_text(config, layout, out=out, folder=folder),
        SETTINGS_FILE: settings_text(config.table),
    }


def job_text(config: RunConfig, layout: NodeLayout, *, out: Path, folder: Path) -> str:
    """Return the batch script for a layout."""
    setup = config.deploy.slurm.setup or (_own_path(),)
    return fill(
        "slurm-job.sh",
        options=FilledText("".join(f"#SBATCH {option}\n" for option in _options(config, layout))),
        variables=_variables(config, layout, out=out, folder=folder),
        setup=FilledText("".join(f"    {line}\n" for line in setup)),
    )


def _options(config: RunConfig, layout: NodeLayout) -> list[str]:
    slurm = config.deploy.slurm
    uses_gpus = config.generators.device != "cpu"
    name = "".join(c if c.isalnum() or c in _NAME_CHARACTERS else "-" for c in config.run.name)
    chosen = {"partition": slurm.partition, "account": slurm.account, "qos": slurm.qos}
    for setting, value in chosen.items():
        if any(c.isspace() for c in value):
            raise ConfigError(f"deploy.slurm.{setting} must be one word, got {value!r}")
    for option in slurm.options:
        if not option.startswith("--") or not option.isprintable():
            raise ConfigError(
                f"deploy.slurm.options must be like --constraint=h100, one each, got {option!r}"
            )
    return [
        f"--job-name={name}",
        f"--nodes={layout.num_nodes}",
        "--ntasks-per-node=1",
        "--exclusive",  # all CPUs, but no more memory than the partition's default
        "--mem=0",  # all memory
        *([f"--gpus-per-node={slurm.gpus_per_node}"] if uses_gpus else []),
        f"--time={slurm.time_limit}",
        "--requeue",
        "--no-kill",  # a node with generators alone may fail
        f"--signal=B:TERM@{slurm.grace_s}",
        "--open-mode=append",
        "--output=slurm-%j.log",
        *(f"--{setting}={value}" for setting, value in chosen.items() if value),
        *slurm.options,
    ]


def _variables(config: RunConfig, layout: NodeLayout, *, out: Path, folder: Path) -> FilledText:
    deploy, run = config.deploy, config.run
    has_keys = bool(config.broker.broker.keys)
    variables = assignments(
        work=folder,
        config=out / SETTINGS_FILE,
        run_folder=folder / run.folder,
        keys=folder / (keys_folder(run, config.broker.broker) if has_keys else run.folder / "keys"),
        port=deploy.slurm.port,
        gpus_per_node=deploy.slurm.gpus_per_node if layout.learner[0].gpus else 0,
        max_restarts=deploy.max_restarts,
        restart_window_s=int(deploy.restart_window_s),
    )
    return FilledText(variables + script_variables(config, layout))


def _own_path() -> str:
    return f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH"
