r"""Pure: finds the final answer in a model's text, for all rewards alike (docs/rewards.md).

It follows the thought, and is what a mark encloses: ``\boxed{}``, ``<answer>`` tags, or
``####`` before it on its line. A program is a block of code between fences.
"""

import ast
import builtins
import re
import textwrap
import warnings
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from slipstream.wire.thoughts import split_thoughts

ANSWER, ANSWER_ENDS = "<answer>", "</answer>"
_HASHES = "####"
_HEADING = re.compile(r"[\s*_]*[^\W\d_]{3,}")  # words after those, as Markdown has it
_BOX = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_FENCES = ("```", "~~~")
# CommonMark 0.31, section 4.5; but an opening fence with a language alone may stand behind text.
_OPENING = re.compile(
    r"(?:(?:[-*+]|\d+[.)])[ \t]+)?(?P<fence>`{3,}|~{3,})[ \t]*+(?P<language>[^\s`]*)(?:\s[^`]*)?"
    r"|.*?(?<![`~])(?P<behind>`{3,}|~{3,})(?P<its_language>\w*)\s*"
)
_QUOTE = re.compile(r"[ \t]*> ?")
_PYTHON = ("python", "python3", "py")
_NO_PYTHON = (SyntaxError, ValueError, RecursionError, MemoryError)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
# Nodes with names of their own.
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, *_COMPREHENSIONS)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_READS_INPUT = frozenset({"input", "stdin", "open", "fileinput"})
_BUILT_IN = frozenset(dir(builtins)) | {"__name__", "__file__"}


def after_thought(text: str) -> str:
    """Return the text after the last ``</think>``; none of it while a thought is unfinished."""
    parts = split_thoughts(text)
    return parts[-1].text if parts and parts[-1].thought is None else ""


def marked_answer(text: str, *, hashes: bool = True) -> str | None:
    r"""Return the last marked answer, empty if its mark is not closed; None if none is marked.

    ``\boxed{...}`` goes before ``<answer>...</answer>``, and that before the text after ``####`` on
    its line.

    Example: ``marked_answer("so \\boxed{\\frac{1}{2}}")`` is ``"\\frac{1}{2}"``.

    Args:
        text: after the thought.
        hashes: ``####`` is a mark, but before a word (a heading) and at the end of such a line.
    """
    boxes = list(_BOX.finditer(text))
    if boxes:
        return _braced(text[boxes[-1].end() :])
    _, opened, rest = text.rpartition(ANSWER)
    if opened:
        inside, closed, _ = rest.partition(ANSWER_ENDS)
        return inside.strip() if closed else ""
    below = ""  # nearest line below that is not blank: a mark may end its own line
    for line in reversed(text.splitlines() if hashes else []):
        inner = line.rstrip("# \t")  # without the hashes that close a heading
        if _HASHES in line:
            rest = inner.rpartition(_HASHES)[2] if _HASHES in inner else below
            if not _HEADING.match(rest):
                return rest.strip()
        below = line if line.strip() else below
    return None


def _braced(text: str) -> str:
    """Return the text up to the brace that closes one before it; empty where none does."""
    depth = 1
    for brace in _BRACE.finditer(text):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if not depth:
            return text[: brace.start()]
    return ""


# ---- programs --------------------------------------------------------------------


class _Block(NamedTuple):
    language: str
    code: str


def find_program(
    text: str, wanted: AbstractSet[str] = frozenset(), *, reads_input: bool = False
) -> str | None:
    """Return the block of code that is the answer; None without code between fences.

    Blocks in the last closed ``<answer>`` go before others. It is the one that defines most of the
    names that tests take of it, or that reads its input, else one that is marked as Python, else
    one that is whole: it can be read as Python and uses no name that it does not define. The last
    one of several. A function without a body, or another variable, defines a name only where no
    block does more. Its indentation, as in a list of steps, and marks of a quote are taken away.

    Args:
        text: after the thought.
        wanted: names that tests take of the answer.
        reads_input: tests give it an input.
    """
    blocks = _blocks(text.rpartition(ANSWER_ENDS)[0].rpartition(ANSWER)[2]) or _blocks(text)
    if len(blocks) < 2:
        return blocks[0].code if blocks else None

    def rank(place: int) -> tuple[int, int, bool, bool, int]:
        language, code = blocks[place]
        tree = _read(code)
        is_whole = bool(tree.body) and not free_names(tree)
        reads = reads_input and not _READS_INPUT.isdisjoint(_used(tree))
        defined, bound = _offered(tree)
        num_defined, num_bound = len(defined & wanted) + reads, len(bound & wanted)
        return num_defined, num_bound, language in _PYTHON, is_whole, place

    return blocks[max(range(len(blocks)), key=rank)].code


def _blocks(text: str) -> list[_Block]:
    """Return the blocks of code that are closed."""
    blocks: list[_Block] = []
    opening: re.Match[str] | None = None
    lines: list[str] = []
    indent = most_columns = depth = 0
    for quoted in text.split("\n"):
        if opening is None:
            if not any(fence in quoted for fence in _FENCES):
                continue
            line, depth = _unquoted(quoted)
            unindented = line.lstrip(" \t")
            indent = len(line) - len(unindented)
            opening, lines = _OPENING.fullmatch(unindented), []
            if opening is not None:
                before = line[: indent + max(0, opening.start("fence"))]
                most_columns = _columns(before) + 3
            continue
        line, _ = _unquoted(quoted, depth)
        last = _before_closing(line, opening["fence"] or opening["behind"], most_columns)
        lines.append(line if last is None else last)
        if last is not None:
            language = opening["language"] or opening["its_language"] or ""
            blocks.append(_Block(language.lower(), _dedented(lines, indent)))
            opening = None
    return blocks


def _unquoted(line: str, most: int | None = None) -> tuple[str, int]:
    """Return a line without its first ``most`` marks of a quote, and their number."""
    depth = start = 0
    while depth != most and (mark := _QUOTE.match(line, start)):
        depth, start = depth + 1, mark.end()
    return line[start:], depth


def _before_closing(line: str, fence: str, most_columns: int) -> str | None:
    """Return the text before a closing fence; None if the line closes nothing."""
    code, closed, rest = line.partition(fence)
    rest = rest.lstrip(fence[0])
    if not code.strip():
        closes = _columns(code) <= most_columns and not rest[:1].isalnum()
    else:
        closes = not rest.strip() or rest.lstrip().startswith("</")  # print(1)```</answer>
    return code if closed and closes else None


def _columns(text: str) -> int:
    return len(text.expandtabs(4))


def _dedented(lines: list[str], indent: int) -> str:
    """Return the code of a block, without the indentation of its opening fence and its own."""
    code = "\n".join(lines).rstrip()
    if indent:
        code = re.sub(rf"^[ \t]{{1,{indent}}}", "", code, flags=re.MULTILINE)
    return textwrap.dedent(code) if code.lstrip("\r\n")[:1].isspace() else code


def _read(code: str) -> ast.Module:
    """Return a program's tree; an empty one where it is no Python."""
    try:
        with warnings.catch_warnings(action="ignore"):
            return ast.parse(code)
    except _NO_PYTHON:
        return ast.Module([], [])


def _offered(tree: ast.Module) -> tuple[set[str], set[str]]:
    """Return the names of functions, classes and methods, and of all that has a name.

    Those inside of functions are not there for tests.
    """
    defined: set[str] = set()
    bound: set[str] = set()
    nodes: list[ast.AST] = [*tree.body]
    for node in nodes:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.Lambda())
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.Lambda())
            ):
                defined.add(name)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                (bound if _is_stub(node) else defined).add(node.name)
            case ast.Name(id=name, ctx=ast.Store()):
                bound.add(name)
        if not isinstance(node, _SCOPES):
            nodes += ast.iter_child_nodes(node)
    return defined, defined | bound


def _is_stub(node: ast.AST) -> bool:
    """True for a statement that does nothing: pass, a text or ``...``, or a definition of such."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return all(map(_is_stub, node.body))
        case ast.Pass() | ast.Expr(value=ast.Constant()):
            return True
        case ast.Raise(exc=ast.Name(id=name) | ast.Call(func=ast.Name(id=name))):
            return name == "NotImplementedError"
    return False


def _defined(tree: ast.Module) -> set[str]:
    """Return the names of functions, classes, methods and variables."""
    nodes = list(ast.walk(tree))
    names = {node.name for node in nodes if isinstance(node, _DEFINITIONS)}
    return names | {
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def _used(tree: ast.Module) -> set[str]:
    """Return the names, attributes and imports that a program uses."""
    fields = ("id", "attr", "name")
    return {getattr(node, field, "") for node in ast.walk(tree) for field in fields}


def free_names(tree: ast.Module) -> set[str]:
    """Return the names that a program uses and nowhere defines; built-in ones are defined."""
    used: set[str] = set()
    bound = _defined(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                used.add(name)
            case ast.alias(name="*"):
                return set()
            case ast.alias(name=name, asname=other):
                bound.add(other or name.partition(".")[0])
            case ast.arg(arg=name) | ast.ExceptHandler(name=str(name)):
                bound.add(name)
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                bound.add(name)
            case ast.MatchMapping(rest=str(name)):
                bound.add(name)
    return used - bound - _BUILT_IN
