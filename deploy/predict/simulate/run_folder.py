"""Writes a simulated run as a run folder, with the product's own report in virtual time."""

from pathlib import Path

from slipstream.broker.history.columns import StoredState, write_state
from slipstream.broker.history.history import RunHistory
from slipstream.broker.ledger.scoring_queue import ScoringQueue
from slipstream.broker.report.metrics_file import MetricsFile
from slipstream.broker.report.staleness_report import throttle_figures
from slipstream.broker.report.summary import write_summary
from slipstream.broker.report.telemetry import Telemetry
from slipstream.broker.report.trackers.base import step_figures
from slipstream.deploy.config import RunConfig, write_resolved
from slipstream.deploy.predict.simulate.engine import SimulatedEngine
from slipstream.deploy.predict.simulate.outcome import StepRecord
from slipstream.deploy.predict.simulate.world import World
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.run_folder import METRICS, PAGE_STATE, SETTINGS, SUMMARY
from slipstream.wire.messages.broker import Hello, RoleReport
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.process.phases import WAIT

_SHOWN = 64  # engines with a row on the page
_OUTCOME = "simulated"


class SimulatedFolder:
    """The folder of a simulated run: pass ``step`` to ``World.run``, then ``close``."""

    def __init__(self, world: World, config: RunConfig, folder: Path) -> None:
        """Make the folder and write the settings.

        Raises:
            ConfigError: the folder is not empty.
        """
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty: name another folder (--out)")
        folder.mkdir(parents=True, exist_ok=True)
        write_resolved(config, folder / SETTINGS)
        self._world, self._folder = world, folder
        self._telemetry = Telemetry(config.run, now=lambda: world.now_s, cpu_seconds=lambda: 0.0)
        self._telemetry.outcome = _OUTCOME
        self._scoring = ScoringQueue(lease_s=world.scenario.faults.lease_s)
        self._history = RunHistory(began_s=0.0)
        self._metrics = MetricsFile(folder / METRICS, step=0, evaluated=(), now=lambda: world.now_s)
        self._trained_tokens = 0
        self._waited_s = self._busy_s = 0.0
        self._telemetry.hello(Hello(role="learner", name="learner"))
        self._names = list(world.engines)[:_SHOWN]
        for name in self._names:
            self._telemetry.hello(Hello(role="generator", name=name))
        self._telemetry.training_began()

    def step(self, record: StepRecord) -> None:
        """Record a learner step."""
        world, telemetry = self._world, self._telemetry
        self._trained_tokens += record.num_generated
        self._waited_s += record.waited_s
        self._busy_s += record.trained_s
        for name in ("learner", *self._names):
            telemetry.received_from(name)
        telemetry.report(
            "learner",
            RoleReport(
                phase_seconds={WAIT: self._waited_s, "train": self._busy_s},
                counters={"tokens": float(self._trained_tokens)},
            ),
        )
        for name in self._names:
            if (engine := world.engines[name]) is not None:
                telemetry.report(name, _report_of(engine))
        seconds = record.waited_s + record.trained_s
        point = telemetry.step(
            record.step,
            {
                "time/step": seconds,
                "time/wait": record.waited_s,
                "throughput/tokens_per_s": record.num_tokens / seconds if seconds else 0.0,
                "throughput/engines_busy": record.engines_busy,
                "staleness/mean": record.mean_staleness,
                **throttle_figures(world.ledger.book.controller),
            },
        )
        status = telemetry.status(world.ledger.book, self._scoring)
        self._history.take(status, world.now_s)
        self._metrics.step(record.step, self._trained_tokens, step_figures(point, status))

    def close(self) -> None:
        """Write the files of a viewer."""
        status = self._telemetry.status(self._world.ledger.book, self._scoring)
        self._history.take(status, self._world.now_s)
        self._metrics.close()
        write_summary(self._folder / SUMMARY, status)
        state = StoredState(at_s=self._world.now_s, status=status, history=self._history.snapshot())
        write_state(self._folder / PAGE_STATE, state)


def _report_of(engine: SimulatedEngine) -> RoleReport:
    idle_s = max(0.0, engine.now_s - engine.busy_s - engine.stalled_s)
    return RoleReport(
        phase_seconds={WAIT: idle_s, "generate": engine.busy_s, "adopt": engine.stalled_s},
        counters={"tokens": engine.num_generated},
        adopted=PolicyVersion(1, engine.step),
    )
