"""What the product uses of a library, read from its source: branches that no CPU takes as well."""

import ast
import importlib
import importlib.util
import inspect
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

# Keywords of what makes a tensor, which Python adds to the schemas.
_OF_FACTORIES = frozenset({"dtype", "device", "requires_grad", "pin_memory", "layout"})


@dataclass(frozen=True, slots=True)
class Use:
    """One place where a name of a library is read, and, where it is called, with what."""

    place: str  # file:line
    name: str  # whole, as torch.cuda.is_available
    is_called: bool = False
    num_positional: int = 0
    keywords: tuple[str, ...] = ()
    is_open: bool = False  # *arguments or **named among them


def uses_in(file: Path, root: Path, libraries: frozenset[str]) -> Iterator[Use]:
    """Yield each use of a library's name in a file, imports inside functions included."""
    tree = ast.parse(file.read_text())
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                names[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    names = {ours: name for ours, name in names.items() if name.partition(".")[0] in libraries}
    inner: set[ast.expr] = set()
    for node in ast.walk(tree):  # the outermost first: a call before its function
        if not isinstance(node, ast.Call | ast.Attribute | ast.Name) or node in inner:
            continue
        head = node.func if isinstance(node, ast.Call) else node
        name = _dotted(head, names)
        if name is None:
            continue
        inner.update(one for one in ast.walk(head) if isinstance(one, ast.expr))
        place = f"{file.relative_to(root)}:{node.lineno}"
        yield _call(place, name, node) if isinstance(node, ast.Call) else Use(place, name)
    yield from (Use(f"{file.relative_to(root)}:import", name) for name in set(names.values()))


def _call(place: str, name: str, node: ast.Call) -> Use:
    keywords = tuple(one.arg for one in node.keywords if one.arg is not None)
    is_open = len(keywords) < len(node.keywords) or any(
        isinstance(one, ast.Starred) for one in node.args
    )
    return Use(place, name, True, len(node.args), keywords, is_open)


def _dotted(node: ast.expr, names: dict[str, str]) -> str | None:
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value, names)
        return None if owner is None else f"{owner}.{node.attr}"
    return names.get(node.id) if isinstance(node, ast.Name) else None


def wrong(use: Use) -> str | None:
    """Return the installed library's objection to a use; None if it takes it."""
    try:
        found = _find(use.name)
    except (ImportError, AttributeError) as error:
        return f"{use.place} {use.name}: {error}"
    if not use.is_called:
        return None
    try:
        signature = inspect.signature(found)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return _wrong_for_an_operator(use)
    arguments = [None] * use.num_positional
    bind = signature.bind_partial if use.is_open else signature.bind
    try:
        bind(*arguments, **dict.fromkeys(use.keywords))
    except TypeError as error:
        return f"{use.place} {use.name}{signature}: {error}"
    return None


def _find(name: str) -> object:
    """Return what a whole name refers to; a module on its way is imported."""
    first, *rest = name.split(".")
    found: object = importlib.import_module(first)
    path = first
    for part in rest:
        path = f"{path}.{part}"
        if isinstance(found, ModuleType) and not hasattr(found, part):
            try:
                found = importlib.import_module(path)
            except ModuleNotFoundError as error:
                raise AttributeError(f"{path} does not exist ({error})") from error
        elif not hasattr(found, part) and part not in getattr(found, "__annotations__", {}):
            raise AttributeError(f"{path} does not exist")
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = getattr(found, part, None)
    return found


def _wrong_for_an_operator(use: Use) -> str | None:
    """Judge a call of a function in C++ by the schemas of its operator, where it has one."""
    name = use.name.rpartition(".")[2]
    schemas = torch._C._jit_get_schemas_for_operator(f"aten::{name}")
    known = [{argument.name for argument in schema.arguments} for schema in schemas]
    if not schemas or any(set(use.keywords) <= names | _OF_FACTORIES for names in known):
        return None
    return f"{use.place} {use.name}: no overload takes {', '.join(use.keywords)}"
