"""The algorithm that [algo] describes: the parts of a preset with a user's changes.

Every part and its settings are known here, so this needs torch; ``algos.section`` does not.
"""

import importlib
import math
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, TypeVar

import msgspec

from slipstream.algos import advantages, corrections, returns, surrogates
from slipstream.algos.choice import (
    AlgoChoice,
    Chosen,
    CriticOptions,
    DataOptions,
    KlOptions,
    LikelihoodOptions,
    ReduceOptions,
    TeacherOptions,
)
from slipstream.algos.conflicts import refuse_conflicts
from slipstream.algos.parts import (
    AnyPart,
    Kind,
    Options,
    OptionsError,
    PartError,
    check_needs,
    find_part,
)
from slipstream.algos.presets import PRESETS
from slipstream.algos.section import AlgoSection, Table

T = TypeVar("T", bound=Options)


def _by_name(*parts: AnyPart) -> dict[str, AnyPart]:
    return {part.name: part for part in parts}


ADVANTAGES: dict[str, AnyPart] = _by_name(
    advantages.grpo,
    advantages.rloo,
    advantages.opo,
    advantages.pass_at_k,
    advantages.maxrl,
    advantages.gdpo,
    advantages.remax,
    advantages.plain,
    advantages.zero,
    returns.discounted_returns,
    returns.centered_returns,
    returns.gae,
    returns.optimal_token_baseline,
)
SURROGATES: dict[str, AnyPart] = _by_name(
    surrogates.policy_gradient,
    surrogates.reinforce_is,
    surrogates.ppo_clip,
    surrogates.gspo,
    surrogates.cispo,
    surrogates.sapo,
    surrogates.gmpo,
    surrogates.dppo_tv,
    surrogates.dppo_kl,
    surrogates.drpo,
    surrogates.topr,
)
CORRECTIONS: dict[str, AnyPart] = _by_name(
    corrections.importance_sampling,
    corrections.rejection,
    corrections.veto,
    corrections.opsm,
    corrections.m2po,
    corrections.clip_cov,
    corrections.kl_cov,
    corrections.staleness_decay,
    corrections.approximate_proximal,
)
PARTS: dict[Kind, dict[str, AnyPart]] = {
    "advantage": ADVANTAGES,
    "surrogate": SURROGATES,
    "correction": CORRECTIONS,
}
# Factors and divisors. Other settings are limits, and inf is no limit.
_FACTORS = frozenset(
    {"coefficient", "scale", "bias", "weights", "lr", "length", "least_reward", "entropy_bonus"}
)


def choice_of(
    section: AlgoSection, module_named: Callable[[str], ModuleType] = importlib.import_module
) -> AlgoChoice:
    """Return the parts that a section chooses.

    Args:
        section: [algo].
        module_named: imports the module of a part of one's own, or its file if it knows how.

    Raises:
        PartError: an unknown name or setting, or parts that make no sense together.
    """
    if section.preset not in PRESETS:
        raise PartError(
            f"algo.preset = {section.preset!r} is not known; there are {', '.join(PRESETS)}"
        )
    preset = PRESETS[section.preset]
    _refuse_no_number("algo", {"entropy_bonus": section.entropy_bonus})
    choice = AlgoChoice(
        preset=section.preset,
        advantage=_chosen("advantage", preset, section.advantage, module_named),
        surrogate=_chosen("surrogate", preset, section.surrogate, module_named),
        anchor=section.anchor or preset.get("anchor", "proximal"),
        corrections=_corrections(preset.get("correction", {}), section.correction, module_named),
        reduce=_options("algo.reduce", ReduceOptions, _merged(preset, "reduce", section.reduce)),
        whiten=section.whiten or preset.get("whiten", "none"),
        entropy_bonus=(
            preset.get("entropy_bonus", 0.0)
            if section.entropy_bonus is None
            else section.entropy_bonus
        ),
        kl=_table("kl", KlOptions, preset, section.kl),
        teacher=_table("teacher", TeacherOptions, preset, section.teacher),
        likelihood=_table("likelihood", LikelihoodOptions, preset, section.likelihood),
        critic=_table("critic", CriticOptions, preset, section.critic),
        data=_table("data", DataOptions, preset, section.data),
    )
    refuse_conflicts(choice, section)
    return choice


def _merged(preset: Mapping[str, Any], kind: str, given: str | Table) -> Table:
    """Return name and settings: the preset's settings hold as long as its part is not replaced."""
    base: Table = {**preset.get(kind, {})}
    if not given:
        return base
    table: Table = {"name": given} if isinstance(given, str) else given
    if table.get("name", base.get("name")) != base.get("name"):
        return dict(table)
    return {**base, **table}


def _chosen(
    kind: Kind,
    preset: Mapping[str, Any],
    given: str | Table,
    module_named: Callable[[str], ModuleType],
) -> Chosen:
    table = _merged(preset, kind, given)
    name = table.pop("name", "")
    if not isinstance(name, str):
        raise PartError(f"algo.{kind}.name must be the name of a part, got {name!r}")
    part = find_part(kind, name, PARTS[kind], f"algo.{kind}", module_named)
    return _checked(Chosen(part, _options(f"algo.{kind}", part.options, table)))


def _checked(chosen: Chosen) -> Chosen:
    """Return a part whose options need only available inputs.

    Raises:
        PartError: they need something else.
    """
    check_needs(chosen.part.kind, chosen.part.name, chosen.needs)
    return chosen


def _corrections(
    preset: Mapping[str, Table], given: str | Table, module_named: Callable[[str], ModuleType]
) -> tuple[Chosen, ...]:
    tables: dict[str, Table] = {name: dict(table) for name, table in preset.items()}
    if given == "none":
        tables = {}
    elif isinstance(given, str) and given:
        tables = {given: {**tables.get(given, {})}}
    elif isinstance(given, dict):
        for name, table in given.items():
            if table is False:
                tables.pop(name, None)
            elif isinstance(table, dict):
                tables[name] = {**tables.get(name, {}), **table}
            else:
                raise PartError(
                    f"algo.correction.{name} must be a table of settings or false, got {table!r}"
                )
    chosen = []
    for name, table in tables.items():
        part = find_part("correction", name, CORRECTIONS, "algo.correction", module_named)
        options = _options(f"algo.correction.{name}", part.options, table)
        chosen.append(_checked(Chosen(part, options)))
    return tuple(chosen)


def _table(name: str, kind: type[T], preset: Mapping[str, Any], given: Table) -> T:
    return _options(f"algo.{name}", kind, {**preset.get(name, {}), **given})


def _options(where: str, kind: type[T], table: Table) -> T:
    known = [field.encode_name for field in msgspec.structs.fields(kind)]
    for key in table:
        if key not in known:
            raise PartError(
                f"unknown setting {where}.{key}; known are {', '.join(known) or 'none'}"
            )
    try:
        options = msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        raise OptionsError(where, table, kind, str(error)) from error
    _refuse_no_number(where, msgspec.structs.asdict(options))
    return options


def _refuse_no_number(where: str, settings: Table) -> None:
    """Refuse nan, and infinite factors: they would make every batch untrainable.

    Raises:
        PartError: naming the setting.
    """
    for name, value in settings.items():
        table = value if isinstance(value, dict) else {"": value}
        for key, number in table.items():
            if isinstance(number, float) and (
                math.isnan(number) or (math.isinf(number) and name in _FACTORS)
            ):
                setting = ".".join(filter(None, (where, name, key)))
                raise PartError(f"{setting} must be a finite number, got {number}")
