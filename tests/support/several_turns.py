"""Runs whose trajectories have several turns, in an environment that a test writes or serves."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slipstream.wire.process.ports import free_port
from tests.support.tiny_run import ROOT, TinyRun, limited_to, overrides_of, slipstream
from tests.support.waiting import HANG_S

_SETTINGS = {
    "environment.max_turns": 3,
    "environment.max_tokens": 150,
    "sampling.max_response_tokens": 24,
    "reward.workers": 0,
}


@contextmanager
def environment_server(
    folder: Path, settings: Mapping[str, object], *, few_files: int = 0
) -> Iterator[dict[str, object]]:
    """Start a server as documented; yield a run's settings that name it. Ctrl-C ends it in order.

    Args:
        folder: of its key and its output.
        settings: of the environment.
        few_files: that a process of it may have open; 0 is any number.
    """
    keys, log = folder / "environment-keys", folder / "server.log"
    slipstream("keys", "make", "envs", "--role", "observer", "--keys", keys)
    key = {"environment.key_file": keys / "clients" / "envs.key"}
    (folder / "empty.toml").write_text("")
    at = f"127.0.0.1:{free_port()}"
    command = [
        *(sys.executable, "-m", "slipstream.generators.environments.main"),
        *("--config", str(folder / "empty.toml"), "--listen", at),
        *overrides_of({**settings, **key}),
    ]
    with log.open("w") as output:
        limits = limited_to(few_files) if few_files else None
        server = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=output, preexec_fn=limits
        )
    try:
        yield {**key, "environment.servers": f'["{at}"]'}
        server.send_signal(signal.SIGINT)
        assert server.wait(HANG_S) == 0, log.read_text()
    finally:
        server.kill()
        server.wait()
    assert "generator" in log.read_text()


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
