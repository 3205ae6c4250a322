"""A command log with one tenant's models, and a learner that computes with lists."""

from dataclasses import dataclass, field
from pathlib import Path

from slipstream.broker.commands.log import Ask, CommandLog, Kind, SaveDetails
from slipstream.wire.messages.codec import decode_operation, encode
from slipstream.wire.messages.commands import (
    CommandFailed,
    CreateModel,
    Forward,
    LoraSpec,
    Losses,
    Made,
    Operation,
    OptimStep,
    Outcome,
    Saved,
    SaveWeights,
    Stepped,
)
from slipstream.wire.settings.serve import ServeSection

SPEC = LoraSpec(rank=4, alpha=8.0, targets=("q_proj", "v_proj"))


def open_log(path: Path | str, now: float = 0.0, limits: ServeSection | None = None) -> CommandLog:
    return CommandLog(path, limits or ServeSection(), now=now)


def operation(kind: Kind, seed: int) -> Operation:
    """Return a command whose number tells it from others of its kind."""
    match kind:
        case "create":
            return CreateModel(spec=SPEC)
        case "step":
            rates = {"beta1": 0.9, "beta2": 0.9, "epsilon": 1e-8, "weight_decay": 0.0}
            return OptimStep(lr=float(seed), **rates)
        case "save":
            return SaveWeights(kind="training")
        case _:
            options = {"seed": float(seed)}
            return Forward(data=(), loss="ppo", options=options, backward=kind == "backward")


def ask(
    model: str, number: int, kind: Kind, seed: int = 0, tenant: str = "alice", path: str = ""
) -> Ask:
    body = encode(operation(kind, seed))
    details = SaveDetails(path=path, kind="training") if kind == "save" else None
    return Ask(tenant, model, number, kind, body, body, details)


def open_model(
    log: CommandLog, model: str = "m", tenant: str = "alice", *, now: float = 0.0
) -> str:
    log.open_session(tenant, f"s-{tenant}", "key", b"", now=now)
    return log.make_model(ask(model, 0, "create", tenant=tenant), f"s-{tenant}", SPEC, now=now)


@dataclass
class ListModel:
    """Weights are the steps so far, each with the gradients that it applied."""

    weights: list[tuple[float, tuple[float, ...]]] = field(default_factory=list)
    waiting: list[float] = field(default_factory=list)
    at: int = -1
    applied: int = -1
    outcome: Outcome | None = None

    def carry_out(self, number: int, command: Operation) -> Outcome:
        outcome: Outcome
        match command:
            case CreateModel():
                outcome = Made()
            case Forward():
                if command.backward:
                    self.waiting.append(command.options["seed"])
                seen = {"steps": float(len(self.weights)), "seed": command.options["seed"]}
                outcome = Losses(logprobs=(), widths=(), metrics=seen)
            case OptimStep():
                self.weights.append((command.lr, tuple(self.waiting)))
                self.waiting = []
                outcome = Stepped(metrics={"steps": float(len(self.weights))})
            case SaveWeights():
                outcome = Saved(digest=f"d{len(self.weights)}", num_bytes=1)
            case _:
                outcome = CommandFailed(reason="unknown", category="server")
        self.at = number
        if isinstance(command, CreateModel | OptimStep):
            self.applied, self.outcome = number, outcome
        return outcome

    def durable(self) -> "ListModel":
        """Return a copy as a file would have it: gradients that wait are in none."""
        return ListModel(list(self.weights), [], self.applied, self.applied, self.outcome)


class ListLearner:
    """Keeps to the protocol of learner/commands/loop.py, one step of it at a time."""

    def __init__(self) -> None:
        self.models: dict[str, ListModel] = {}
        self.files: dict[str, ListModel] = {}
        self.reports: list[tuple[str, int, Outcome, int]] = []  # that no server has noted yet

    def take(self, log: CommandLog, now: float) -> bool:
        """Ask for a command and carry it out; False if there is none."""
        if self.reports:  # each is noted before the next command is asked for
            return False
        found = log.next_command({name: m.at for name, m in self.models.items()}, now=now)
        live = set(log.live_models)
        for name in self.models.keys() - live:
            del self.models[name]
            self.files.pop(name, None)
        if found is None:
            return False
        if found.what == "passed":
            self.models[found.model].at = found.number
            return True
        model = self.models.setdefault(found.model, ListModel())
        command = decode_operation(found.body)
        outcome = model.carry_out(found.number, command)
        if isinstance(command, CreateModel | OptimStep):
            self.files[found.model] = model.durable()
        if found.what == "new":
            self.reports.append((found.model, found.number, outcome, model.applied))
        return True

    def report(self, log: CommandLog, now: float, *, is_heard: bool = True) -> None:
        """Report; without ``is_heard`` the answer is lost, and it will be reported again."""
        for model, number, outcome, applied in self.reports:
            log.report(model, number, outcome, applied=applied, now=now)
        if is_heard:
            self.reports = []

    def die(self) -> None:
        """Begin again with the files alone."""
        self.models = {name: file.durable() for name, file in self.files.items()}
        self.reports = [
            (name, m.applied, m.outcome, m.applied)
            for name, m in self.models.items()
            if m.outcome is not None
        ]
