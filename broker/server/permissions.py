"""Permissions: the roles that each kind of message is accepted from."""

from slipstream.wire.messages.broker import (
    DropDeadLetters,
    EngineQuarantined,
    FetchPayloads,
    FindRelay,
    GetDeadLetters,
    GetLedger,
    GetLedgerSnapshot,
    GetStatus,
    Goodbye,
    Heartbeat,
    Hello,
    LeaseGroups,
    LeaseScoring,
    PublishReport,
    RejectBatch,
    RejectPrompt,
    RelayReport,
    ReleaseLease,
    Request,
    RequestBatch,
    RetryDeadLetters,
    Role,
    RoleReport,
    SealSteps,
    StepCommit,
    SubmitScores,
    SubmitTrajectory,
    TakeOver,
)

_WORKERS: frozenset[Role] = frozenset({"generator", "learner", "reward_worker"})
_READERS: frozenset[Role] = frozenset({"observer", "operator"})
_GENERATOR: frozenset[Role] = frozenset({"generator"})
_LEARNER: frozenset[Role] = frozenset({"learner"})
_PART: frozenset[Role] = frozenset({"learner_part"})
_RELAY: frozenset[Role] = frozenset({"relay"})
_SCORERS: frozenset[Role] = frozenset({"reward_worker", "generator"})
_OPERATOR: frozenset[Role] = frozenset({"operator"})

ALLOWED: dict[type[Request], frozenset[Role]] = {
    Hello: _WORKERS | _READERS | _RELAY | _PART,
    Goodbye: _WORKERS,
    RoleReport: _WORKERS | _RELAY,
    GetStatus: _WORKERS | _READERS,
    GetLedger: _WORKERS | _READERS,
    GetDeadLetters: _READERS,
    RetryDeadLetters: _OPERATOR,
    DropDeadLetters: _OPERATOR,
    LeaseGroups: _GENERATOR,
    SubmitTrajectory: _GENERATOR,
    ReleaseLease: _SCORERS,
    RejectPrompt: _GENERATOR,
    Heartbeat: _SCORERS,
    LeaseScoring: _SCORERS,
    SubmitScores: _SCORERS,
    TakeOver: _LEARNER,
    RequestBatch: _LEARNER,
    FetchPayloads: _LEARNER | _PART,
    RejectBatch: _LEARNER,
    StepCommit: _LEARNER,
    SealSteps: _LEARNER,
    GetLedgerSnapshot: _LEARNER,
    PublishReport: _RELAY,
    RelayReport: _RELAY,
    EngineQuarantined: _GENERATOR,
    FindRelay: _GENERATOR,
}


def may_send(
    role: Role, request: Request, *, scores_inline: bool = True, environment_scores: bool = True
) -> bool:
    """True if a request is accepted from this role.

    Args:
        role: of the client.
        request: of the client.
        scores_inline: generators score what they deliver (reward.inline).
        environment_scores: an environment, which they run, may give a reward.
    """
    if role == "generator":
        if isinstance(request, SubmitTrajectory) and request.score is not None:
            return scores_inline or environment_scores
        if isinstance(request, LeaseScoring | SubmitScores):
            return scores_inline
    return role in ALLOWED[type(request)]
