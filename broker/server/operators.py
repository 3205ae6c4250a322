"""Reports of roles, and questions about the run: status, ledger, dead letters, the relay."""

from typing import TypeAlias, assert_never

from slipstream.broker.ledger.commands import Ledger
from slipstream.broker.ledger.leases import name_of
from slipstream.broker.ledger.state import MAX_DEAD_LETTERS
from slipstream.broker.report.run_report import RunReport
from slipstream.broker.report.telemetry import with_newest_steps
from slipstream.broker.server.clients import Clients
from slipstream.broker.server.reply import BrokerReply
from slipstream.broker.server.sessions import ClientSession
from slipstream.wire.errors import ForbiddenError, RefusedError
from slipstream.wire.messages.broker import (
    DeadLetters,
    DeadLettersHandled,
    Done,
    DropDeadLetters,
    EngineQuarantined,
    FindRelay,
    GetDeadLetters,
    GetLedger,
    GetStatus,
    LedgerAnswer,
    PublishReport,
    RelayHeard,
    RelayPlace,
    RelayReport,
    RetryDeadLetters,
    RoleReport,
    StatusAnswer,
)

_MAX_LETTERS = 100  # dead letters in one answer
_MAX_ITEMS = 1_000  # items of the ledger in one answer

Request: TypeAlias = (
    RoleReport
    | PublishReport
    | EngineQuarantined
    | RelayReport
    | FindRelay
    | GetStatus
    | GetLedger
    | GetDeadLetters
    | RetryDeadLetters
    | DropDeadLetters
)


class OperatorHandler:
    """Answers observers and operators, and takes the reports of roles."""

    def __init__(self, ledger: Ledger, clients: Clients, report: RunReport) -> None:
        self._ledger = ledger
        self._clients = clients
        self._report = report
        self._relay = RelayPlace(is_known=False)
        self._relay_of = ""  # the learner that took over when it was named

    def handle(self, session: ClientSession, request: Request) -> BrokerReply:
        """Carry out a request."""
        telemetry = self._report.telemetry
        match request:
            case RoleReport():
                telemetry.report(session.name, request)
            case PublishReport() | RelayReport():
                return self._reported(session, request)
            case EngineQuarantined(version=version, reason=reason):
                telemetry.quarantined(session.name, version, reason)
            case FindRelay():
                trains = _key_of(self._ledger.book.state.learner)
                is_named = _key_of(self._relay_of) == trains
                return BrokerReply(self._relay if is_named else RelayPlace(is_known=False))
            case GetStatus(newest_steps=count):
                status = with_newest_steps(self._report.status(), count)
                return BrokerReply(StatusAnswer(status=status))
            case GetLedger(num_items=num_items):
                view = self._report.account(max(0, min(num_items, _MAX_ITEMS)))
                return BrokerReply(LedgerAnswer(view=view))
            case GetDeadLetters(after=after, limit=limit):
                state = self._ledger.book.state
                letters = sorted(state.dead_letters.values(), key=lambda letter: letter.group_id)
                found = [letter for letter in letters if letter.group_id > after]
                answer = DeadLetters(
                    letters=tuple(found[: max(0, min(limit, _MAX_LETTERS))]),
                    total=len(letters),
                    forgotten=state.letters_forgotten,
                )
                return BrokerReply(answer)
            case RetryDeadLetters(groups=groups):
                done, refused = self._ledger.retry(_not_too_many(groups))
                return BrokerReply(DeadLettersHandled(done=done, refused=refused))
            case DropDeadLetters(groups=groups):
                done, refused = self._ledger.drop_letters(_not_too_many(groups))
                return BrokerReply(DeadLettersHandled(done=done, refused=refused))
            case _:
                assert_never(request)
        return BrokerReply(Done())

    def _reported(self, relay: ClientSession, report: PublishReport | RelayReport) -> BrokerReply:
        """Take what the relay of the learner that took over says; before that nothing of it counts.

        Raises:
            ForbiddenError: the relay has the key of another learner.
        """
        trains, telemetry = self._ledger.book.state.learner, self._report.telemetry
        if trains and _key_of(trains) != _key_of(relay.name):
            raise ForbiddenError(
                f"{relay.name} is no relay of {name_of(trains)}, which trains this run"
            )
        if isinstance(report, PublishReport):
            if trains:
                telemetry.published(report.record)
            return BrokerReply(Done())
        if not trains:
            return BrokerReply(RelayHeard(generator_keys={}))
        telemetry.members(report.members)
        self._relay = RelayPlace(is_known=True, door=report.door)
        self._relay_of = trains
        return BrokerReply(RelayHeard(generator_keys=self._clients.generator_keys()))


def _key_of(client: str) -> str:
    """Return the name of the key in a client's name; empty for one on the Unix socket."""
    return name_of(client).rpartition("/")[0]


def _not_too_many(groups: tuple[int, ...]) -> tuple[int, ...]:
    if len(groups) > MAX_DEAD_LETTERS:
        raise RefusedError(f"{len(groups)} groups at a time; there are {MAX_DEAD_LETTERS} at most")
    return groups
