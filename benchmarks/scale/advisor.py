"""Advice fitted on a real run, held to a second one with another split; on this machine's CPU.

Broker, learner, SGLang and Redis are real; a decode step sleeps until it has taken as long as on a
device of its own, so that two engines share two cores (tests/support/paced).
"""

import tempfile
from pathlib import Path

from benchmarks.bars import Bars
from slipstream.deploy.predict.advise.expect import advise
from slipstream.deploy.predict.advise.record import Record, record_of
from tests.support.paced_run import paced_run

_NEEDS = 15.0  # per cent


def advisor_bars(bars: Bars) -> None:
    """Run both, four minutes; a bar of the error of what the first predicts of the second."""
    with tempfile.TemporaryDirectory(prefix="advise-") as name:
        first = _run(Path(name) / "one", 1)
        told = advise(first)
        (more,) = [one for one in told.changes if one.setting == "generators.count = 2"]
        second = _run(Path(name) / "two", 2)
    simulated_s = told.simulated_s[0]
    print(
        f"one generator: {told.measured_s:.2f} s a step, simulated {simulated_s:.2f} s; two: "
        f"expected {more.step_s[0]:.2f} s, measured {second.step_s:.2f} s"
    )
    error = 100 * max(abs(seconds / second.step_s - 1) for seconds in more.step_s)
    bars.at_most("scale_advice_error", error, "%", needs=_NEEDS)


def _run(folder: Path, generators: int) -> Record:
    run = paced_run(folder, generators=generators)
    if run.wait() != 0:
        raise RuntimeError(run.output)
    return record_of(run.folder)
