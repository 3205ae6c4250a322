"""The configuration reference, generated from the structs: every setting, default and meaning.

python -m docs.generate.settings > docs/settings.md
"""

import ast
import inspect
import sys
import textwrap
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import tomli_w

from slipstream.algos.choice import (
    CriticOptions,
    DataOptions,
    KlOptions,
    LikelihoodOptions,
    ReduceOptions,
    TeacherOptions,
)
from slipstream.algos.config import PARTS
from slipstream.algos.presets import PRESETS
from slipstream.algos.section import AlgoSection
from slipstream.broker.config import BrokerSection, DataSection, RewardSection
from slipstream.deploy.config import DeploySection
from slipstream.generators.config import GeneratorsSection
from slipstream.learner.config import LearnerSection, ProfileSection
from slipstream.weightbus.config import WeightBusSection
from slipstream.wire.settings.lora import LoraSection
from slipstream.wire.settings.sections import (
    CheckpointSection,
    EnvironmentSection,
    EvalSection,
    LoggingSection,
    RunSection,
    SamplingSection,
)
from slipstream.wire.settings.serve import ServeSection
from slipstream.wire.settings.tenants import TenantTable

SECTION_STRUCTS: dict[str, tuple[type[msgspec.Struct], str]] = {
    "run": (RunSection, "every role"),
    "data": (DataSection, "the broker"),
    "sampling": (SamplingSection, "the generators and the broker"),
    "reward": (RewardSection, "reward workers and `slipstream run`"),
    "environment": (EnvironmentSection, "the generators"),
    "eval": (EvalSection, "the broker, the generators and the learner"),
    "learner": (LearnerSection, "the learner"),
    "lora": (LoraSection, "the learner and the generators"),
    "serve": (ServeSection, "`slipstream serve` and its roles"),
    "algo": (AlgoSection, "the learner"),
    "checkpoint": (CheckpointSection, "the learner and `slipstream run`"),
    "generators": (GeneratorsSection, "the generators"),
    "broker": (BrokerSection, "the broker"),
    "weightbus": (WeightBusSection, "the learner and the generators"),
    "logging": (LoggingSection, "the broker; logs: every role"),
    "profile": (ProfileSection, "the learner"),
    "deploy": (DeploySection, "`slipstream run`"),
    "tenants": (TenantTable, "every role of a pool"),
}
_PREFIXES = {"tenants": "tenants.NAME"}  # of sections with a table for each of several names
_TABLE_HEAD = ("| setting | default | meaning |", "|---|---|---|")
_TABLES: dict[str, type[msgspec.Struct]] = {
    "reduce": ReduceOptions,
    "kl": KlOptions,
    "teacher": TeacherOptions,
    "likelihood": LikelihoodOptions,
    "critic": CriticOptions,
    "data": DataOptions,
}
_HEAD = """\
# Settings

This page is generated from the structs (`make docs`).

One TOML file describes a run and every role reads the same file. Each section is a frozen struct
in its role's `config.py`; every setting has one default, in that struct. An unknown section or key
is refused, with the nearest known one named. Settings of the parts of an algorithm stand in
`algos/`, beside the part; a preset may set them to another value. Any setting can be given on the
command line as `section.key=value`, which wins over the file; a value that is not TOML is taken as
text.
`slipstream run` writes every setting that has a value to `resolved.toml` in the run folder.
"""


def reference() -> str:
    """Return the whole page."""
    return "\n".join([_HEAD, *(_section(name) for name in SECTION_STRUCTS)])


def _section(name: str) -> str:
    struct, readers = SECTION_STRUCTS[name]
    summary, _, notes = inspect.cleandoc(struct.__doc__ or "").partition("\n")
    title = summary.partition(": ")[2]
    lines = [
        f"## [{_PREFIXES.get(name, name)}]",
        "",
        title[:1].upper() + title[1:],
        f"Read by {readers}. Defined in `{_module_path(struct)}`.",
        "",
        *_TABLE_HEAD,
        *_rows(struct, _PREFIXES.get(name, name)),
        "",
    ]
    if notes.strip():
        lines += [notes.strip(), ""]
    if name == "algo":
        lines += _algorithm()
    return "\n".join(lines)


def _algorithm() -> Iterator[str]:
    """Yield the lines on presets, and on the settings of parts that [algo] names."""
    yield from ["### Presets", "", "`algo.preset` is one of these.", ""]
    yield from ["| preset | what it sets |", "|---|---|"]
    for name, preset in PRESETS.items():
        text = "; ".join(
            f"`{line}`"
            for table in preset.items()
            for line in tomli_w.dumps(_flat("algo", dict([table]))).splitlines()
        )
        yield f"| `{name}` | {text} |"
    for kind, parts in PARTS.items():
        yield from ["", f"### algo.{kind}", "", "| name | what it is | settings |", "|---|---|---|"]
        for part in parts.values():
            settings = ", ".join(f"`{field.encode_name}`" for field in _fields(part.options))
            yield f"| `{part.name}` | {_escaped(part.summary)} | {settings or 'none'} |"
        yield from ["", "| part | setting | default | meaning |", "|---|---|---|---|"]
        for part in parts.values():
            where = f"algo.{kind}.{part.name}" if kind == "correction" else f"algo.{kind}"
            yield from (f"| `{part.name}` {row}" for row in _rows(part.options, where))
    for name, struct in _TABLES.items():
        summary = inspect.cleandoc(struct.__doc__ or "").partition(": ")[2]
        yield from ["", f"### algo.{name}", "", summary[:1].upper() + summary[1:], ""]
        yield from [*_TABLE_HEAD, *_rows(struct, f"algo.{name}")]
    yield ""


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def _flat(where: str, table: dict[str, Any]) -> dict[str, Any]:
    """Return a table of tables as one table of dotted settings, quoted as TOML quotes them."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict) and value:
            flat |= _flat(f"{where}.{key}", value)
        else:
            flat[f"{where}.{key}"] = value
    return flat


def _fields(struct: type[msgspec.Struct]) -> tuple["msgspec.structs.FieldInfo", ...]:
    return msgspec.structs.fields(struct)


def _rows(struct: type[msgspec.Struct], where: str) -> Iterator[str]:
    for setting, default, meaning in rows(struct, where):
        yield f"| `{setting}` | {default} | {meaning} |"


def rows(struct: type[msgspec.Struct], where: str) -> Iterator[tuple[str, str, str]]:
    """Yield (setting, default, meaning) for a struct and the tables inside it."""
    hints = get_type_hints(struct, include_extras=True)
    meanings = _meanings(struct)
    for field in msgspec.structs.fields(struct):
        hint, setting = hints[field.name], f"{where}.{field.encode_name}"
        inner = _table_of(hint)
        if inner is not None and get_origin(hint) is not dict:
            yield from rows(inner, setting)
            continue
        meaning = _escaped(f"{meanings[field.name]} Type: {_type_name(hint)}.")
        yield setting, _default(field), meaning
        if inner is not None:
            yield from rows(inner, f"{setting}.NAME")


def _module_path(struct: type[msgspec.Struct]) -> str:
    return f"{struct.__module__.removeprefix('slipstream.').replace('.', '/')}.py"


def _meanings(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Return the text that stands under each field in the source, of base classes as well."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(struct))).body
    meanings: dict[str, str] = {}
    for base in struct.__bases__:
        if base is not msgspec.Struct and issubclass(base, msgspec.Struct):
            meanings |= _meanings(base)
    name = ""
    for node in definition.body if isinstance(definition, ast.ClassDef) else []:
        match node:
            case ast.AnnAssign(target=ast.Name(id=field)):
                name = field
                meanings.setdefault(field, "")
            case ast.Expr(value=ast.Constant(value=str(text))) if name:
                meanings[name] = " ".join(text.split())
    return meanings


def _default(field: "msgspec.structs.FieldInfo") -> str:
    value = field.default
    if value is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
        value = field.default_factory()
    if value is None:
        return "not set"
    if isinstance(value, tuple):
        value = list(value)
    if value == {}:
        return "`{}`"
    text = tomli_w.dumps({"value": value}).removeprefix("value = ")
    return f"`{' '.join(text.split())}`"


def _table_of(hint: Any) -> type[msgspec.Struct] | None:  # noqa: ANN401 any annotation
    options = get_args(hint)[1:] if get_origin(hint) is dict else (hint,)
    structs = (o for o in options if isinstance(o, type) and issubclass(o, msgspec.Struct))
    return next(structs, None)


def _type_name(hint: Any) -> str:  # noqa: ANN401 any annotation
    """Return what a person may write for an annotation."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _type_name(arguments[0]) + _limits(arguments[1])
    if origin is Literal:
        return "one of " + ", ".join(f"`{choice}`" for choice in arguments if choice)
    if origin in {types.UnionType, Union}:
        return " or ".join(_type_name(one) for one in arguments if one is not type(None))
    if origin is tuple and arguments[-1] is Ellipsis:
        return f"list ({_type_name(arguments[0])})"
    if origin is tuple:
        return f"list of {len(arguments)} ({', '.join(_type_name(one) for one in arguments)})"
    if origin is dict:
        return "table of tables" if _table_of(hint) else "table"
    names = {str: "text", int: "integer", float: "number", bool: "true or false"}
    return names.get(hint, "any value")


def _limits(meta: msgspec.Meta) -> str:
    parts = []
    if meta.ge is not None and meta.le is not None:
        parts.append(f"from {meta.ge} to {meta.le}")
    elif meta.ge is not None and meta.lt is not None:
        parts.append(f"at least {meta.ge} and below {meta.lt}")
    elif meta.gt is not None and meta.le is not None:
        parts.append(f"above {meta.gt} and at most {meta.le}")
    elif meta.ge is not None:
        parts.append(f"at least {meta.ge}")
    elif meta.gt is not None:
        parts.append(f"above {meta.gt}")
    if meta.pattern is not None:
        parts.append(
            "one of "
            + ", ".join(f"`{c}`" for c in meta.pattern.removesuffix(r"\Z").strip("^()$").split("|"))
        )
    return ", " + ", ".join(parts) if parts else ""


def main() -> int:
    """Print the page."""
    sys.stdout.write(reference())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
