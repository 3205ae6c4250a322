"""Jinja templates that end: their steps and output are bounded, without a clock.

Jinja's sandbox keeps a template from our objects, not from endless loops. Only loops, macros and
calls of blocks repeat, so each turn of them counts as a step. Values grow in a variable, in the
output, by ``*`` and ``**``, or by a filter, a method or a format with a number as argument: such
numbers must be small.
"""

import re
from collections.abc import Callable, Mapping, Sized
from functools import wraps
from typing import Any, cast

from jinja2 import Template, TemplateRuntimeError, nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from typing_extensions import override

MOST_STEPS = 100_000  # a conversation takes one per turn and loop
MOST_CHARACTERS = 16 * 1024 * 1024  # limit of the output, and of a text in a variable
_LARGE_WIDTH = re.compile(
    r"[%{][^%{}\s]*(\d{6}|\*)"
)  # width in a format: literal, or from an argument
_MOST_BITS = 4096  # limit of a number


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Compiles templates; one is rendered at a time."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 jinja's own
        super().__init__(**options)
        self._steps = 0
        self.globals["range"] = self._range
        del self.globals["lipsum"]
        self.filters = {
            name: _with_number_limit(name, function) for name, function in self.filters.items()
        }
        self.filters["within_bounds"] = self.kept

    def bounded(self, source: str) -> Template:
        """Compile a template whose loops, macros and variables are counted.

        Raises:
            TemplateError: the source is no template.
        """
        tree = self.parse(source)
        for loop in tree.find_all(nodes.For):
            loop.body.insert(0, nodes.ExprStmt(_call("step")))
            if loop.test is not None:  # skipped items are iterated over, too
                loop.test = nodes.And(_call("step"), loop.test)
        blocks: list[nodes.Macro | nodes.CallBlock] = list(tree.find_all(nodes.Macro))
        for block in [*blocks, *tree.find_all(nodes.CallBlock)]:
            block.body.insert(0, nodes.ExprStmt(_call("step")))
        for assignment in tree.find_all(nodes.Assign):
            assignment.node = _call("kept", cast("nodes.Expr", assignment.node))
        for text in tree.find_all(nodes.AssignBlock):
            text.filter = nodes.Filter(text.filter, "within_bounds", [], [], None, None)
        tree.set_environment(self)
        return Template.from_code(self, self.compile(tree), self.make_globals(None))

    def text_of(self, template: Template, variables: Mapping[str, object]) -> str:
        """Render the template.

        Raises:
            TemplateRuntimeError: it takes too many steps, or writes too much.
        """
        self._steps, pieces, size = 0, [], 0
        for piece in template.generate(**variables):
            size += len(piece)
            if size > MOST_CHARACTERS:
                raise TemplateRuntimeError(f"it writes more than {MOST_CHARACTERS:,} characters")
            pieces.append(piece)
        return "".join(pieces)

    def step(self, count: int = 1) -> bool:
        """Count turns of loops and calls; True."""
        self._steps += count
        if self._steps > MOST_STEPS:
            raise TemplateRuntimeError(f"its loops and macros take more than {MOST_STEPS:,} steps")
        return True

    def kept(self, value: object) -> object:
        """Return the value of a variable, unless it is too long."""
        if isinstance(value, Sized) and len(value) > MOST_CHARACTERS:
            raise TemplateRuntimeError(f"a variable holds more than {MOST_CHARACTERS:,} characters")
        return value

    def _range(self, *arguments: int) -> range:
        numbers = range(*arguments)
        self.step(len(numbers))
        return numbers

    @override
    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Carry out ``*`` or ``**``, unless the result is too long."""
        if operator == "%":
            _check_widths(left)
        elif _size_of(operator, left, right) > (
            _MOST_BITS if isinstance(left, int) and isinstance(right, int) else MOST_CHARACTERS
        ):
            raise TemplateRuntimeError(f"the result of {operator} is too long")
        return super().call_binop(context, operator, left, right)

    @override
    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return a safe formatting function, unless the text needs too much."""
        if (safe := super().wrap_str_format(value)) is not None:
            _check_widths(value.__self__)
        return safe

    @override
    def call(self, context: Context, obj: Any, /, *arguments: Any, **named: Any) -> Any:
        """Call a function, unless it is a text's method with a large number as argument."""
        text = getattr(obj, "__self__", None)
        if isinstance(text, str):
            _check_numbers(*arguments, *named.values())
        return super().call(context, obj, *arguments, **named)


def _with_number_limit(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that refuses large numbers as arguments."""
    first = int(hasattr(function, "jinja_pass_arg"))  # jinja itself puts one before that

    @wraps(function)
    def checked(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401
        _check_numbers(*arguments[first + 1 :], *named.values())
        if name == "format":
            _check_widths(arguments[first])
        return function(*arguments, **named)

    return checked


def _check_numbers(*values: object) -> None:
    """Refuse widths and counts that make a small text a large one."""
    if any(isinstance(value, int) and abs(value) > MOST_STEPS for value in values):
        raise TemplateRuntimeError(f"a filter or method has an argument above {MOST_STEPS:,}")


def _check_widths(text: object) -> None:
    if isinstance(text, str) and _LARGE_WIDTH.search(text):
        raise TemplateRuntimeError("a format asks for more than 99,999 characters")


def _call(method: str, *arguments: nodes.Expr) -> nodes.Call:
    """Return a call of a method of the environment, which no name in a template can refer to."""
    return nodes.Call(nodes.EnvironmentAttribute(method), list(arguments), [], None, None)


def _size_of(operator: str, left: object, right: object) -> int:
    """Return the size of a result: bits of a number, items of a text or list."""
    if isinstance(left, int) and isinstance(right, int):
        if operator == "**":
            return left.bit_length() * max(0, right)
        return left.bit_length() + right.bit_length()
    times, repeated = (left, right) if isinstance(left, int) else (right, left)
    if isinstance(times, int) and isinstance(repeated, Sized):
        return times * len(repeated)
    return 0
