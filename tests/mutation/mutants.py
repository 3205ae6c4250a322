"""Which small mistakes could be in a source file: pure, from text to mutants.

A mutant is the file with one expression or one statement changed. Left alone are what only declares
(annotations but for their bounds, decorators, keywords of classes, slots, imports), text
(strings, messages of errors and logs), assertions (``strict`` of zip, which only a program that is
wrong already feels), and what would end processes other than those of a test.
"""

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

PACKAGES = ("wire", "broker", "weightbus", "algos", "learner", "generators")

_COMPARED: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Lt: (ast.LtE, ast.GtE),  # off by one, and swapped
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
_CALLED = {"any": "all", "all": "any", "min": "max", "max": "min"}
_LOGS = frozenset({"_log", "log", "logger", "_logger", "logging"})
_ENDS_PROCESSES = frozenset({"kill", "killpg", "send_signal", "rmtree", "unlink"})
# Fields of nodes in which nothing is changed: declarations, and what is assigned to.
_LEFT_ALONE = frozenset(
    {"annotation", "target", "targets", "type", "pattern", "optional_vars", "decorator_list"}
)
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One change of one file."""

    file: str  # from the root of the repository
    line: int  # of the change
    first_line: int  # of the statement
    scope: str  # function or class around it, dotted; "" in the module itself
    # The innermost statement around it, white space made one; of a compound its head.
    statement: str
    before: str
    after: str
    start: int  # bytes of the file that are replaced
    end: int
    new: bytes
    body: tuple[int, int] | None  # lines of the function whose default it changes
    is_declared: bool  # executed when the file is imported, not when something is called

    @property
    def mutation(self) -> str:
        """What is changed, as ``before -> after``."""
        return f"{self.before} -> {self.after}"

    def apply(self, source: bytes) -> bytes:
        """Return the mutated file."""
        return source[: self.start] + self.new + source[self.end :]


def one_spaced(text: str) -> str:
    """Return text with every run of white space made one space."""
    return " ".join(text.split())


def mutants_of(file: str, source: str) -> list[Mutant]:
    """Return every mutant of a file, in the order of its text."""
    text = _Text(source)
    found: dict[tuple[int, int, bytes], Mutant] = {}
    for statement in ast.parse(source).body:
        for node, new, place in _of_statement(statement, _Place(statement=statement)):
            start, end = text.span(node)
            after = new if isinstance(new, str) else ast.unparse(ast.fix_missing_locations(new))
            is_whole = isinstance(node, ast.stmt | ast.Constant)
            owner = place.default_of
            mutant = Mutant(
                file=file,
                line=node.lineno,
                first_line=place.statement.lineno,
                scope=".".join(place.scope),
                statement=one_spaced(text.of_head(place.statement)),
                before=one_spaced(text.between(start, end)),
                after=one_spaced(after),
                start=start,
                end=end,
                new=(after if is_whole else f"({after})").encode(),
                body=(owner.body[0].lineno, owner.end_lineno or 0) if owner else None,
                is_declared=not place.is_called,
            )
            found.setdefault((start, end, mutant.new), mutant)
    return sorted(found.values(), key=lambda one: (one.start, one.end))


def drawn(mutants: list[Mutant], *, count: int, seed: int) -> list[Mutant]:
    """Draw a sample over the packages: half shared out evenly, half by how many mutants each has.

    At most one mutant of a statement is drawn. The order is that of a hash of each mutant's text,
    so that a change of one file leaves the sample of the others nearly as it was.
    """
    by_package: dict[str, list[Mutant]] = {}
    statements: set[tuple[str, str, str]] = set()
    for one in sorted(mutants, key=lambda one: _rank(one, seed)):
        where = (one.file, one.scope, one.statement)
        if where not in statements:
            statements.add(where)
            by_package.setdefault(one.file.partition("/")[0], []).append(one)
    total = sum(map(len, by_package.values()))
    chosen: list[Mutant] = []
    left: list[Mutant] = []
    for members in by_package.values():
        share = round(count / 2 / len(by_package) + count / 2 * len(members) / total)
        chosen += members[:share]
        left += members[share:]
    left.sort(key=lambda one: _rank(one, seed))
    chosen = (chosen + left)[: max(count, 0)]
    return sorted(chosen, key=lambda one: (one.file, one.start))


def _rank(mutant: Mutant, seed: int) -> bytes:
    text = f"{seed}|{mutant.file}|{mutant.scope}|{mutant.statement}|{mutant.mutation}"
    return hashlib.sha256(text.encode()).digest()


# ---- where a change is -------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    statement: ast.stmt
    scope: tuple[str, ...] = ()
    default_of: _Function | None = None
    is_called: bool = False


class _Text:
    def __init__(self, source: str) -> None:
        self._source = source.encode()
        self._line_starts = [0]
        for line in self._source.split(b"\n"):
            self._line_starts.append(self._line_starts[-1] + len(line) + 1)

    def span(self, node: ast.stmt | ast.expr) -> tuple[int, int]:
        """Return the bytes of a node, from and to."""
        last, column = node.end_lineno or node.lineno, node.end_col_offset or 0
        return (
            self._line_starts[node.lineno - 1] + node.col_offset,
            self._line_starts[last - 1] + column,
        )

    def of_head(self, node: ast.stmt) -> str:
        """Return the text of a statement, without the statements it contains."""
        start, end = self.span(node)
        match getattr(node, "body", None):
            case [ast.stmt() as first, *_]:
                end = self.span(first)[0]
        return self.between(start, end)

    def between(self, start: int, end: int) -> str:
        """Return the text from one byte to another."""
        return self._source[start:end].decode()


# ---- changes: a node, what replaces it, where it is --------------------------

_Changes = Iterator[tuple[ast.stmt | ast.expr, ast.AST | str, _Place]]


def _of_statement(node: ast.stmt, place: _Place) -> _Changes:
    place = replace(place, statement=node)
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            yield from _of_signature(node, place)
            inner = replace(place, scope=(*place.scope, name), is_called=True)
            for statement in node.body:
                yield from _of_statement(statement, inner)
        case ast.ClassDef(name=name):
            for statement in node.body:
                yield from _of_statement(statement, replace(place, scope=(*place.scope, name)))
        case ast.Import() | ast.ImportFrom() | ast.Global() | ast.Nonlocal():
            pass
        case ast.If(test=test) if _declares_only(test):
            pass
        case ast.Expr(value=value) if _is_text(value) or _is_log(value):
            pass
        case _:
            yield from _of_acting(node, place)


def _of_signature(node: _Function, place: _Place) -> _Changes:
    of_default = replace(place, scope=(*place.scope, node.name), default_of=node)
    for default in [*node.args.defaults, *node.args.kw_defaults]:
        if default is not None:
            yield from _of_expression(default, of_default)
    for argument in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]:
        yield from _of_bounds(argument.annotation, place)


def _of_bounds(annotation: ast.expr | None, place: _Place) -> _Changes:
    """Change what an annotation calls: the bounds of ``Meta(ge=0)``."""
    for node in ast.walk(annotation) if annotation is not None else ():
        if isinstance(node, ast.Call):
            yield from _of_expression(node, place)


def _of_acting(node: ast.stmt, place: _Place) -> _Changes:
    if _may_be_deleted(node):
        yield node, "pass", place
    match node:
        case ast.Raise():
            return  # the message of an error is text
        case ast.Return(value=value) if value and ast.unparse(value) != "None":
            yield value, "None", place
        case ast.If(test=test) | ast.While(test=test):
            yield from _inverted(test, place)
        case ast.AugAssign(target=target, op=op, value=value):
            for other in _computed(op, place):
                yield node, ast.AugAssign(target, other, value), place
        case ast.AnnAssign(annotation=annotation):
            yield from _of_bounds(annotation, place)
    yield from _of_fields(node, place)


def _of_fields(node: ast.AST, place: _Place) -> _Changes:
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            match child:
                case _ if name in _LEFT_ALONE:
                    pass
                case ast.stmt():
                    yield from _of_statement(child, place)
                case ast.expr():
                    yield from _of_expression(child, place)
                case ast.keyword(arg="strict"):
                    pass
                case ast.keyword() | ast.ExceptHandler() | ast.withitem():
                    yield from _of_fields(child, place)
                case ast.match_case(guard=guard):
                    yield from _inverted(guard, place) if guard else ()
                    yield from _of_fields(child, place)
                case ast.comprehension(ifs=tests):
                    for test in tests:
                        yield from _inverted(test, place)
                    yield from _of_fields(child, place)


def _may_be_deleted(node: ast.stmt) -> bool:
    match node:
        case ast.Expr(value=ast.Call(func=call) | ast.Await(value=ast.Call(func=call))):
            return _name(call) not in _ENDS_PROCESSES
        case ast.Expr(value=ast.Await()) | ast.AugAssign():
            return True
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
            return True
        case _:
            return isinstance(node, ast.Raise | ast.Delete | ast.Continue | ast.Break)


def _of_expression(node: ast.expr, place: _Place) -> _Changes:
    is_text = isinstance(node, ast.JoinedStr) or _is_log(node)
    if is_text or (isinstance(node, ast.Call) and _name(node.func) in _ENDS_PROCESSES):
        return
    match node:
        case ast.Compare(left=left, ops=ops, comparators=others):
            for at, op in enumerate(ops):
                for other in _COMPARED[type(op)]:
                    yield (
                        node,
                        ast.Compare(left, [*ops[:at], other(), *ops[at + 1 :]], others),
                        place,
                    )
        case ast.BoolOp(op=op, values=values):
            yield (
                node,
                ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values),
                place,
            )
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node, operand, place
        case ast.UnaryOp(op=ast.USub(), operand=operand) if not isinstance(operand, ast.Constant):
            yield node, operand, place
        case ast.BinOp(left=left, op=op, right=right):
            for computed in _computed(op, place):
                yield node, ast.BinOp(left, computed, right), place
        case ast.IfExp(test=test):
            yield from _inverted(test, place)
        case ast.Constant(value=bool() | int() | float() as value):
            yield node, repr(_other_number(value)), place
        case ast.Call(func=ast.Name(id=name), args=args, keywords=words) if name in _CALLED:
            yield node, ast.Call(ast.Name(_CALLED[name]), args, words), place
    yield from _of_fields(node, place)


def _other_number(value: float) -> float:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    return value * 2 if value else 1.0


def _computed(op: ast.operator, place: _Place) -> Iterator[ast.operator]:
    is_type = isinstance(op, ast.BitOr) and not place.is_called
    if type(op) in _COMPUTED and not is_type:
        yield _COMPUTED[type(op)]()


def _inverted(test: ast.expr, place: _Place) -> _Changes:
    """Invert a test, but for what other mutants invert: a comparison, ``not x``."""
    is_inverted = isinstance(test, ast.Compare) and len(test.ops) == 1
    if not is_inverted and not isinstance(test, ast.UnaryOp | ast.Constant):
        yield test, ast.UnaryOp(ast.Not(), test), place


def _name(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case _:
            return ""


def _is_log(node: ast.expr) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name) | ast.Attribute(attr=name))):
            return name in _LOGS
        case _:
            return False


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _declares_only(test: ast.expr) -> bool:
    """Return whether a test guards imports for types, or the start of a program."""
    text = ast.unparse(test)
    return "TYPE_CHECKING" in text or "__name__" in text
