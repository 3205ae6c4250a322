"""`slipstream render`: files with which Slurm, Kubernetes, compose or SkyPilot run every role."""

import argparse
import os
import shlex
from pathlib import Path

from slipstream.deploy.commands.options import add_config, add_overrides
from slipstream.deploy.config import run_config
from slipstream.deploy.interop.render.compose import COMPOSE_FILE, PREPARE, render_compose
from slipstream.deploy.interop.render.kubernetes import KEYS_SCRIPT, NOT_APPLIED, render_kubernetes
from slipstream.deploy.interop.render.settings_file import elsewhere
from slipstream.deploy.interop.render.skypilot import KEYS_SCRIPT as SKY_KEYS
from slipstream.deploy.interop.render.skypilot import TASK_FILE, render_skypilot
from slipstream.deploy.interop.render.slurm import JOB_FILE, render_slurm
from slipstream.deploy.terminal.console import make_console
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.replace import replace_file
from slipstream.wire.gpus import usable_gpus
from slipstream.wire.settings.load import load_table

EXAMPLES = """examples:
  slipstream render slurm --config run.toml --out job              then sbatch job/job.sbatch
  slipstream render kubernetes --config run.toml --out k8s deploy.kubernetes.namespace=rl
  slipstream render compose --config run.toml --out here --force   writes over earlier files
  slipstream render skypilot --config run.toml --out sky
"""
_SCRIPTS = (".sh", ".sbatch")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument(
        "target",
        choices=("slurm", "kubernetes", "compose", "skypilot"),
        help="what is to start the run",
    )
    add_config(parser, required=True)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--force", action="store_true", help="write over files that are there")
    add_overrides(parser)


def main(arguments: argparse.Namespace) -> int:
    """Write the files of a target into a folder, all or, where one cannot be, none."""
    path, overrides = arguments.config, arguments.overrides
    config = run_config(load_table(path, overrides))
    out: Path = arguments.out.resolve()
    match arguments.target:
        case "slurm":
            texts = render_slurm(config, out=out, folder=Path.cwd())
            following = f"sbatch {shlex.quote(str(out / JOB_FILE))}"
        case "kubernetes":
            there = elsewhere(path, overrides, config.deploy.kubernetes.overrides)
            texts = render_kubernetes(config, there)
            files = " ".join(
                f"-f {shlex.quote(str(out / name))}"
                for name in texts
                if name.endswith(".yaml") and name not in NOT_APPLIED
            )
            following = f"{shlex.quote(str(out / KEYS_SCRIPT))} && kubectl apply {files}"
        case "compose":
            there = elsewhere(path, overrides, config.deploy.compose.overrides)
            texts = render_compose(
                config,
                there,
                out=out,
                folder=Path.cwd(),
                user=f"{os.getuid()}:{os.getgid()}",
                gpus=config.deploy.gpus_per_host or len(usable_gpus()),
            )
            compose = f"docker compose -f {shlex.quote(str(out / COMPOSE_FILE))} up"
            following = f"{shlex.quote(str(out / PREPARE))} && {compose}"
        case _:
            there = elsewhere(path, overrides, config.deploy.skypilot.overrides)
            texts = render_skypilot(config, there, out=out)
            launch = f"sky launch -c slipstream {shlex.quote(str(out / TASK_FILE))}"
            following = f"{shlex.quote(str(out / SKY_KEYS))} && {launch}"
    write_files(texts, out, force=arguments.force)
    console = make_console()
    for name in texts:
        console.print(f"wrote {out / name}", soft_wrap=True, highlight=False)
    console.print(f"next: {following}", soft_wrap=True, highlight=False)
    return 0


def write_files(texts: dict[str, str], out: Path, *, force: bool) -> None:
    """Write texts by file name; scripts may be executed.

    Raises:
        ConfigError: a file exists, and ``force`` is not set; then none is written.
    """
    there = [name for name in texts if (out / name).exists()]
    if there and not force:
        raise ConfigError(
            f"{out} holds {', '.join(there)} already: give another --out, or --force to write "
            "over them"
        )
    out.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        mode = 0o755 if name.endswith(_SCRIPTS) else 0o644
        replace_file(out / name, text.encode(), mode=mode)
