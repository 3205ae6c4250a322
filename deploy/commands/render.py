"""`slipstream render`: write the files with which a cluster's own scheduler starts a run."""

import argparse
import os
import shlex
import sys
from pathlib import Path

from slipstream.deploy.commands.options import add_config, add_overrides
from slipstream.deploy.config import run_config
from slipstream.deploy.render.slurm import SCRIPT, Origin, slurm_files
from slipstream.deploy.terminal.console import make_console
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.replace import replace_file
from slipstream.wire.settings.load import load_table

EXAMPLES = """examples:
  slipstream render slurm --config run.toml --out job
  slipstream render slurm --config run.toml --out job deploy.slurm.partition=gpu run.steps=500
  slipstream render slurm --config run.toml --out job --force      replace files that are there
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("target", choices=("slurm",), help="the scheduler")
    add_overrides(parser)
    add_config(parser, required=True)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--force", action="store_true", help="replace files that are there")


def main(arguments: argparse.Namespace) -> int:
    """Run the command."""
    return render(arguments.config, arguments.overrides, arguments.out, force=arguments.force)


def render(config: Path, overrides: list[str], out: Path, *, force: bool) -> int:
    """Write the files of a run under Slurm into ``out``; return the exit code.

    Raises:
        ConfigError: a setting that is wrong, or a file that is there already. Nothing is written.
    """
    here = Path.cwd()
    origin = Origin(here / config, tuple(overrides), here, sys.executable)
    files = slurm_files(run_config(load_table(config, overrides)), origin)
    there = [str(out / name) for name in files if os.path.lexists(out / name)]
    if there and not force:
        raise ConfigError(f"{', '.join(there)} exists already (--out): --force replaces it")
    out.mkdir(parents=True, exist_ok=True)
    console = make_console()
    for name, text in files.items():
        replace_file(out / name, text.encode())
        console.print(f"wrote {out / name}", soft_wrap=True, markup=False)
    console.print(f"next: sbatch {shlex.quote(str(out / SCRIPT))}", soft_wrap=True, markup=False)
    return 0
