"""One rank of a learner's loop on recorded batches; what a broker would answer besides is scripted.

Usage: loop CONFIG FILE SCRIPT_JSON RANK OVERRIDE...
Rank 0 prints what was on disk whenever it asked for a batch.
"""

import json
import sys
from pathlib import Path

import msgspec
from torch.distributed import FileStore  # type: ignore[attr-defined]

from slipstream.learner.batches.orders import StepPlan
from slipstream.learner.batches.replay_link import ReplayLink
from slipstream.learner.config import LearnerSettings, learner_settings
from slipstream.learner.model import device
from slipstream.wire.files.checkpoints import newest_checkpoint, read_best, read_ledger
from slipstream.wire.messages.broker import BatchNotReady, RunComplete, StepCommitted
from slipstream.wire.messages.status import EvalFigures, EvalPoint
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.settings.load import load_table
from tests.support.waiting import HANG_S


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """What the broker answers; ``means`` are [known from this commit on, step, version, mean]."""

    last_step: int  # as commits report it
    ends_at: int  # in truth: a stop was planned
    means: list[tuple[int, int, PolicyVersion, float]] = []

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
        evaluations = self._script.evaluations(version.step)
        return StepCommitted(evaluations=evaluations, last_step=self._script.last_step)

    def ledger_snapshot(self, version: PolicyVersion) -> bytes:
        return f"{version.label}, asked {len(self.seen)} times".encode()


def main(config: Path, file: Path, script: str, rank: int, overrides: list[str]) -> None:
    settings = learner_settings(load_table(config, overrides))
    device.prepare()
    device.set_threads(1)
    device.set_deterministic()
    from slipstream.learner.coordinator import Coordinator
    from slipstream.learner.loop import LearnerLoop
    from slipstream.learner.model.topology import destroy_topology, init_topology
    from slipstream.learner.starting_policy import build_policy
    from slipstream.learner.stop import StopRequest
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
    link = ScriptedLink(file, settings, msgspec.json.decode(script, type=Script))
    leader = link if rank == 0 else None
    fetching = link if topology.leads_replica else None
    coordinator = Coordinator(leader, topology, StopRequest())
    LearnerLoop(settings, topology, policy, algorithm, fetching, coordinator, PhaseClock()).run()
    sys.stdout.write(json.dumps(link.seen))
    destroy_topology()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5:])
