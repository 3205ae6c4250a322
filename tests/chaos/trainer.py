"""A learner whose weights are a hash of all that it was trained on.

It talks to the broker as the real one does: takes over, fetches ahead, commits, publishes, saves,
seals. Its weights show whether every step of the run was trained on exactly the groups that its
lineage names, and it writes down every batch that breaks a promise.
"""

import argparse
import asyncio
import errno
import hashlib
import json
import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from slipstream.broker.client import BrokerClient
from slipstream.wire.files.checkpoints import (
    INFO_FILE,
    LEDGER_FILE,
    checkpoint_name,
    checkpoints_in,
    ledger_file,
    read_checkpoint_info,
)
from slipstream.wire.messages.broker import (
    BatchDelivered,
    BatchNotReady,
    Done,
    FetchPayloads,
    GetLedgerSnapshot,
    Goodbye,
    LedgerSnapshotAnswer,
    Payloads,
    RejectBatch,
    RequestBatch,
    RunComplete,
    SealSteps,
    StepCommit,
    StepCommitted,
    TakeOver,
    TookOver,
)
from slipstream.wire.messages.codec import decode_payload
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.process.command_line import run_role
from slipstream.wire.process.logs import start_logging
from slipstream.wire.settings.load import load_table
from slipstream.wire.settings.sections import RunSection, run_section
from tests.support.checkpoint_infos import checkpoint_info
from tests.support.published import publish

STATE_FILE = "state.json"


@dataclass
class Weights:
    """A hash chain, and what went into it: by step the groups and the hash of their payloads."""

    digest: str = ""
    lineage: dict[int, tuple[list[int], str]] = field(default_factory=dict)

    def train(self, step: int, groups: list[int], data: str) -> None:
        assert step not in self.lineage
        self.lineage[step] = (groups, data)
        self.digest = chained(self.digest, groups, data)

    def dump(self) -> dict[str, object]:
        return {"digest": self.digest, "lineage": {str(s): one for s, one in self.lineage.items()}}

    @classmethod
    def load(cls, path: Path) -> "Weights":
        plain = json.loads(path.read_text())
        lineage = {int(s): (list(g), d) for s, (g, d) in plain["lineage"].items()}
        return cls(plain["digest"], lineage)


async def when_there_is_room(write: Callable[[], object]) -> None:
    """Write, again and again while the disk is full; a test that fills it makes room later."""
    while True:
        try:
            write()
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            await asyncio.sleep(0.05)
        else:
            return


def chained(digest: str, groups: list[int], data: str) -> str:
    return hashlib.sha256(f"{digest} {groups} {data}".encode()).hexdigest()


class Trainer:
    def __init__(
        self, run: RunSection, client: BrokerClient, *, save_every: int, die_at: list[str]
    ) -> None:
        self.run = run
        self.client = client
        self.save_every = save_every
        self.die_at = die_at
        self.rng = random.Random(os.getpid())
        self.weights = Weights()
        self.version = PolicyVersion(0, 0)

    def reach(self, point: str) -> None:
        """Die here, as often as the command line asks."""
        wanted = f"{point}:{self.version.step}"
        deaths = self.run.folder / "deaths"
        died = deaths.read_text().split() if deaths.exists() else []
        if died.count(wanted) < self.die_at.count(wanted):
            deaths.write_text(" ".join([*died, wanted]))
            os.kill(os.getpid(), signal.SIGKILL)

    def complain(self, what: str) -> None:
        with (self.run.folder / "complaints").open("a") as file:
            file.write(what + "\n")

    async def work(self) -> None:
        await self.begin()
        while (batch := await self.next_batch()) is not None:
            if await self.is_rejected(batch):
                continue
            ahead = asyncio.create_task(self.fetch_ahead())
            await self.train(batch)
            ahead.cancel()
            await asyncio.gather(ahead, return_exceptions=True)
        await self.save()
        final = self.run.folder / "final.json"
        await when_there_is_room(lambda: final.write_text(json.dumps(self.weights.dump())))
        await self.client.ask(Goodbye(), Done)

    async def begin(self) -> None:
        known = sorted(checkpoints_in(self.run.checkpoints), key=_version)
        step, name = 0, ""
        if known:
            self.weights = Weights.load(known[-1] / STATE_FILE)
            step, name = _version(known[-1]).step, known[-1].name
        took, _ = await self.client.ask(TakeOver(step=step, checkpoint=name), TookOver)
        self.version = took.version
        publish(self.run.folder, self.version)
        if known:
            await self.seal(step)

    async def next_batch(self) -> BatchDelivered | None:
        while True:
            question = RequestBatch(version=self.version, step=self.version.step, wait_s=0.5)
            answer, _ = await self.client.ask_any(question, extra_wait_s=0.5)
            match answer:
                case BatchDelivered():
                    return answer
                case RunComplete():
                    return None
                case BatchNotReady():
                    continue
                case _:
                    raise TypeError(answer)

    async def fetch_ahead(self) -> None:
        question = RequestBatch(version=self.version, step=self.version.step + 1, wait_s=0.2)
        await self.client.ask_any(question, extra_wait_s=0.2)

    async def is_rejected(self, batch: BatchDelivered) -> bool:
        """Every now and then a step has no finite gradient."""
        if self.rng.random() > 0.03:
            return False
        groups = tuple(group.group_id for group in batch.groups)
        reject = RejectBatch(
            version=self.version,
            step=batch.step,
            reason="nonfinite",
            groups=groups[: self.rng.randint(1, len(groups))],
            detail="chaos",
        )
        await self.client.ask(reject, Done)
        return True

    async def train(self, batch: BatchDelivered) -> None:
        step = self.version.step
        assert batch.step == step
        trajectories = [t for group in batch.groups for t in group.trajectories]
        keys = tuple((t.header.group_id, t.header.sibling) for t in trajectories)
        answer, frames = await self.client.ask(FetchPayloads(keys=keys), Payloads)
        assert answer.num_frames == len(frames) == len(keys)
        data = hashlib.sha256()
        for trajectory, frame in zip(trajectories, frames, strict=True):
            header = trajectory.header
            payload = decode_payload(frame)
            if payload.token_ids.shape != (header.num_tokens,):
                self.complain(f"payload of {header.group_id} is not its header's")
            for version, _ in header.tokens_by_version():
                if not 0 <= step - version.step <= self.run.staleness_bound:
                    self.complain(f"step {step} trains a token of {version.label}")
            data.update(frame)
        self.weights.train(step, [g.group_id for g in batch.groups], data.hexdigest())
        await asyncio.sleep(self.rng.uniform(0.0, 0.05))
        self.version = self.version.next()
        commit = StepCommit(version=self.version, metrics={"reward/mean": 0.0})
        await self.client.ask(commit, StepCommitted)
        self.reach("commit")
        await when_there_is_room(lambda: publish(self.run.folder, self.version))
        self.reach("publish")
        if self.version.step % self.save_every == 0:
            await self.save()

    async def save(self) -> None:
        """Write a checkpoint as the real one is laid out; then it counts."""
        step = self.version.step
        question = GetLedgerSnapshot(version=self.version)
        snapshot, _ = await self.client.ask(question, LedgerSnapshotAnswer)
        folder = self.run.checkpoints / checkpoint_name(step)
        temporary = self.run.checkpoints / f".{folder.name}"
        info = checkpoint_info(self.version, run_name=self.run.name, model=self.run.model)

        def write() -> None:
            temporary.mkdir(parents=True, exist_ok=True)
            (temporary / INFO_FILE).write_bytes(msgspec.json.encode(info))
            (temporary / LEDGER_FILE).write_bytes(ledger_file(snapshot.data))
            (temporary / STATE_FILE).write_text(json.dumps(self.weights.dump()))

        await when_there_is_room(write)
        self.reach("save")
        if folder.exists():
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()
        temporary.rename(folder)
        self.reach("seal")
        for old in sorted(checkpoints_in(self.run.checkpoints), key=_version)[:-2]:
            for path in old.iterdir():
                path.unlink()
            old.rmdir()
        await self.seal(step)

    async def seal(self, step: int) -> None:
        oldest = min(_version(path).step for path in checkpoints_in(self.run.checkpoints))
        seal = SealSteps(version=self.version, step=step, oldest_kept=min(oldest, step))
        await self.client.ask(seal, Done)


def _version(checkpoint: Path) -> PolicyVersion:
    return read_checkpoint_info(checkpoint).version


async def serve(run: RunSection, save_every: int, die_at: list[str]) -> None:
    client, _ = await BrokerClient.connect(
        run.broker_endpoint, role="learner", name="learner", outage_s=run.outage_s
    )
    try:
        await Trainer(run, client, save_every=save_every, die_at=die_at).work()
    finally:
        client.close()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--die-at", nargs="*", default=[])
    arguments = parser.parse_args()
    run = run_section(load_table(arguments.config))
    start_logging("learner")

    def body() -> int:
        asyncio.run(serve(run, arguments.save_every, arguments.die_at))
        return 0

    return run_role(body)


if __name__ == "__main__":
    raise SystemExit(main())
