"""One publish to some members: offer -> transfer -> verify -> commit -> adopt.

Whoever fails is left out and the others go on. A member that may hold a mixture stays paused; its
next transaction brings it a whole version.
"""

import time
from collections.abc import Awaitable, Callable, Sequence

from weightbus.engine_checksums import differing, digest_of
from weightbus.laps import Laps
from weightbus.member import Member
from weightbus.publication import Publication
from weightbus.transport import MembersFailedError, T, Transport, each
from wire.bus import Abandon, Commit, Offer, Outcome, Pause, PublishRecord, Verify
from wire.errors import PublishError


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
        self._members = list(members)  # that are still with us
        self._failed: dict[Member, str] = {}
        self._num_in_flight: dict[str, int] = {}
        self._digest = ""
        self._digests: dict[str, str] = {}

    async def run(self) -> PublishRecord:
        """Do all of it; what engines and agents do raises nothing: the record says what failed."""
        version, at_s, started_s = self._publication.version, time.time(), self._now()
        laps = Laps(self._now)
        for member in self._all:
            member.receiving = version
            member.num_publishes += 1
        adopted: dict[str, float] = {}
        try:
            await self._phases(laps)
            for member in self._members:
                member.holds(version)
                member.failure = ""
                adopted[member.name] = self._now() - started_s
            await self._abandon()
            if adopted:  # nobody waits for it but the record
                self._digest = (await self._publication.manifest()).digest
        finally:
            for member in self._all:
                member.receiving = None
        return PublishRecord(
            version=version,
            at_s=at_s,
            adopted_by=adopted,
            failed={member.name: why for member, why in self._failed.items()},
            num_in_flight=self._num_in_flight,
            digest=self._digest,
            engine_digests=self._digests,
            phase_seconds=laps.seconds,
            num_bytes=self._publication.snapshot.layout.num_bytes,
            transports={member.name: self._transport.name for member in self._all},
        )

    async def _phases(self, laps: Laps) -> None:
        publication = self._publication
        publication.begin_digests()
        manifest = publication.undigested
        if self._transport.needs_digests:
            manifest = await publication.manifest()
        if self._check_every and any(member.join.device == "cpu" for member in self._members):
            publication.begin_checksums()  # not while engines are paused
        laps.lap("digest")
        name = self._transport.name
        await self._each(
            lambda m: m.tell(lambda n: Offer(command_id=n, manifest=manifest, transport=name))
        )
        laps.lap("offer")
        await self._prepare()
        laps.lap("receive" if name != "collective" else "group")
        paused = await self._each(lambda m: m.tell(lambda n: Pause(command_id=n)))
        self._num_in_flight = {m.name: outcome.num_in_flight for m, outcome in paused.items()}
        await self._prepare()  # a group is made anew if somebody was lost
        laps.lap("pause")
        await self._load()
        laps.lap("transfer" if name == "collective" else "load")
        await self._each(self._verify)
        laps.lap("verify")
        await self._each(lambda m: m.tell(lambda n: Commit(command_id=n, version=manifest.version)))
        laps.lap("commit")

    async def _each(self, work: Callable[[Member], Awaitable[T]]) -> dict[Member, T]:
        """Do something with all members; who fails is left out from here on."""
        done, failed = await each(self._members, work)
        self._leave_out(failed)
        return done

    def _leave_out(self, failed: dict[Member, str]) -> None:
        self._failed |= failed
        self._members = [member for member in self._members if member not in failed]

    async def _prepare(self) -> None:
        while self._members:
            try:
                await self._transport.prepare(self._publication, self._members)
            except MembersFailedError as error:
                self._leave_out(error.reasons)
            else:
                return

    async def _load(self) -> None:
        if not self._members:
            return
        try:
            await self._transport.load(self._publication, self._members)
        except MembersFailedError as error:
            torn = dict.fromkeys(self._members, "another engine of its group failed")
            self._leave_out(torn | error.reasons)

    async def _verify(self, member: Member) -> Outcome:
        """Close the update, and look at what the engine holds if it is time for that."""
        every = self._check_every
        is_due = (member.num_publishes - 1) % every == 0 if every else False
        checks = is_due or bool(member.failure)  # a repair is always looked at
        outcome = await member.tell(lambda n: Verify(command_id=n, wants_checksums=checks))
        if not checks:
            return outcome
        digest = digest_of(outcome.checksums)
        self._digests[member.name] = digest
        publication = self._publication
        if member.join.device == "cpu":
            wrong = differing(await publication.expected(), outcome.checksums)
            if wrong:
                raise PublishError(f"{len(wrong)} tensors differ in the engine: {wrong[:3]}")
        elif publication.gpu_digests and digest not in publication.gpu_digests:
            raise PublishError("the engine holds other tensors than the other engines")
        else:
            publication.gpu_digests.add(digest)
        return outcome

    async def _abandon(self) -> None:
        """Free who was left out: our end first, then theirs. Their engines stay paused if torn."""
        if not self._failed:
            return
        await self._transport.close()
        for member, why in self._failed.items():
            member.failure = why
            member.holds(None)
        await each(  # nobody waits for them: what they are told next they do after this
            list(self._failed),
            lambda m: m.send(lambda n: Abandon(command_id=n, reason=self._failed[m])),
        )
