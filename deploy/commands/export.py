"""`slipstream export`: which checkpoint becomes which Hugging Face folder."""

import argparse
import os
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path

from slipstream.deploy.commands.options import RUNS, writing
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.checkpoints import (
    INFO_FILE,
    best_checkpoint,
    newest_checkpoint,
    read_checkpoint_info,
)
from slipstream.wire.files.run_folder import newest_run
from slipstream.wire.process.processes import keep_folder, remove_abandoned

_HELD, _MADE = ".export-", ".exporting-"  # a folder with links, and before it is locked
_TRIES = 20  # while a run replaces its checkpoints
EXAMPLES = """examples:
  slipstream export runs/demo --best --out DIR   the best checkpoint by eval.metric
  slipstream export                              the newest one, into model/ of its run
  slipstream export runs/demo --merged           of adapters, the model with them in its weights
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    text = (
        "a run, of which the newest checkpoint, or a checkpoint; default: the newest run in runs/"
    )
    parser.add_argument("target", type=Path, nargs="?", metavar="RUN|CHECKPOINT", help=text)
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder to write; default: model/ of the run, adapter/ for adapters",
    )
    parser.add_argument(
        "--merged",
        action="store_true",
        help="write the model with the adapters (lora.rank) in its weights",
    )
    parser.add_argument(
        "--best", action="store_true", help="take the run's best checkpoint by eval.metric"
    )


def main(arguments: argparse.Namespace) -> int:
    """Replace this process by the exporter, with GPUs hidden."""
    held, checkpoint = held_checkpoint(arguments.target, best=arguments.best)
    try:
        writes_adapters = _writes_adapters(checkpoint, held, merged=arguments.merged)
        name = "adapter" if writes_adapters else "model"
        folder = out_folder(checkpoint, arguments.out, name)
    except ConfigError:
        let_go(held, checkpoint)
        raise
    command = [sys.executable, "-m", "slipstream.learner.checkpoints.export", str(held)]
    command += [str(folder), "--of", str(checkpoint), *(["--merged"] * arguments.merged)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # noqa: TID251 handed on
    os.execve(sys.executable, command, environment)  # noqa: S606 our own program


def _writes_adapters(checkpoint: Path, held: Path, *, merged: bool) -> bool:
    """True if adapters alone are written.

    Raises:
        ConfigError: they are to be merged, and there are none.
    """
    adapters = read_checkpoint_info(held).adapters
    if merged and adapters is None:
        raise ConfigError(f"{checkpoint} holds no adapters: leave --merged out")
    return adapters is not None and not merged


def checkpoint_of(target: Path | None, *, best: bool, runs: Path = RUNS) -> Path:
    """Return the checkpoint that a command line names.

    Raises:
        ConfigError: No checkpoint was found.
    """
    run = newest_run(runs, f"checkpoints/step-*/{INFO_FILE}") if target is None else target
    if (run / INFO_FILE).is_file():
        if best:
            raise ConfigError(f"{run} is one checkpoint; --best chooses among those of a run")
        return run
    if not (run / "checkpoints").is_dir():
        raise ConfigError(f"{run} is neither a run with checkpoints nor a checkpoint")
    found = best_checkpoint(run) if best else newest_checkpoint(run)
    if found is None:
        what = "evaluated checkpoint" if best else "complete checkpoint"
        raise ConfigError(f"{run} has no {what}")
    return found


def held_checkpoint(target: Path | None, *, best: bool, runs: Path = RUNS) -> tuple[Path, Path]:
    """Return a checkpoint that a live run cannot remove, and which one it is.

    Its files are linked a second time, which copies nothing: files the run removes stay with us. On
    a file system without such links it is the checkpoint itself.

    Raises:
        ConfigError: No checkpoint was found.
    """
    for _ in range(_TRIES):
        checkpoint = checkpoint_of(target, best=best, runs=runs)
        if checkpoint == target or checkpoint.parent.name != "checkpoints":
            return checkpoint, checkpoint
        run = checkpoint.parent.parent
        for left in run.glob(f"{_HELD}*"):  # remains of killed exports
            remove_abandoned(left, partial(shutil.rmtree, ignore_errors=True))
        try:
            made = Path(tempfile.mkdtemp(prefix=_MADE, dir=run))
        except OSError:  # nothing can be written here
            return checkpoint, checkpoint
        keep_folder(made)
        held = made.rename(run / f"{_HELD}{made.name.removeprefix(_MADE)}")
        try:
            shutil.copytree(checkpoint, held, copy_function=os.link, dirs_exist_ok=True)
        except (shutil.Error, OSError):
            shutil.rmtree(held, ignore_errors=True)
            if checkpoint.is_dir():  # no links here
                return checkpoint, checkpoint
        else:
            return held, checkpoint
    raise ConfigError(f"{target or runs} removes its checkpoints faster than they can be held")


def let_go(held: Path, checkpoint: Path) -> None:
    """Remove the links to a checkpoint."""
    if held != checkpoint:
        shutil.rmtree(held, ignore_errors=True)


def out_folder(checkpoint: Path, out: Path | None, name: str = "model") -> Path:
    """Return the folder to write; by default it has this ``name`` in the run.

    Raises:
        ConfigError: the folder holds something or cannot be made, or none follows from the
            checkpoint.
    """
    if out is None:
        if checkpoint.parent.name != "checkpoints":
            raise ConfigError(f"{checkpoint} is not in a run folder: give a folder with --out")
        return checkpoint.parent.parent / name
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists already (--out)")
    with writing(out, "--out"):
        out.parent.mkdir(parents=True, exist_ok=True)
        Path(tempfile.mkdtemp(prefix=".", dir=out.parent)).rmdir()  # before torch is imported
    return out
