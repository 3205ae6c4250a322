"""Which small mistakes could be in a source file: pure, from text to mutants.

A mutant is the file with one expression or one statement changed. Left alone are what only declares
(annotations but for their bounds, decorators, keywords of classes, slots, imports), text
(strings, messages of errors and logs), assertions (``strict`` of zip, which only a program that is
wrong already feels), and what would end processes other than those of a test.
"""

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

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
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One change of one file."""

    file: str  # from the root of the repository
    line: int  # of the change
    first_line: int  # of the statement
    scope: str  # function or class around it, dotted; "" in the module itself
    statement: (
        str  # the innermost statement around it, white space made one; of a compound its head
    )
    kind: str
    before: str
    after: str
    start: int  # bytes of the file that are replaced
    end: int
    new: bytes
    body: tuple[int, int] | None = None  # lines of the function whose default it changes
    is_declared: bool = False  # executed when the file is imported, not when something is called

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
    finder = _Finder(file, source)
    finder.visit_body(ast.parse(source).body)
    found: dict[tuple[int, int, bytes], Mutant] = {}
    for mutant in finder.found:
        found.setdefault((mutant.start, mutant.end, mutant.new), mutant)
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


class _Finder:
    """Walks a module and keeps what statement and scope it is in."""

    def __init__(self, file: str, source: str) -> None:
        self.found: list[Mutant] = []
        self._file = file
        self._source = source.encode()
        self._line_starts = [0]
        for line in self._source.split(b"\n"):
            self._line_starts.append(self._line_starts[-1] + len(line) + 1)
        self._scope: list[str] = []
        self._statement = ""
        self._first_line = 1
        self._function: ast.FunctionDef | ast.AsyncFunctionDef | None = None
        self._default_of: ast.FunctionDef | ast.AsyncFunctionDef | None = None

    # ---- statements

    def visit_body(self, body: list[ast.stmt]) -> None:
        for statement in body:
            self._visit_statement(statement)

    def _visit_statement(self, node: ast.stmt) -> None:
        outer = (self._statement, self._first_line)
        self._statement = one_spaced(self._text(node, head_only=True))
        self._first_line = node.lineno
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._visit_function(node)
            case ast.ClassDef():
                self._scope.append(node.name)
                self.visit_body(node.body)
                self._scope.pop()
            case ast.Import() | ast.ImportFrom() | ast.Global() | ast.Nonlocal():
                pass
            case ast.If() if _declares_only(node.test):
                pass
            case _:
                self._visit_acting(node)
        self._statement, self._first_line = outer

    def _visit_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._default_of = node
        for default in [*node.args.defaults, *node.args.kw_defaults]:
            if default is not None:
                self._visit_expression(default)
        self._default_of = None
        for argument in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]:
            self._visit_bounds(argument.annotation)
        outer, self._function = self._function, node
        self._scope.append(node.name)
        self.visit_body(node.body)
        self._scope.pop()
        self._function = outer

    def _visit_acting(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Expr) and (_is_text(node.value) or _is_log(node.value)):
            return
        self._delete(node)
        match node:
            case ast.Raise():
                return  # the message of an error is text
            case ast.Return(value=value) if value is not None and not _is_none(value):
                self._replace(value, "None", "return value made None")
            case ast.If(test=test) | ast.While(test=test):
                self._invert(test)
            case ast.AugAssign(op=op):
                self._compute(node, op)
            case ast.AnnAssign(annotation=annotation):
                self._visit_bounds(annotation)
        for name, value in ast.iter_fields(node):
            if name in {"annotation", "target", "targets", "op"}:
                continue
            for child in value if isinstance(value, list) else [value]:
                self._visit_child(child)

    def _visit_child(self, child: object) -> None:
        match child:
            case ast.stmt():
                self._visit_statement(child)
            case ast.expr():
                self._visit_expression(child)
            case ast.ExceptHandler():
                self.visit_body(child.body)
            case ast.match_case():
                if child.guard is not None:
                    self._invert(child.guard)
                    self._visit_expression(child.guard)
                self.visit_body(child.body)
            case ast.withitem():
                self._visit_expression(child.context_expr)

    def _delete(self, node: ast.stmt) -> None:
        match node:
            case ast.Expr(value=ast.Call() | ast.Await() as value):
                call = value.value if isinstance(value, ast.Await) else value
                kind = "call deleted"
                if isinstance(call, ast.Call) and _name(call.func) in _ENDS_PROCESSES:
                    return
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]) | ast.AugAssign():
                kind = "assignment deleted"
            case ast.Raise() | ast.Delete() | ast.Continue() | ast.Break():
                kind = "statement deleted"
            case _:
                return
        self._replace(node, "pass", kind)

    # ---- expressions

    def _visit_bounds(self, annotation: ast.expr | None) -> None:
        """Change what an annotation calls: the bounds of ``Meta(ge=0)``."""
        for node in ast.walk(annotation) if annotation is not None else ():
            if isinstance(node, ast.Call):
                self._visit_expression(node)

    def _visit_expression(self, node: ast.expr) -> None:
        is_text = isinstance(node, ast.JoinedStr) or _is_log(node)
        if is_text or (isinstance(node, ast.Call) and _name(node.func) in _ENDS_PROCESSES):
            return
        self._change(node)
        for child in ast.iter_child_nodes(node):
            match child:
                case ast.expr():
                    self._visit_expression(child)
                case ast.keyword(arg=name) if name != "strict":
                    self._visit_expression(child.value)
                case ast.comprehension():
                    self._visit_expression(child.iter)
                    for test in child.ifs:
                        self._invert(test)
                        self._visit_expression(test)

    def _change(self, node: ast.expr) -> None:
        match node:
            case ast.Compare(ops=ops):
                self._compare(node, ops)
            case ast.BoolOp(op=op):
                other = ast.Or() if isinstance(op, ast.And) else ast.And()
                self._replace(node, ast.BoolOp(other, node.values), "and / or swapped")
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                self._replace(node, operand, "boolean inverted")
            case ast.UnaryOp(op=ast.USub(), operand=operand) if not _is_number(operand):
                self._replace(node, operand, "arithmetic changed")
            case ast.BinOp(op=op):
                self._compute(node, op)
            case ast.IfExp(test=test):
                self._invert(test)
            case ast.Constant(value=bool() | int() | float() as value):
                self._constant(node, value)
            case ast.Call(func=ast.Name(id=name)) if name in _CALLED:
                new = ast.Call(ast.Name(_CALLED[name]), node.args, node.keywords)
                self._replace(node, new, "any / all, min / max swapped")
            case _:
                pass

    def _compare(self, node: ast.Compare, ops: list[ast.cmpop]) -> None:
        for at, op in enumerate(ops):
            for other in _COMPARED[type(op)]:
                changed = [*ops[:at], other(), *ops[at + 1 :]]
                self._replace(
                    node, ast.Compare(node.left, changed, node.comparators), "comparison changed"
                )

    def _compute(self, node: ast.BinOp | ast.AugAssign, op: ast.operator) -> None:
        other = _COMPUTED.get(type(op))
        is_type = isinstance(op, ast.BitOr) and self._function is None
        if other is None or is_type:
            return
        new: ast.AST = (
            ast.BinOp(node.left, other(), node.right)
            if isinstance(node, ast.BinOp)
            else ast.AugAssign(node.target, other(), node.value)
        )
        self._replace(node, new, "arithmetic changed")

    def _constant(self, node: ast.Constant, value: float) -> None:
        new: float
        if isinstance(value, bool):
            new = not value
        elif isinstance(value, int):
            new = value + 1
        else:
            new = value * 2 if value else 1.0
        kind = "default changed" if self._default_of is not None else "constant changed"
        self._replace(node, repr(new), kind)

    def _invert(self, test: ast.expr) -> None:
        """Invert a test, but for what other mutants invert: a comparison, ``not x``."""
        is_inverted = isinstance(test, ast.Compare) and len(test.ops) == 1
        if not is_inverted and not isinstance(test, ast.UnaryOp | ast.Constant):
            self._replace(test, ast.UnaryOp(ast.Not(), test), "boolean inverted")

    # ---- text

    def _replace(self, node: ast.stmt | ast.expr, new: ast.AST | str, kind: str) -> None:
        after = new if isinstance(new, str) else ast.unparse(ast.fix_missing_locations(new))
        start, end = self._span(node)
        is_whole = isinstance(node, ast.stmt | ast.Constant)
        owner = self._default_of
        self.found.append(
            Mutant(
                file=self._file,
                line=node.lineno,
                first_line=self._first_line,
                scope=".".join(self._scope if owner is None else [*self._scope, owner.name]),
                statement=self._statement,
                kind=kind,
                before=one_spaced(self._text(node)),
                after=one_spaced(after),
                start=start,
                end=end,
                new=(after if is_whole else f"({after})").encode(),
                body=None if owner is None else (owner.body[0].lineno, owner.end_lineno or 0),
                is_declared=self._function is None,
            )
        )

    def _span(self, node: ast.stmt | ast.expr) -> tuple[int, int]:
        last, column = node.end_lineno or node.lineno, node.end_col_offset or 0
        return (
            self._line_starts[node.lineno - 1] + node.col_offset,
            self._line_starts[last - 1] + column,
        )

    def _text(self, node: ast.stmt | ast.expr, *, head_only: bool = False) -> str:
        start, end = self._span(node)
        if head_only:
            blocks: Iterator[int] = (
                self._span(block[0])[0]
                for name in ("body", "cases")
                if isinstance(block := getattr(node, name, None), list)
                and block
                and isinstance(block[0], ast.stmt)
            )
            end = min(blocks, default=end)
        return self._source[start:end].decode()


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


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant)


def _declares_only(test: ast.expr) -> bool:
    """Return whether a test guards imports for types, or the start of a program."""
    text = ast.unparse(test)
    return "TYPE_CHECKING" in text or "__name__" in text
