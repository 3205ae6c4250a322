"""How soon a late joiner runs the newest version, against one transfer to the engines there."""

import asyncio
import statistics
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.broker.process import work_folder
from benchmarks.weightbus.agent import SIZES
from benchmarks.weightbus.light_bus import Agent
from benchmarks.weightbus.model import written_slots
from slipstream.weightbus.config import WeightBusSection
from slipstream.weightbus.net.compatibility import installed_libraries
from slipstream.weightbus.relay.publisher import Publisher
from slipstream.weightbus.relay.served import Versions
from slipstream.wire.messages.relay import OpenMemory
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import PublishRecord
from slipstream.wire.settings.sections import RunSection, relay_address

_LONGEST_S = 60.0


@dataclass(slots=True)
class JoinFigures:
    """Seconds of each round."""

    num_bytes: int
    transfer: list[float] = field(default_factory=list)  # receive and load, engines already there
    publish: list[float] = field(default_factory=list)  # offer to adopted, engines already there
    join: list[float] = field(default_factory=list)  # from its Join to adopted, the late one
    phases: list[dict[str, float]] = field(default_factory=list)  # of that

    @property
    def ratio(self) -> float:
        pairs = zip(self.join, self.transfer, strict=True)
        return statistics.median(join / transfer for join, transfer in pairs)

    @property
    def ratio_to_publish(self) -> float:
        pairs = zip(self.join, self.publish, strict=True)
        return statistics.median(join / publish for join, publish in pairs)


def measure_late_join(sizes: str, rounds: int, *, check_every: int = 1) -> JoinFigures:
    """Publish to a member over TCP, then let another agent join, in turns."""
    with work_folder() as folder:
        return asyncio.run(_measure(folder, sizes, rounds, check_every))


async def _measure(folder: Path, sizes: str, rounds: int, check_every: int) -> JoinFigures:
    model = SIZES[sizes]
    layout = model.layout()
    memory = written_slots(model)
    (folder / "sockets").mkdir(mode=0o700)
    records: asyncio.Queue[PublishRecord] = asyncio.Queue(64)
    versions = Versions(folder / "weights")
    versions.open(OpenMemory(epoch=1, paths=memory.paths, layout=layout))
    publisher = Publisher(
        WeightBusSection(engine_check_every=check_every),
        versions,
        on_record=records.put,
        libraries=installed_libraries(),
    )
    sockets = folder / "sockets"
    serving = asyncio.create_task(publisher.run(relay_address(RunSection(socket_dir=str(sockets)))))
    agents = [Agent(folder, "there", "tcp", sizes)]
    figures = JoinFigures(layout.num_bytes)
    try:
        for step in range(rounds + 1):
            version = PolicyVersion(1, step)
            versions.written(1, versions.reserve(1), version)
            if (publication := versions.find(version)) is not None:
                publication.path = ""  # it is fetched, as by engines of other hosts
            record = await _record(records, "there")
            late = Agent(folder, f"late{step}", "collective", sizes)
            agents.append(late)
            joined = await _record(records, f"late{step}")
            adopted_s = await asyncio.to_thread(late.adopted_s, step)
            late.end()
            if step == 0:
                continue  # it warms up
            phases = record.phase_seconds
            figures.transfer.append(phases["receive"] + phases["load"])
            figures.publish.append(record.adopted_by["there"])
            figures.phases.append(joined.phase_seconds)
            figures.join.append(adopted_s - late.joined_s())
    finally:
        for agent in agents:
            agent.end()
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving
        memory.close()
    return figures


async def _record(records: asyncio.Queue[PublishRecord], name: str) -> PublishRecord:
    """Return the record of the next publish to a member."""
    while True:
        record = await asyncio.wait_for(records.get(), _LONGEST_S)
        if name in record.failed:
            raise RuntimeError(f"{name}: {record.failed[name]}")
        if name in record.adopted_by:
            return record
