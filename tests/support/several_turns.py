"""Runs whose trajectories have several turns, in an environment that a test writes."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.support.tiny_run import TinyRun

_SETTINGS = {
    "environment.max_turns": 3,
    "environment.max_tokens": 150,
    "sampling.max_response_tokens": 24,
    "reward.workers": 0,
}


def run_in(
    folder: Path,
    function: str,
    settings: Mapping[str, object],
    *,
    before: Callable[[Path], None] = lambda _folder: None,
) -> TinyRun:
    """Begin a run in a folder, whose environment gives all rewards.

    Args:
        folder: of the run, with the environment's file.
        function: FILE.py:NAME in that folder.
        settings: besides those of short trajectories of three turns.
        before: may spoil the inputs in the folder.
    """
    named = {"environment.function": f"{folder / function}"}
    return TinyRun(folder, {**_SETTINGS, **named, **settings}, before=before)


def summary_of_all_trained(run: TinyRun) -> dict[str, Any]:
    """Return the summary of a run that has ended well, with nothing left."""
    assert run.wait() == 0, run.output
    summary = run.summary()
    assert (summary["finished"], summary["unaccounted"], summary["trained"]) == (True, 0, 16)
    run.assert_nothing_left()
    return summary
