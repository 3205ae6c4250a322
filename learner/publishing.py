"""One rank's part in publishing: the versions that it writes, and the relay of its host."""

from slipstream.learner.coordinator import Coordinator
from slipstream.learner.model.collectives import gather_bytes
from slipstream.learner.model.rank_model import RankModel
from slipstream.learner.model.topology import Topology
from slipstream.learner.publish.contents import Contents
from slipstream.learner.publish.part_link import PartLink
from slipstream.learner.publish.weight_writer import WeightWriter
from slipstream.wire.errors import PublishError
from slipstream.wire.messages.probe import ProbeLogprobs
from slipstream.wire.messages.versions import PolicyVersion


class Publishing:
    """Publishes versions of one model; every rank calls every method."""

    def __init__(
        self,
        model: RankModel,
        topology: Topology,
        coordinator: Coordinator,
        *,
        bucket_bytes: int,
        contents: Contents,
        in_parts: bool,
        part: PartLink | None,
        epoch: int,
    ) -> None:
        """Make the memories and start the relays.

        Every host keeps the tensors that it writes if ``in_parts``, else the first keeps all.
        ``part`` is this host's part relay, on its first rank unless that is rank 0.
        """
        self._coordinator = coordinator
        self._writer = writer = WeightWriter(
            model, topology, bucket_bytes=bucket_bytes, contents=contents, in_parts=in_parts
        )
        run_id = coordinator.agreed(coordinator.run_id, str)
        self._part = part if part is not None and 0 < writer.part < writer.num_parts else None
        if self._part is not None:
            self._part.open(writer.paths, writer.layout, epoch=epoch, run_id=run_id)
        keys: list[str] = []
        if writer.num_parts > 1:
            mine = self._part.public if self._part is not None else ""
            keys = [key.decode() for key in gather_bytes(mine.encode()) if key]
        coordinator.open_weights(writer.paths, writer.layout, part_keys=keys)

    def write(self, version: PolicyVersion) -> int:
        """Write this rank's share of a version; return the slot written to.

        Raises:
            PublishError: on every rank, if a tensor holds NaN or inf.
        """
        coordinator = self._coordinator
        slot = coordinator.reserve()
        if self._part is not None:
            self._part.writing(slot)
        self._writer.label(slot, None)
        coordinator.barrier()  # no rank writes to a slot that is labelled, or that a part serves
        bad = self._writer.write(slot)
        if coordinator.on_any(bool(bad)):
            name = bad or "a tensor that another learner rank's log names"
            raise PublishError(f"{version.label} is not published: {name} holds NaN or inf")
        return slot

    def publish(self, version: PolicyVersion, slot: int, probe: ProbeLogprobs | None) -> None:
        """Hand the version written to the relays, with its probe; the transfer does not wait."""
        self._writer.label(slot, version)
        if self._part is not None:
            self._part.written(version, slot)
        self._coordinator.publish(version, slot, probe)

    def end(self) -> None:
        """Stop this host's part relay: no version will follow."""
        if self._part is not None:
            self._part.end()
