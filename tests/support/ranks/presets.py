"""A learner that trains one run after another: importing its libraries takes longer than a run.

Usage: presets
Reads a line [CONFIG, OVERRIDE...] in JSON, trains that run to its end, writes a report as one line,
and so on until its input ends.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]
from typing_extensions import override

from slipstream.learner.batches.broker_link import LeaderLink
from slipstream.learner.config import LearnerSettings, learner_settings
from slipstream.learner.model import device
from slipstream.learner.publish.relay_process import RelayLaunch
from slipstream.wire.files.checkpoints import CheckpointInfo
from slipstream.wire.messages.broker import StepCommitted
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.process.background import BackgroundLoop
from slipstream.wire.process.logs import start_logging
from slipstream.wire.process.phases import PhaseClock
from slipstream.wire.settings.load import load_table
from tests.support.published import publish
from tests.support.waiting import HANG_S


class FollowedLink(LeaderLink):
    """Gives scripted engines, without weights, their versions, and keeps what was committed."""

    publishes = False

    def __init__(self, loop: BackgroundLoop, settings: LearnerSettings, clock: PhaseClock) -> None:
        super().__init__(loop, settings, clock, lambda: False, relay=RelayLaunch())
        self._folder = settings.run.folder
        self.committed: list[dict[str, float]] = []

    @override
    def take_over(
        self, step: int, checkpoint: str, resumed: CheckpointInfo | None
    ) -> PolicyVersion:
        version = super().take_over(step, checkpoint, resumed)
        publish(self._folder, version)
        return version

    @override
    def commit(
        self, version: PolicyVersion, metrics: dict[str, float], num_tokens: int
    ) -> StepCommitted:
        answer = super().commit(version, metrics, num_tokens)
        publish(self._folder, version)
        self.committed.append(dict(metrics))
        return answer


def digest(model: torch.nn.Module) -> str:
    parts = [tensor.detach().numpy().tobytes() for tensor in model.parameters()]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def main() -> None:
    device.prepare()
    device.set_threads(1)
    from slipstream.learner.coordinator import Coordinator
    from slipstream.learner.loop import LearnerLoop
    from slipstream.learner.model.topology import destroy_topology, init_topology
    from slipstream.learner.starting_policy import build_policy
    from slipstream.learner.stop import StopRequest
    from slipstream.learner.training.algorithm import algorithm_of

    topology = init_topology(rank=0, world_size=1, store=HashStore(), seed=1, timeout_s=HANG_S)
    for line in sys.stdin:
        config, *overrides = json.loads(line)
        settings = learner_settings(load_table(Path(config), overrides))
        algorithm, clock = algorithm_of(settings), PhaseClock()
        policy = build_policy(settings, algorithm, topology)
        report: dict[str, Any] = {"weights": [digest(policy.model)]}
        with BackgroundLoop() as loop:
            link = FollowedLink(loop, settings, clock)
            try:
                coordinator = Coordinator(link, StopRequest())
                LearnerLoop(settings, topology, policy, algorithm, link, coordinator, clock).run()
            finally:
                link.close()
        report["weights"].append(digest(policy.model))
        report["committed"] = link.committed
        sys.stdout.write(json.dumps(report) + "\n")
        sys.stdout.flush()
    destroy_topology()


if __name__ == "__main__":
    start_logging("learner")
    main()
