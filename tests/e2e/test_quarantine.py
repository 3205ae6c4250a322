"""A generator whose engine turns positions by other angles joins a run that is under way."""

import json
import shutil
import signal
from pathlib import Path

import pytest

from slipstream.broker.report.summary import PUBLISHES
from tests.support.tiny_run import TinyRun, python

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def with_other_rope(model: Path, other: Path) -> Path:
    """Copy a model, with another base of its rotary embedding."""
    shutil.copytree(model, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rope_theta": 100.0}))
    return other


def test_an_engine_that_computes_something_else_trains_nobody(short_folder: Path):
    run = TinyRun(short_folder, {"run.steps": 1000})
    try:
        run.wait_until(lambda: run.steps() >= 1, "a step")
        other = with_other_rope(short_folder / "model", short_folder / "other")
        role = ("-m", "slipstream.generators.main", "--name", "generator-9")
        joining = python(*role, "--config", run.folder / "resolved.toml", f"run.model={other}")
        said = joining.stdout + joining.stderr
        assert joining.returncode == 1, said
        assert "QuarantineError: the engine does not compute v1." in said
        assert "its work goes back, and its answers since then are not sent" in said
        before = run.steps()
        run.wait_until(lambda: run.steps() > before, "a step without it")
        run.process.send_signal(signal.SIGTERM)
        run.wait()
    finally:
        if run.process.poll() is None:
            run.kill()
    summary = run.summary()
    assert (summary["quarantines"], summary["unaccounted"]) == (1, 0)
    (reason,) = {
        reason for record in summary[PUBLISHES] for reason in record["quarantined"].values()
    }
    assert reason.startswith("the engine does not compute v1.")
    assert "QuarantineError" not in run.log("generator-0")
    assert "is proven" in run.log("generator-0")
