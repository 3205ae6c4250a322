"""Commands are acknowledged once and applied exactly once, in order, whatever dies when.

Schedules of a client that repeats and reorders, a learner and a server that are killed between any
two of their steps, and answers that are lost.
"""

import tempfile
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from slipstream.broker.commands.log import Kind
from slipstream.broker.commands.refusals import RequestRefusedError
from slipstream.deploy.launch.scratch import MEMORY
from slipstream.wire.messages.commands import CommandFailed, Losses, Outcome, Stepped
from tests.property.schedules import draw_schedules, profile
from tests.support.command_log import SPEC, ListLearner, ask, open_log

TENANTS = {"a0": "alice", "a1": "alice", "b0": "bob"}
MODELS = st.sampled_from(sorted(TENANTS))
KINDS: st.SearchStrategy[Kind] = st.sampled_from(
    ["forward", "backward", "backward", "step", "save"]
)


class CommandLogMachine(RuleBasedStateMachine):
    """Models of two tenants, one learner, one server."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="commands-", dir=MEMORY)
        self.path = Path(self.folder.name) / "commands.db"
        self.log = open_log(self.path)
        for tenant in sorted(set(TENANTS.values())):
            self.log.open_session(tenant, f"s-{tenant}", "key", b"", now=0.0)
        self.learner = ListLearner()
        self.now = 0.0
        self.sent: dict[str, dict[int, tuple[Kind, int]]] = {}  # accepted, by number
        self.refused: dict[str, set[int]] = {}
        self.seen: dict[str, Outcome] = {}  # outcomes that a client has fetched
        self.seed = 0
        for model in TENANTS:
            self.makes(model)

    def teardown(self) -> None:
        try:
            self.settle()
        finally:
            self.log.close()
            self.folder.cleanup()

    # ---- clients -------------------------------------------------------------------------------

    @rule(model=MODELS)
    def makes(self, model: str) -> None:
        tenant = TENANTS[model]
        made = ask(model, 0, "create", tenant=tenant)
        future = self.log.make_model(made, f"s-{tenant}", SPEC, now=self.now)
        assert future == f"{model}:0"
        self.sent.setdefault(model, {0: ("create", 0)})

    @rule(model=MODELS, kinds=st.lists(KINDS, min_size=2, max_size=8), is_reordered=st.booleans())
    def sends(self, model: str, kinds: list[Kind], is_reordered: bool) -> None:
        numbered = list(enumerate(kinds, self._next(model)))
        for number, kind in reversed(numbered) if is_reordered else numbered:
            if number not in self.sent[model] and number not in self.refused.get(model, ()):
                self._send(model, number, kind)

    @rule(model=MODELS, kind=KINDS, ahead=st.integers(1, 3))
    def sends_ahead(self, model: str, kind: Kind, ahead: int) -> None:
        number = self._next(model) + ahead
        if number not in self.sent[model] and number not in self.refused.get(model, ()):
            self._send(model, number, kind)

    def _send(self, model: str, number: int, kind: Kind) -> None:
        self.seed += 1
        future = self.log.accept(ask(model, number, kind, self.seed, TENANTS[model]), now=self.now)
        assert future == f"{model}:{number}"
        self.sent[model][number] = kind, self.seed

    @rule(model=MODELS, place=st.integers(0, 30))
    def repeats(self, model: str, place: int) -> None:
        known = [n for n in self.sent.get(model, {}) if n]
        if not known:
            return
        number = sorted(known)[place % len(known)]
        kind, seed = self.sent[model][number]
        again = ask(model, number, kind, seed, TENANTS[model])
        assert self.log.accept(again, now=self.now) == f"{model}:{number}"
        other = ask(model, number, kind, seed + 10_000, TENANTS[model])
        if other.asked != again.asked:
            with pytest.raises(RequestRefusedError, match="was another request before"):
                self.log.accept(other, now=self.now)

    @rule(model=MODELS)
    def sends_nonsense(self, model: str) -> None:
        number = self._next(model)
        nonsense = ask(model, number, "backward", -1, TENANTS[model])
        self.log.refuse(nonsense, "it makes no sense", now=self.now)
        self.refused.setdefault(model, set()).add(number)

    @rule(model=MODELS)
    def looks_at_anothers(self, model: str) -> None:
        other = "bob" if TENANTS[model] == "alice" else "alice"
        with pytest.raises(RequestRefusedError, match="there is no request"):
            self.log.future(other, f"{model}:0")
        with pytest.raises(RequestRefusedError, match="there is no model"):
            self.log.accept(ask(model, 1, "step", 1, other), now=self.now)

    @rule(model=MODELS)
    def fetches(self, model: str) -> None:
        for number in self.sent.get(model, ()):
            self._fetch(model, number)

    # ---- the learner and the server ------------------------------------------------------------

    @rule(commands=st.integers(1, 12), dies=st.booleans(), is_heard=st.booleans())
    def learner_works(self, commands: int, dies: bool, is_heard: bool) -> None:
        for _ in range(commands):
            self.learner.report(self.log, self.now)
            self.learner.take(self.log, self.now)
        self.learner.report(self.log, self.now, is_heard=is_heard)
        if dies:
            self.learner.die()

    @rule()
    def learner_dies(self) -> None:
        self.learner.die()

    @rule()
    def server_dies(self) -> None:
        self.log.close()
        self.log = open_log(self.path, self.now)

    @precondition(lambda self: self.now < 300.0)
    @rule()
    def time_passes(self) -> None:
        self.now += 50.0  # less than results are kept
        self.log.expire(now=self.now)

    # ---- promises ------------------------------------------------------------------------------

    @invariant()
    def durable_weights_are_a_beginning_of_what_was_sent(self) -> None:
        for model, file in self.learner.files.items():
            assert file.weights == self._expected(model)[: len(file.weights)]

    def settle(self) -> None:
        """Nothing dies any more: every command that can be carried out is, once."""
        while self.learner.reports or self.learner.take(self.log, self.now):
            self.learner.report(self.log, self.now)
        for model, commands in self.sent.items():
            ready = self._next(model)
            assert self.learner.models[model].weights == self._expected(model)
            for number in commands:
                outcome = self._fetch(model, number)
                assert (outcome is not None) == (number < ready), (model, number)
            for number in self.refused.get(model, ()):
                refused = self.log.future(TENANTS[model], f"{model}:{number}").outcome
                assert isinstance(refused, CommandFailed)
                assert refused.reason == "it makes no sense"

    def _next(self, model: str) -> int:
        """Return the first number that nobody has sent."""
        number = 0
        while number in self.sent[model] or number in self.refused.get(model, ()):
            number += 1
        return number

    def _expected(self, model: str) -> list[tuple[float, tuple[float, ...]]]:
        """Return the steps that the commands of a model make, carried out in order."""
        steps: list[tuple[float, tuple[float, ...]]] = []
        waiting: list[float] = []
        for number in range(self._next(model)):
            kind, seed = self.sent[model].get(number, ("", 0))
            if kind == "backward":
                waiting.append(float(seed))
            elif kind == "step":
                steps.append((float(seed), tuple(waiting)))
                waiting = []
        return steps

    def _fetch(self, model: str, number: int) -> Outcome | None:
        name = f"{model}:{number}"
        outcome = self.log.future(TENANTS[model], name).outcome
        if outcome is None:
            assert name not in self.seen
            return None
        assert self.seen.setdefault(name, outcome) == outcome, "it was another one before"
        before = [self.sent[model].get(n, ("", 0))[0] for n in range(number)].count("step")
        kind, seed = self.sent[model][number]
        if isinstance(outcome, Losses):
            assert outcome.metrics == {"steps": float(before), "seed": float(seed)}
        if kind == "step":
            assert outcome == Stepped(metrics={"steps": float(before + 1)})
        return outcome


TestSchedules = CommandLogMachine.TestCase
TestSchedules.settings = profile(40, 60, is_fixed=True)


@pytest.mark.slow
def test_new_schedules():
    """Covered in make test by the schedules that are always the same."""
    draw_schedules(CommandLogMachine, steps=120)
