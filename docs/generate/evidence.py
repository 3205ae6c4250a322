"""Which tests check which name of an algorithm, read off the tests themselves.

A test says what it proves, with ``proves`` above it; nothing about tests is written down anywhere
else. Run as a program, this prints the tables of docs/evidence.md, or writes it there:

    python -m docs.generate.evidence --write
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
import torch

from slipstream.algos.choice import (
    CriticOptions,
    DataOptions,
    KlOptions,
    LikelihoodOptions,
    ReduceOptions,
    TeacherOptions,
)
from slipstream.algos.config import PARTS
from slipstream.algos.diagnostics import (
    Diagnosed,
    critic_figures,
    critic_sums,
    diagnostic_sums,
    figures_of,
)
from slipstream.algos.parts import AnyPart
from slipstream.algos.section import AlgoSection
from tests.support.golden import AREAL, SLIME, VERL, golden

F = TypeVar("F", bound=Callable[..., Any])

DEFINITION = (
    "definition"  # the formula of a paper, or values by hand, written independently in the test
)
PROPERTY = "property"  # what holds whatever the data
COLUMNS = {
    VERL: "verl 0.9.1",
    SLIME: "slime 624b824a",
    AREAL: "AReaL 4aef98d8",
    DEFINITION: "independent formula",
    PROPERTY: "properties",
}
GOLDEN = frozenset({VERL, SLIME, AREAL})
Flags = dict[str, list[bool]]  # bound -> of each token, or answer, whether it is beyond

TABLES: dict[str, type[msgspec.Struct]] = {
    "reduce": ReduceOptions,
    "kl": KlOptions,
    "teacher": TeacherOptions,
    "likelihood": LikelihoodOptions,
    "critic": CriticOptions,
    "data": DataOptions,
}

PAGE = Path(__file__).parents[2] / "docs" / "evidence.md"
TESTS = Path(__file__).parents[2] / "tests" / "unit" / "algos"
BEGIN = "<!-- generated: python -m docs.generate.evidence --write -->\n"
END = "<!-- end of what is generated -->\n"

FROM_LOGITS = ("log-probabilities", "entropy", "sum of squared probabilities")
OF_TURNS = (
    "rewards = turns",
    "discount_by = turn",
    "gae: over = turns",
    "gae: over = both",
    "grpo: over = turns",
    "rloo: over = turns",
)
DEVIATIONS = ("std_over = siblings", "std_over = batch", "std_over = advantages")
OFF = frozenset({"", "none", "keep"})  # choices that do nothing
NOT_FORMULAS = frozenset(
    {
        "kl.reference",
        "kl.renew_every",
        "critic.lr",
        "critic.warmup_steps",
        "teacher.model",
        "teacher.endpoint",
        "teacher.api_key_file",
        "teacher.concurrency",
    }
)
NOT_BOUNDS = frozenset(  # numbers that scale, weigh or shift, and decide nothing
    {
        "advantage.grpo.epsilon",
        "advantage.grpo.discount",
        "advantage.rloo.discount",
        "advantage.gdpo.epsilon",
        "advantage.pass-at-k.epsilon",
        "advantage.discounted-returns.discount",
        "advantage.reinforce++-baseline.discount",
        "advantage.gae.discount",
        "advantage.gae.decay",
        "advantage.gae.critic_decay",
        "advantage.optimal-token-baseline.discount",
        "surrogate.sapo.tau_positive",
        "surrogate.sapo.tau_negative",
        "correction.kl-cov.coefficient",
        "correction.staleness-decay.decay",
        "reduce.length",
        "kl.coefficient",
        "critic.lr",
        "teacher.coefficient",
        "likelihood.coefficient",
        "data.scale",
        "data.bias",
        "data.overlong_penalty",
        "data.resample_power",
        "data.resample_share",
    }
)


@dataclass(frozen=True, slots=True)
class Proof:
    """What one test proves of some names."""

    names: tuple[str, ...]
    against: str  # of COLUMNS
    what: str


@dataclass(frozen=True, slots=True)
class Proving:
    """A test with what it proves."""

    function: Callable[..., Any]
    proofs: tuple[Proof, ...]

    @property
    def place(self) -> str:
        """Return where the test stands."""
        return f"{self.function.__module__.rpartition('.')[2]}.py::{self.function.__name__}"


def proves(*names: str | AnyPart, against: str, what: str = "value") -> Callable[[F], F]:
    """Say that a test proves something of these names: parts, or settings as ``known`` has them.

    Stands above all other decorators. A part that several tests are parametrized by is taken from
    the table of the parameters, so that a row taken out of it takes its proof along.
    """
    texts = [name if isinstance(name, str) else name_of(name) for name in names]
    proof = Proof(tuple(dict.fromkeys(texts)), against, what)

    def mark(test: F) -> F:
        test.__dict__["proofs"] = (proof, *test.__dict__.get("proofs", ()))
        return test

    return mark


def name_of(part: AnyPart) -> str:
    """Return the setting that chooses a part."""
    return f"{part.kind} = {part.name}"


def known() -> list[str]:
    """Return everything that needs a proof: parts, settings that are in a formula, figures."""
    names = [f"{kind} = {name}" for kind, parts in PARTS.items() for name in parts]
    names += _settings(AlgoSection, "", only={"anchor", "whiten", "entropy_bonus"})
    for table, options in TABLES.items():
        names += _settings(options, f"{table}.")
    names += ["gae: length_adaptive", "gae: critic_decay", *OF_TURNS, *DEVIATIONS]
    return [*names, *FROM_LOGITS, *figures()]


def bounds() -> list[str]:
    """Return every number that something may be beyond: settings of parts and tables, and k3's."""
    names: list[str] = []
    for kind, parts in PARTS.items():
        for part in parts.values():
            names += _numbers(part.options, f"{kind}.{part.name}.")
    for table, options in TABLES.items():
        names += _numbers(options, f"{table}.")
    return [*(name for name in names if name not in NOT_BOUNDS), "kl.name = low-var"]


def _numbers(options: type[msgspec.Struct], prefix: str) -> Iterator[str]:
    hints = get_type_hints(options)
    for field in msgspec.structs.fields(options):
        if hints[field.name] is float or float in _alternatives(hints[field.name]):
            yield prefix + field.name


def _alternatives(hint: object) -> tuple[object, ...]:
    return get_args(hint) if get_origin(hint) in {Union, UnionType} else ()


def straddles(flags: Callable[[], Flags]) -> Callable[[F], F]:
    """Say which of a test's tokens are beyond which bound, by its statement of the formula."""

    def mark(test: F) -> F:
        test.__dict__["flags"] = flags
        return test

    return mark


@cache
def straddled() -> Flags:
    """Return what all tests of algos say of their bounds."""
    told: Flags = {}
    for test in collected():
        told |= test.function.__dict__.get("flags", dict)()
    return told


def figures() -> list[str]:
    """Return the figures that the losses of policy and critic log."""
    one, yes = torch.ones(1), torch.ones(1, dtype=torch.bool)
    of_policy = diagnostic_sums(
        Diagnosed(
            mask=yes,
            keep=yes,
            proximal=one,
            behavior=one,
            entropy=one,
            ratio=one,
            weights=one,
            clipped_up=yes,
            clipped_down=yes,
            clipped_dual=yes,
        )
    )
    of_critic = critic_sums(mask=yes, values=one, returns=one, is_clipped=yes)
    return [
        *figures_of({name: float(total) for name, total in of_policy.items()}),
        *critic_figures({name: float(total) for name, total in of_critic.items()}),
    ]


def _settings(
    options: type[msgspec.Struct], prefix: str, only: set[str] | None = None
) -> Iterator[str]:
    hints = get_type_hints(options)
    for field in msgspec.structs.fields(options):
        name = prefix + field.name
        if (only is not None and field.name not in only) or name in NOT_FORMULAS:
            continue
        choices = [one for one in get_args(hints[field.name]) if isinstance(one, str)]
        if choices:
            yield from (f"{name} = {one}" for one in choices if one not in OFF)
        else:
            yield name


def collected() -> list[Proving]:
    """Return the tests of algos that prove something, in the order of files and lines."""
    tests = []
    for file in sorted(TESTS.glob("test_*.py")):
        module = importlib.import_module(f"tests.unit.algos.{file.stem}")
        tests += [
            Proving(function, function.proofs)
            for name, function in vars(module).items()
            if name.startswith("test_") and hasattr(function, "proofs")
        ]
    return tests


def reads_golden_files(test: Callable[..., Any]) -> bool:
    """Return whether a test, or a function of its module that it names, opens a golden file."""
    module: ModuleType = sys.modules[test.__module__]
    seen: set[str] = set()
    waiting = [test]
    while waiting:
        for name in waiting.pop().__code__.co_names:
            found = getattr(module, name, None)
            if found is golden:
                return True
            if isinstance(found, FunctionType) and name not in seen:
                seen.add(name)
                waiting.append(found)
    return False


def table(tests: list[Proving]) -> str:
    """Return the table of all names, and the list of tests that its numbers mean."""
    lines = ["| name | " + " | ".join(COLUMNS.values()) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name in known():
        cells = []
        for column in COLUMNS:
            entries: dict[str, list[str]] = {}
            for number, test in enumerate(tests, 1):
                for proof in test.proofs:
                    if proof.against == column and name in proof.names:
                        entries.setdefault(proof.what, []).append(str(number))
            cells.append("; ".join(f"{what} {', '.join(n)}" for what, n in entries.items()))
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    lines += ["", "The numbers are these tests of `tests/unit/algos/`:", ""]
    lines += [f"{number}. `{test.place}`" for number, test in enumerate(tests, 1)]
    return "\n".join(lines) + "\n"


def written(page: str) -> str:
    """Return what stands in a page between the marks."""
    return page.partition(BEGIN)[2].partition(END)[0]


def main(arguments: list[str]) -> None:
    """Print the table, or write it into the page."""
    text = table(collected())
    if "--write" not in arguments:
        sys.stdout.write(text)
        return
    page = PAGE.read_text("utf-8")
    before, _, rest = page.partition(BEGIN)
    PAGE.write_text(before + BEGIN + text + END + rest.partition(END)[2], "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
