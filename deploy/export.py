"""`slipstream export`: which checkpoint becomes which Hugging Face folder."""

import os
import sys
from pathlib import Path
from typing import NoReturn

from wire.checkpoints import INFO_FILE, best_checkpoint, newest_checkpoint, read_checkpoint_info
from wire.errors import ConfigError

_RUNS = Path("runs")


def export(target: Path | None, out: Path | None, *, best: bool) -> NoReturn:
    """Turn this process into the one that exports; it needs no GPU and sees none.

    Args:
        target: a run folder or a checkpoint; None is the newest run in runs/.
        out: the folder to write; None is model/ of the run, which is replaced.
        best: take the best checkpoint of the run and not the newest.

    Raises:
        ConfigError: there is no such checkpoint, or ``out`` is in use.
    """
    checkpoint = checkpoint_of(target, best=best)
    read_checkpoint_info(checkpoint)
    folder = out_folder(checkpoint, out)
    arguments = [sys.executable, "-m", "learner.export", str(checkpoint), str(folder)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # noqa: TID251 handed on
    os.execve(sys.executable, arguments, environment)  # noqa: S606 our own program


def checkpoint_of(target: Path | None, *, best: bool, runs: Path = _RUNS) -> Path:
    """Return the checkpoint that a command line names.

    Raises:
        ConfigError: there is none.
    """
    run = newest_run(runs) if target is None else target
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


def newest_run(runs: Path) -> Path:
    """Return the run whose newest checkpoint was saved last.

    Raises:
        ConfigError: no run in this folder has a checkpoint.
    """
    folders = [path.parent for path in runs.glob("*/checkpoints")]
    saved = [(path, folder) for folder in folders if (path := newest_checkpoint(folder))]
    if not saved:
        raise ConfigError(f"no run in {runs.resolve()} has a checkpoint; name one")
    return max(saved, key=lambda pair: (pair[0] / INFO_FILE).stat().st_mtime)[1]


def out_folder(checkpoint: Path, out: Path | None) -> Path:
    """Return where to write.

    Raises:
        ConfigError: the folder holds something, or none follows from the checkpoint.
    """
    if out is None:
        if checkpoint.parent.name != "checkpoints":
            raise ConfigError(f"{checkpoint} is in no run folder: name a folder with --out")
        return checkpoint.parent.parent / "model"
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists already (--out)")
    return out
