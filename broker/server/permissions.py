"""Permissions: the roles that each kind of message is accepted from."""

from slipstream.wire.messages import broker
from slipstream.wire.messages.broker import Request, Role

_WORKERS: frozenset[Role] = frozenset({"generator", "learner", "reward_worker"})
_READERS: frozenset[Role] = frozenset({"observer", "operator"})
_GENERATOR: frozenset[Role] = frozenset({"generator"})
_LEARNER: frozenset[Role] = frozenset({"learner"})
_PART: frozenset[Role] = frozenset({"learner_part"})
_RELAY: frozenset[Role] = frozenset({"relay"})
_SCORERS: frozenset[Role] = frozenset({"reward_worker", "generator"})
_OPERATOR: frozenset[Role] = frozenset({"operator"})

ALLOWED: dict[type[Request], frozenset[Role]] = {
    broker.Hello: _WORKERS | _READERS | _RELAY | _PART,
    broker.Goodbye: _WORKERS,
    broker.RoleReport: _WORKERS | _RELAY,
    broker.GetStatus: _WORKERS | _READERS,
    broker.GetLedger: _WORKERS | _READERS,
    broker.GetDeadLetters: _READERS,
    broker.RetryDeadLetters: _OPERATOR,
    broker.DropDeadLetters: _OPERATOR,
    broker.LeaseGroups: _GENERATOR,
    broker.SubmitTrajectory: _GENERATOR,
    broker.ReleaseLease: _SCORERS,
    broker.RejectPrompt: _GENERATOR,
    broker.StoreImage: _GENERATOR,
    broker.FetchImage: _WORKERS | _PART,
    broker.Heartbeat: _SCORERS,
    broker.LeaseScoring: _SCORERS,
    broker.SubmitScores: _SCORERS,
    broker.TakeOver: _LEARNER,
    broker.RequestBatch: _LEARNER,
    broker.FetchPayloads: _LEARNER | _PART,
    broker.RejectBatch: _LEARNER,
    broker.StepCommit: _LEARNER,
    broker.SealSteps: _LEARNER,
    broker.GetLedgerSnapshot: _LEARNER,
    broker.PublishReport: _RELAY,
    broker.RelayReport: _RELAY,
    broker.EngineQuarantined: _GENERATOR,
    broker.FindRelay: _GENERATOR,
}


def may_send(
    role: Role, request: Request, *, scores_inline: bool = True, environment_scores: bool = True
) -> bool:
    """True if a request is accepted from this role.

    Generators may send scores with ``scores_inline`` (reward.inline), and together with a
    trajectory if an environment may give a reward.
    """
    if role == "generator":
        if isinstance(request, broker.SubmitTrajectory) and request.score is not None:
            return scores_inline or environment_scores
        if isinstance(request, broker.LeaseScoring | broker.SubmitScores):
            return scores_inline
    return role in ALLOWED[type(request)]
