"""The relay's commands, carried out at one engine: receive, adopt, and those of a collective."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

from slipstream.weightbus.agent.engine import Adoption, EngineWeights
from slipstream.weightbus.agent.fetcher import BucketFetcher
from slipstream.weightbus.agent.staging import Staging
from slipstream.weightbus.agent.tensor_set import TensorSet, has_tower, mismatch
from slipstream.weightbus.version.adapter_checksums import expected_of_version
from slipstream.weightbus.version.disk import check_folder
from slipstream.weightbus.version.engine_checksums import (
    EngineLayout,
    digest_of,
    refuse,
    without_tower,
)
from slipstream.weightbus.version.mapped_file import open_mapped
from slipstream.weightbus.version.tensor_bits import bits_in_folder
from slipstream.wire.errors import EngineError, PublishError
from slipstream.wire.messages.bounds import shortened
from slipstream.wire.messages.manifest import WeightManifest
from slipstream.wire.messages.probe import ProbeLogprobs
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import (
    Abandon,
    Adopt,
    BulkDoor,
    CommandOutcome,
    Commit,
    LoadBucket,
    Offer,
    OpenGroup,
    Pause,
    ReceiveVersion,
    RelayAddress,
    Verify,
)

_log = logging.getLogger(__name__)
Order: TypeAlias = (
    OpenGroup | Abandon | Offer | ReceiveVersion | Adopt | Pause | LoadBucket | Verify | Commit
)


OnAdopt: TypeAlias = Callable[[PolicyVersion, float | None], None]
OnProbe: TypeAlias = Callable[[PolicyVersion, ProbeLogprobs | None, Sequence[str]], None]


def ignore(_version: PolicyVersion, _probe: ProbeLogprobs | None, _engines: Sequence[str]) -> None:
    """Leave an engine unproven."""


class OtherHosts(Protocol):
    """The other hosts of an engine whose ranks are on several."""

    async def fetch_too(
        self, receive: ReceiveVersion, relay: RelayAddress, *, may_be_read: bool
    ) -> int:
        """Order each host to fetch a version into its memory; return the bytes that they fetched.

        Raises PublishError. With ``may_be_read``, ranks may still load the previous version
        from its memory, so this one is fetched into other memory.
        """
        ...


async def fetch_into(
    staging: Staging,
    manifest: WeightManifest,
    fetcher: BucketFetcher,
    sources: Sequence[Sequence[BulkDoor]],
    first_part: int,
) -> Path:
    """Fetch a version into the memory of this host; return its folder.

    ``sources`` and ``first_part`` are those of ReceiveVersion.

    Raises:
        PublishError: the version did not arrive whole.
    """
    try:
        receiving = fetcher.receiving(manifest, sources, first_part)
        folder = await staging.receive(
            manifest,
            lambda index: receiving.fetch(index, staging.base(index)),
            order=receiving.order,
            ahead=receiving.ahead,
            rejected=receiving.rejected,
        )
    except PublishError:
        fetcher.reconnect()
        raise
    fetcher.traffic.copied_bytes += manifest.num_bytes
    fetcher.engines = receiving.engines
    return folder


class EngineUpdates:
    """Version of one engine, and the publish that it takes part in."""

    def __init__(
        self,
        engine: EngineWeights,
        *,
        tensors: TensorSet,
        staging: Staging,
        on_pause: Callable[[], None],
        on_adopt: OnAdopt,
        on_probe: OnProbe = ignore,
        engine_layout: EngineLayout | None = None,
        others: OtherHosts | None = None,
    ) -> None:
        """Control an engine with these tensors; an ``engine_layout`` of None is one rank on a CPU.

        ``on_adopt`` gets the version that the engine generates with, and the seconds that the
        engine stood still for it; None is all the time since ``on_pause``.
        ``others`` are the hosts with the rest of its ranks.
        """
        self._engine = engine
        self._others = others
        self._engine_layout = engine_layout or EngineLayout()
        self._tensors = tensors
        self._staging = staging
        self._on_pause = on_pause
        self._on_adopt = on_adopt
        self._on_probe = on_probe
        self._manifest: WeightManifest | None = None  # the offered version
        self._received: Path | None = None
        self._expected: Mapping[str, str] | None = None  # checksums that were computed here
        self._is_out_of_sight = False  # another process's memory cannot be opened here
        self._fetched_there = 0  # bytes of the last version that other hosts fetched
        self._engines: tuple[str, ...] = ()  # other engines that served the received version
        self._checksums: dict[str, str] = {}  # the engine's last answer
        self._group = ""  # name of the engine's collective; empty without one
        self._before: PolicyVersion | None = None  # version before the pause
        self._is_torn = False
        self._is_open = False  # the engine has an open update
        self._has_failed = False  # in the current publish
        self.failures: list[str] = []  # failed publishes since the last adopted one
        self.is_paused = False
        self.adopted: PolicyVersion | None = None

    async def execute(self, command: Order, fetcher: BucketFetcher) -> CommandOutcome:
        """Carry out a command; a failure is returned as its outcome."""
        number = command.command_id
        try:
            match command:
                case Offer(manifest=manifest):
                    self._offer(manifest)
                case OpenGroup():
                    await self._open_group(command)
                case ReceiveVersion():
                    return await self._receive(command, fetcher)
                case Adopt():
                    return await self._adopt(command)
                case Pause():
                    self._pausing()
                    in_flight = await self._engine.pause_for_update()
                    self._is_open = True
                    return CommandOutcome(command_id=number, num_in_flight=in_flight)
                case LoadBucket(index=index, group_name=group_name):
                    await self._load_bucket(index, group_name)
                case Verify():
                    return await self._verify(command)
                case Commit():
                    return await self._commit(command)
                case Abandon(reason=reason):
                    if self._is_torn or self._has_failed:  # else another engine's failure
                        self.failures.append(reason)
                    self._lose(command)
                    await self.abandon(reason)
        except (EngineError, PublishError) as error:
            self._has_failed = True
            self._lose(command)
            _log.warning("%s failed: %s", type(command).__name__, error)
            return CommandOutcome(command_id=number, error=shortened(str(error)))
        return CommandOutcome(command_id=number)

    def _lose(self, command: Order) -> None:
        """End the waits for a version whose publish failed before it was received."""
        manifest = (
            command.manifest if isinstance(command, Offer | ReceiveVersion) else self._manifest
        )
        if manifest is not None:
            self._staging.held.lose(manifest.version)

    def _offer(self, manifest: WeightManifest) -> None:
        if difference := mismatch(manifest, self._tensors):
            raise PublishError(f"refused {manifest.version.label}: {difference}")
        runs = self.adopted or self._before
        if runs is not None and manifest.version < runs:
            raise PublishError(f"refused {manifest.version.label}: this engine ran {runs.label}")
        self._manifest = manifest
        self._received, self._engines = None, ()
        self._expected = None
        self._has_failed = False

    async def _open_group(self, command: OpenGroup) -> None:
        await self._leave_group()
        self._group = command.group_name  # set first: a cancelled call may still join the group
        await self._engine.open_group(
            host=command.host,
            port=command.port,
            group_name=command.group_name,
            rank=command.rank,
            world_size=command.world_size,
            backend=command.backend,
        )
        _log.info("in a collective of %d", command.world_size)

    async def _leave_group(self) -> None:
        self._is_open = False  # closing a group closes the update
        if self._group:
            group, self._group = self._group, ""
            await self._engine.close_group(group)

    async def _receive(self, command: ReceiveVersion, fetcher: BucketFetcher) -> CommandOutcome:
        """Get a version; compute its expected checksums if the relay cannot."""
        manifest, engine_layout = command.manifest, self._engine_layout
        self._offer(manifest)
        received = await self._fetch(command, fetcher)
        since_s = time.monotonic()
        if command.is_checked:
            self._expected = await asyncio.to_thread(
                lambda: expected_of_version(bits_in_folder(received, manifest), engine_layout)
            )
        seconds = {"expect": time.monotonic() - since_s, **await self._stage(received)}
        self._received = received
        num_bytes = 0 if command.path else self._staging.fetched_bytes + self._fetched_there
        return CommandOutcome(
            command_id=command.command_id,
            num_bytes=num_bytes,
            path="" if command.path else self._staging.path,
            phase_seconds=seconds,
        )

    async def _stage(self, received: Path) -> Mapping[str, float]:
        """Have the engine load a version next to the one that it generates with, if it has room.

        After a failed publish it does not: the version is loaded into the live weights.
        """
        if self.failures:
            return {}
        self._staging.may_be_read = True  # stays set if no answer comes
        seconds = await self._engine.stage_folder(received, self._offered.version)
        self._staging.may_be_read = False
        return seconds

    async def _fetch(self, command: ReceiveVersion, fetcher: BucketFetcher) -> Path:
        """Get a version on every host of the engine; return the folder of this one."""
        if self._others is None:
            mapped = await self._map(command) if command.mapped else None
            return mapped or await self._fetch_here(command, fetcher)
        if command.path or fetcher.address is None:
            raise PublishError("every host of this engine fetches a version from a relay")
        there = self._others.fetch_too(
            command, fetcher.address, may_be_read=self._staging.may_be_read
        )
        try:
            async with asyncio.TaskGroup() as group:
                elsewhere = group.create_task(there)
                here = group.create_task(self._fetch_here(command, fetcher))
        except* PublishError as errors:
            self._staging.held.end()  # also if it was whole on this host
            raise PublishError(str(errors.exceptions[0])) from errors
        self._fetched_there = elsewhere.result()
        return here.result()

    async def _map(self, command: ReceiveVersion) -> Path | None:
        """Return a folder with another process's own file; None if it is out of sight here.

        Raises:
            PublishError: the file holds another version, or other bytes.
        """
        path, manifest = Path(command.mapped), command.manifest
        try:
            descriptor = await asyncio.to_thread(open_mapped, path, manifest)
        except OSError as error:
            if not self._is_out_of_sight:
                self._is_out_of_sight = True
                _log.info("a version is fetched, which others of this host have: %s", error)
            return None
        folder = self._staging.show_mapped(manifest.version, descriptor)
        if command.is_checked:  # what the engine is compared with comes from this very file
            await asyncio.to_thread(check_folder, folder, manifest)
        return folder

    async def _fetch_here(self, command: ReceiveVersion, fetcher: BucketFetcher) -> Path:
        manifest, staging = command.manifest, self._staging
        if command.path:
            await asyncio.to_thread(check_folder, Path(command.path), manifest)
            return Path(command.path)
        staging.may_be_read |= command.may_be_read
        folder = await fetch_into(staging, manifest, fetcher, command.sources, command.first_part)
        self._engines = fetcher.engines
        return folder

    async def _adopt(self, command: Adopt) -> CommandOutcome:
        """Switch the engine to the received version, or record that it may hold a mixture.

        The outcome has the engine's checksums if their digest is another than the relay's.

        Raises:
            PublishError: it was not received, or the engine differs from what was computed here.
        """
        version, received, expected = command.version, self._received, self._expected
        if received is None or self._manifest is None or version != self._manifest.version:
            raise PublishError(f"{version.label} was not received")
        digest = command.digest or (digest_of(expected) if expected is not None else "")
        adoption = await self._swap(received, version, digest)
        if adoption.differing:
            self._has_failed = True
            if expected is not None:
                refuse(expected, adoption.differing)
            return CommandOutcome(command_id=command.command_id, checksums=dict(adoption.differing))
        stood_s = sum(adoption.phase_seconds.values())
        self._generates(version, command.probe, stood_s)
        return CommandOutcome(
            command_id=command.command_id,
            num_in_flight=adoption.num_in_flight,
            digest=digest,
            phase_seconds=dict(adoption.phase_seconds),
        )

    async def _swap(self, received: Path, version: PolicyVersion, digest: str) -> Adoption:
        await self._leave_group()  # an update that it left open would interfere with the load
        ran = None if self.is_paused else self.adopted
        self._pausing()
        self._is_torn = True  # until the engine has answered
        self._staging.may_be_read = True  # stays set if no answer comes
        adoption = await self._engine.adopt_folder(received, version, digest=digest)
        self._staging.may_be_read = False
        if adoption.differing and not adoption.is_paused and ran is not None:
            self._generates_still(ran)
        return adoption

    def _generates(
        self, version: PolicyVersion, probe: ProbeLogprobs | None, stood_s: float | None = None
    ) -> None:
        """Record that the engine generates with a whole version."""
        self._is_torn = self.is_paused = False
        self.adopted = self._before = version
        self.failures.clear()
        self._on_adopt(version, stood_s)
        self._on_probe(version, probe, self._engines)

    def _generates_still(self, version: PolicyVersion) -> None:
        """Record that the engine stood still for nothing."""
        self._is_torn = self.is_paused = False
        self.adopted = version
        self._on_adopt(version, 0.0)

    async def _verify(self, command: Verify) -> CommandOutcome:
        """Close an update; answer with a digest of the engine, or its last checksums."""
        number = command.command_id
        if command.wants == "checksums":
            return CommandOutcome(command_id=number, checksums=self._checksums)
        await self._close_update()
        if command.wants == "nothing":
            return CommandOutcome(command_id=number)
        self._checksums = await self._engine.checksums()
        if self._manifest is not None and not has_tower(self._manifest):
            self._checksums = without_tower(self._checksums)
        return CommandOutcome(command_id=number, digest=digest_of(self._checksums))

    def _pausing(self) -> None:
        self._on_pause()
        if not self.is_paused:
            self._before = self.adopted
        self.is_paused = True
        self.adopted = None

    async def _load_bucket(self, index: int, group_name: str) -> None:
        buckets = self._offered.buckets
        if not self.is_paused or group_name != self._group:
            raise PublishError(f"bucket {index} comes out of order")
        self._is_torn = True
        if not self._is_open:  # the group was opened again since the pause
            await self._engine.begin_update()
            self._is_open = True
        last = index == len(buckets) - 1
        await self._engine.load_bucket(buckets[index], group_name=group_name, last=last)

    async def _close_update(self) -> None:
        if self._is_open:
            await self._engine.end_update()
            self._is_open = False

    async def _commit(self, command: Commit) -> CommandOutcome:
        number, version = command.command_id, command.version
        if version != self._offered.version or not self._is_torn:
            raise PublishError(f"{version.label} was not loaded")
        if self._is_open:
            differing = await self._engine.finish_update(version, digest=command.digest)
            self._is_open = False
            if differing:
                return CommandOutcome(command_id=number, checksums=dict(differing))
        else:
            await self._engine.label(version)
            self._is_torn = False
            self._before = version  # set first: the next line may fail
            await self._engine.resume()
        self._staging.free()  # the next version arrives over the collective
        self._generates(version, command.probe)
        return CommandOutcome(command_id=number, digest=command.digest)

    async def abandon(self, why: str) -> None:
        """Leave a failed publish; the engine generates again if no byte has moved."""
        can_resume = self.is_paused and not self._is_torn and self._before is not None
        if not self._group and not can_resume:
            return
        _log.warning("publish abandoned: %s", why)
        await self._leave_group()
        if can_resume and self._before is not None:
            try:
                await self._engine.resume()
            except EngineError as error:
                _log.warning("the engine stays paused: %s", error)
            else:
                self.is_paused = False
                self.adopted = self._before
                self._on_adopt(self._before, None)

    @property
    def _offered(self) -> WeightManifest:
        if self._manifest is None:
            raise PublishError("no version was offered")
        return self._manifest
