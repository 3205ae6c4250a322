"""One rank of a learner's loop on recorded batches; what a broker would answer besides is scripted.

Usage: loop CONFIG FILE SCRIPT_JSON RANK OVERRIDE...
Rank 0 prints what was on disk whenever it asked for a batch. Beside CONFIG there is a file
committed-STEP for each commit, stopped once a stop was ordered, and seals: of each seal
[version, step, oldest kept, newest checkpoint], also of a rank 0 that is killed.
"""

import errno
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
from torch.distributed import FileStore  # type: ignore[attr-defined]

from slipstream.learner.batches.orders import StepPlan
from slipstream.learner.batches.replay_link import ReplayLink
from slipstream.learner.config import LearnerSettings, learner_settings
from slipstream.learner.model import device
from slipstream.wire.errors import RefusedError
from slipstream.wire.files.checkpoints import (
    CheckpointInfo,
    newest_checkpoint,
    read_best,
    read_ledger,
)
from slipstream.wire.messages.broker import BatchNotReady, RunComplete, StepCommitted
from slipstream.wire.messages.status import EvalFigures, EvalPoint
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.process.health import Health
from slipstream.wire.settings.load import load_table
from tests.support.ranks.program import run
from tests.support.waiting import HANG_S, until


class Act(msgspec.Struct, frozen=True, kw_only=True):
    """What happens to a rank as one of its saves reaches a stage."""

    stage: str
    do: Literal["kill", "hold", "fail"]
    save: int = 1  # which of those that this process begins
    nth: int = 1  # time that it reaches the stage
    rank: int = 0
    until: str = ""  # this file is there beside CONFIG, or it was "waited" for: the end of a hold


class Acts:
    """Has a rank's saves do what a script says."""

    def __init__(self, acts: list[Act], rank: int, folder: Path) -> None:
        self._acts = [act for act in acts if act.rank == rank]
        self._folder = folder
        self._save = 0
        self._times: dict[tuple[int, str], int] = {}
        self.signs: Callable[[], tuple[int, int, int]] = lambda: (0, 0, 0)  # of the loop's progress

    def observe(self, stage: str) -> None:
        self._save += stage == "staged"
        key = self._save, stage
        self._times[key] = self._times.get(key, 0) + 1
        for act in self._acts:
            if (act.save, act.stage, act.nth) != (*key, self._times[key]):
                continue
            match act.do:
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "fail":
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                case "hold" if act.until == "waited":
                    num_polls = self.signs()[2]
                    until(lambda: self.signs()[2] > num_polls + 2, "nothing waits for it")  # noqa: B023
                case "hold":
                    until((self._folder / act.until).exists, f"no {act.until}")


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """What the broker answers; ``means`` are [known from this commit on, step, version, mean]."""

    last_step: int  # as commits report it
    ends_at: int  # in truth: a stop was planned
    means: list[tuple[int, int, PolicyVersion, float]] = []
    acts: list[Act] = []
    stops_at: int = sys.maxsize  # the commit with which this learner is asked to stop

    def evaluations(self, step: int) -> tuple[EvalPoint, ...]:
        return tuple(point(*rest) for known, *rest in self.means if known <= step)


def point(step: int, version: PolicyVersion, mean: float) -> EvalPoint:
    figures = EvalFigures(num_problems=1, num_answers=1, num_dropped=0, metrics={"mean@1": mean})
    return EvalPoint(step=step, overall=figures, by_source={}, versions=(version,))


class ScriptedLink(ReplayLink):
    """A trajectory file whose end comes as a broker reports it: first evaluations, then the end."""

    def __init__(self, path: Path, settings: LearnerSettings, script: Script) -> None:
        super().__init__(path, settings)
        self._run = settings.run
        self._script = script
        self._asked_at_end = False
        self._folder = path.parent
        self._version: PolicyVersion | None = None
        self.seen: list[dict[str, object]] = []

    def next_order(
        self, version: PolicyVersion, *, max_wait_s: float
    ) -> StepPlan | BatchNotReady | RunComplete:
        newest, best = newest_checkpoint(self._run.folder), read_best(self._run.checkpoints)
        ledger = read_ledger(newest).decode() if newest is not None else ""
        row = {"step": version.step, "newest": newest and newest.name, "ledger": ledger}
        self.seen.append(row | {"best": best and best.checkpoint})
        if version.step < self._script.ends_at:
            return super().next_order(version, max_wait_s=max_wait_s)
        if self._asked_at_end:
            return RunComplete(evaluations=self._script.evaluations(sys.maxsize))
        self._asked_at_end = True
        return BatchNotReady(waiting_for=(), reason="", last_step=self._script.ends_at)

    def commit(
        self, version: PolicyVersion, metrics: dict[str, float], num_tokens: int
    ) -> StepCommitted:
        super().commit(version, metrics, num_tokens)
        self._version = version
        (self._folder / f"committed-{version.step}").touch()
        evaluations = self._script.evaluations(version.step)
        return StepCommitted(evaluations=evaluations, last_step=self._script.last_step)

    def take_over(
        self, step: int, checkpoint: str, resumed: CheckpointInfo | None
    ) -> PolicyVersion:
        self._version = super().take_over(step, checkpoint, resumed)
        return self._version

    def seal(self, version: PolicyVersion, *, step: int, oldest_kept: int) -> None:
        if version != self._version:
            raise RefusedError(f"the learner is at {version.label}, the run at {self._version}")
        newest = newest_checkpoint(self._run.folder)
        row = [version.label, step, oldest_kept, newest and newest.name]
        with (self._folder / "seals").open("a") as file:
            file.write(json.dumps(row) + "\n")

    def ledger_snapshot(self, version: PolicyVersion) -> bytes:
        return f"{version.label}, asked {len(self.seen)} times".encode()


class ScriptedStop:
    """Asks to stop once a step is committed; ``stopped`` is there once that was heard."""

    def __init__(self, folder: Path, step: int) -> None:
        self._folder = folder
        self._step = step

    @property
    def requested(self) -> bool:
        is_so = (self._folder / f"committed-{self._step}").exists()
        if is_so:
            (self._folder / "stopped").touch()
        return is_so


def main(config: Path, file: Path, script: str, rank: int, *overrides: str) -> None:
    settings = learner_settings(load_table(config, list(overrides)))
    device.prepare()
    device.set_threads(1)
    device.set_deterministic()
    from slipstream.learner.coordinator import Coordinator
    from slipstream.learner.loop import LearnerLoop
    from slipstream.learner.model.topology import destroy_topology, init_topology
    from slipstream.learner.starting_policy import build_policy
    from slipstream.learner.training.algorithm import algorithm_of
    from slipstream.wire.process.phases import PhaseClock

    learner = settings.learner
    topology = init_topology(
        rank=rank,
        world_size=learner.ranks,
        sizes=learner.sizes,
        store=FileStore(str(config.parent / "store"), learner.ranks),
        seed=1,
        timeout_s=HANG_S,
    )
    algorithm = algorithm_of(settings)
    policy = build_policy(settings, algorithm, topology)
    scripted = msgspec.json.decode(script, type=Script)
    link = ScriptedLink(file, settings, scripted)
    leader = link if rank == 0 else None
    fetching = link if topology.leads_replica else None
    folder = config.parent
    coordinator = Coordinator(leader, ScriptedStop(folder, scripted.stops_at))
    acts = Acts(scripted.acts, rank, folder)

    class Probed(Health):
        def begins(self, signs: Callable[[], Any], missing: Callable[[], str] = str) -> None:
            acts.signs = signs
            super().begins(signs, missing)

    LearnerLoop(
        settings,
        topology,
        policy,
        algorithm,
        fetching,
        coordinator,
        PhaseClock(),
        observe_saves=acts.observe,
    ).run(Probed())
    sys.stdout.write(json.dumps(link.seen))
    destroy_topology()


if __name__ == "__main__":
    run(main)
