"""One publish to some members: offer, then receive and adopt, or pause, load, verify and commit.

A member that fails is left out; the others continue. One that may hold a mixture stays paused; its
next transaction brings it a whole version.
"""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import assert_never

from slipstream.weightbus.relay.member import Member
from slipstream.weightbus.relay.phase_times import PhaseTimes
from slipstream.weightbus.relay.publication import Publication
from slipstream.weightbus.relay.publish_state import LIVE, STAGED, Phase, PublishState, is_check_due
from slipstream.weightbus.relay.transports.base import (
    MembersFailedError,
    T,
    Transport,
    each,
    slowest,
)
from slipstream.weightbus.version.engine_checksums import engine_layout_of, refuse
from slipstream.wire.errors import PublishError
from slipstream.wire.messages.manifest import WeightManifest
from slipstream.wire.messages.weightbus import (
    Abandon,
    Adopt,
    Commit,
    Offer,
    Pause,
    PublishRecord,
    Verify,
)


class Transaction:
    """Brings members to a version. Use it once."""

    def __init__(
        self,
        publication: Publication,
        members: Sequence[Member],
        transport: Transport,
        engine_check_every: int,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._publication = publication
        self._transport = transport
        self._check_every = engine_check_every
        self._now = now
        self._all = list(members)
        self._state = PublishState(members, LIVE if transport.writes_live else STAGED)
        self._num_in_flight: dict[str, int] = {}
        self._digest = ""
        self._digests: dict[str, str] = {}
        self._within_adopt: dict[str, float] = {}  # seconds by phase, of the slowest member

    async def run(self) -> PublishRecord:
        """Run all phases. Failures of engines and agents do not raise: they are in the record."""
        version, at_s, started_s = self._publication.version, time.time(), self._now()
        times = PhaseTimes(self._now)
        for member in self._all:
            member.receiving = version
            member.num_publishes += 1
            member.is_checked = is_check_due(
                self._check_every, member.num_publishes, is_repair=bool(member.failure)
            )
        adopted: dict[str, float] = {}
        try:
            await self._phases(times)
            for member in self._state.members:
                member.holds(version)
                member.failure = ""
                adopted[member.name] = self._now() - started_s
            await self._abandon()
            if adopted:  # only the record needs the digest
                self._digest = await self._publication.digest()
        finally:
            for member in self._all:
                member.receiving = None
        return PublishRecord(
            version=version,
            at_s=at_s,
            adopted_by=adopted,
            failed={member.name: reason for member, reason in self._state.failed.items()},
            num_in_flight=self._num_in_flight,
            digest=self._digest,
            engine_digests=self._digests,
            phase_seconds=times.seconds,
            num_bytes=self._publication.snapshot.layout.num_bytes,
            fetched_bytes=dict(self._transport.fetched_bytes),
            transports={member.name: self._transport.name for member in self._all},
        )

    async def _phases(self, times: PhaseTimes) -> None:
        publication = self._publication
        publication.begin_digests()
        manifest = publication.undigested
        if self._transport.needs_digests:
            manifest = await publication.manifest()
        for of in {engine_layout_of(member.join) for member in self._all if member.is_checked}:
            if publication.knows(of):  # begin now, not while engines wait
                publication.begin_checksums(of)
        times.lap("digest")
        names = {
            Phase.OFFER: "offer",
            Phase.PREPARE: self._transport.prepare_phase,
            Phase.ADOPT: "order",  # what remains of it after the phases that agents report
            Phase.PREPARE_AGAIN: "pause",
            Phase.LOAD: self._transport.load_phase,
            Phase.VERIFY: "verify",
            Phase.COMMIT: "commit",
        }
        state = self._state
        while (phase := state.phase) is not None:
            state.done(await self._do(phase, manifest))
            if state.phase is not phase and phase in names:
                within = {
                    Phase.PREPARE: self._transport.within_prepare,
                    Phase.ADOPT: self._within_adopt,
                }
                times.lap(names[phase], within.get(phase))

    async def _do(self, phase: Phase, manifest: WeightManifest) -> Mapping[Member, str]:
        """Run a phase with all remaining members; return the failed ones with reasons."""
        members, name = self._state.members, self._transport.name
        try:
            match phase:
                case Phase.OFFER:
                    return await self._each(
                        lambda m: m.request(
                            lambda n: Offer(command_id=n, manifest=manifest, transport=name)
                        )
                    )
                case Phase.PREPARE | Phase.PREPARE_AGAIN:
                    if members:
                        await self._transport.prepare(self._publication, members)
                case Phase.ADOPT:
                    return await self._each(self._adopt)
                case Phase.PAUSE:
                    return await self._each(self._pause)
                case Phase.LOAD:
                    if members:
                        await self._transport.load(self._publication, members)
                case Phase.VERIFY:
                    return await self._each(self._verify)
                case Phase.COMMIT:
                    return await self._each(self._commit)
                case _:
                    assert_never(phase)
        except MembersFailedError as error:
            return error.reasons
        return {}

    async def _each(self, work: Callable[[Member], Awaitable[T]]) -> dict[Member, str]:
        return (await each(self._state.members, work))[1]

    async def _adopt(self, member: Member) -> None:
        publication, engine_layout = self._publication, engine_layout_of(member.join)
        expected, digest = dict[str, str](), ""
        if member.is_checked and publication.knows(engine_layout):
            since_s = self._now()
            expected = await publication.expected(engine_layout)
            digest = publication.digest_expected(engine_layout)
            slowest(self._within_adopt, {"expect": self._now() - since_s})
        outcome = await member.request(
            lambda n: Adopt(
                command_id=n, version=publication.version, digest=digest, probe=publication.probe
            ),
            timeout_s=self._transport.load_timeout_s,
        )
        if outcome.checksums:
            refuse(expected, outcome.checksums)
        if digest and outcome.digest != digest:
            raise PublishError("its agent compared another digest than the relay's")
        self._num_in_flight[member.name] = outcome.num_in_flight
        if outcome.digest:
            self._digests[member.name] = outcome.digest
        slowest(self._within_adopt, outcome.phase_seconds)

    async def _pause(self, member: Member) -> None:
        outcome = await member.request(lambda n: Pause(command_id=n))
        self._num_in_flight[member.name] = outcome.num_in_flight

    async def _verify(self, member: Member) -> None:
        """Compare the engine's checksums, if a check is due that ``Commit`` cannot do."""
        engine_layout = engine_layout_of(member.join)
        if not member.is_checked or self._publication.digest_expected(engine_layout):
            return
        outcome = await member.request(lambda n: Verify(command_id=n, wants="digest"))
        expected = await self._publication.expected(engine_layout)  # computed meanwhile
        if self._publication.digest_expected(engine_layout) != outcome.digest:
            asked = await member.request(lambda n: Verify(command_id=n, wants="checksums"))
            refuse(expected, asked.checksums)
        self._digests[member.name] = outcome.digest

    async def _commit(self, member: Member) -> None:
        """Switch the engine to the version, if its checksums are the expected ones."""
        engine_layout, version = engine_layout_of(member.join), self._publication.version
        probe = self._publication.probe
        is_verified = not member.is_checked or member.name in self._digests
        digest = "" if is_verified else self._publication.digest_expected(engine_layout)
        outcome = await member.request(
            lambda n: Commit(command_id=n, version=version, digest=digest, probe=probe)
        )
        if outcome.checksums:
            refuse(await self._publication.expected(engine_layout), outcome.checksums)
        if digest:
            self._digests[member.name] = digest

    async def _abandon(self) -> None:
        """Close the relay's side, then release left-out members; torn engines stay paused."""
        failed = self._state.failed
        if not failed:
            return
        await self._transport.close()
        for member, reason in failed.items():
            member.failure = reason
            member.holds(None)
        for member, reason in failed.items():  # agents execute the next command after this one
            with suppress(PublishError):
                member.send(lambda n, why=reason: Abandon(command_id=n, reason=why))  # type: ignore[misc]
