"""The words with which a shell script starts a program, as far as they can be known. Pure.

This is no shell: nothing is run. Assignments, arrays, arithmetic, simple tests and `case` are
followed; what a program, a loop or a function would have said stays unknown, and the words that
depend on it carry a mark (``unknown_names``).
"""

import ast
import fnmatch
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

_BEGIN, _END = "\ue000", "\ue001"  # around the name of what is not known, inside a word
_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^]]*\])?(\+?)=", re.DOTALL)
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=\Z")
_DOCUMENT = re.compile(r"<<-?[ \t]*(['\"]?)(\w+)\1")
_DECLARING = frozenset({"export", "declare", "local", "readonly", "typeset"})
_KEYWORDS = frozenset({"then", "else", "do", "{", "if", "elif", "while", "until"})
MOST_LENGTH = 1 << 16  # characters of a script or value
_MOST_INDENT = 200  # characters in front of a comment
MOST_DEPTH = 40  # of brackets, and of expansions, inside each other
_MOST_EXPANDED = 1_000_000  # characters that all expansions of a script become


@dataclass(frozen=True, slots=True)
class Script:
    """What a script starts: the words of each command, and what was not followed."""

    commands: list[list[str]]
    skipped: list[str]


@dataclass(frozen=True, slots=True)
class _Command:
    line: int
    words: list[str]  # as they are written
    ends_with: str  # the operator after it


@dataclass(slots=True)
class _Branch:
    """One `if`, `case`, loop or function that is open."""

    kind: str
    line: int
    outside: bool  # whether the commands around it are followed
    follows: bool  # whether its present part is
    chosen: bool | None = False  # whether a part was; None is not known
    subject: str = ""
    wants_pattern: bool = False
    pattern: list[str] = field(default_factory=list)


def unknown_names(word: str) -> list[str]:
    """Return the names of what a word depends on and is not known."""
    return re.findall(f"{_BEGIN}(.*?){_END}", word)


def read_script(text: str, variables: Mapping[str, str]) -> Script:
    """Return the commands of a script, expanded.

    Args:
        text: of the script, or a command line.
        variables: that are set before it.

    Raises:
        ValueError: a quote or bracket is not closed, or the text is beyond a bound, which is named.
    """
    if len(text) > MOST_LENGTH:
        raise ValueError(f"{len(text)} characters are no script: {MOST_LENGTH} at most")
    reader = _Reader({name: [value] for name, value in variables.items()})
    for command in _split(text):
        reader.take(command)
    return Script(reader.commands, reader.skipped)


# ---- commands ------------------------------------------------------------------


def _split(text: str) -> Iterator[_Command]:
    """Yield the commands of a script with their words as they are written."""
    splitter = _Splitter(text)
    while splitter.at < len(text):
        command = splitter.take()
        if command is not None:
            yield command
    last = splitter.ended("\n")
    if last is not None:
        yield last


class _Splitter:
    """Where the reading of a text is, and the words of the present command."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self._line = self._begun = 1
        self._words: list[str] = []
        self._word = ""

    def take(self) -> _Command | None:
        """Read one piece; return a command if it ends one."""
        text, at = self.text, self.at
        char = text[at]
        if text.startswith("\\\n", at):
            self._go(at + 2)
        elif char == "#" and not self._word:
            self._skip_comment()
        elif char in " \t\r":
            self._end_word()
            self._go(at + 1)
        elif char in "<>" or text.startswith("&>", at):
            if self._word.isdigit():
                self._word = ""
            self._end_word()
            self._go(_after_redirection(text, at + (char == "&")))
        elif char == "(" and self._opens():
            self._take_brackets()
        elif char in "\n;&|)":
            both = text[at : at + 2]
            sign = both if both in {";;", "&&", "||"} else char
            command = self.ended(sign)
            self._go(at + len(sign))
            self._begun = self._line
            return command
        else:
            end = _piece_end(text, at)
            self._word += text[at:end]
            self._go(end)
        return None

    def ended(self, sign: str) -> _Command | None:
        """Return the command that ends here, if there is any."""
        self._end_word()
        words, self._words = self._words, []
        return _Command(self._begun, words, sign) if words or sign in {";;", ")"} else None

    def _go(self, to: int) -> None:
        self._line += self.text.count("\n", self.at, to)
        self.at = to

    def _end_word(self) -> None:
        if self._word:
            self._words.append(self._word)
        self._word = ""

    def _skip_comment(self) -> None:
        end = self.text.find("\n", self.at)
        before = self.text[max(0, self.at - _MOST_INDENT) : self.at].rstrip(" \t")
        is_between = before.endswith("\\\n")  # continued lines
        self._go(len(self.text) if end < 0 else end + is_between)

    def _opens(self) -> bool:
        word = self._word
        return not word or bool(_ARRAY.match(word) or _NAME.fullmatch(word))

    def _take_brackets(self) -> None:
        """Take an array, the brackets of a function, or commands in brackets."""
        end = _closing(self.text, self.at)
        piece = self.text[self.at : end]
        if _ARRAY.match(self._word):
            self._word += piece
            self._end_word()
        else:
            self._end_word()
            self._words.append(piece)
        self._go(end)


def _after_redirection(text: str, at: int) -> int:
    """Return where a redirection and its target end; of a document, after its last line."""
    if match := _DOCUMENT.match(text, at):
        body = text.find("\n", match.end())
        last = re.compile(rf"^\t*{match[2]}$", re.MULTILINE).search(text, max(body, 0))
        return match.end() if body < 0 or last is None else last.end()
    while at < len(text) and text[at] in "<>&|":
        at += 1
    while at < len(text) and text[at] in " \t":
        at += 1
    while at < len(text) and text[at] not in " \t\n;&|)":
        at = _closing(text, at) if text[at] == "(" else _piece_end(text, at)
    return at


def _piece_end(text: str, at: int, depth: int = 0) -> int:
    """Return where the character, quotation or expansion that begins here ends."""
    char = text[at]
    if char == "\\":
        return min(at + 2, len(text))
    if char == "'":
        end = text.find("'", at + 1)
        if end < 0:
            raise ValueError("a ' is not closed")
        return end + 1
    if char == '"':
        at += 1
        while at < len(text) and text[at] != '"':
            at = at + 1 if text[at] == "'" else _piece_end(text, at, depth)
        if at >= len(text):
            raise ValueError('a " is not closed')
        return at + 1
    if char == "`":
        end = text.find("`", at + 1)
        if end < 0:
            raise ValueError("a ` is not closed")
        return end + 1
    if char == "$" and text[at + 1 : at + 2] in {"(", "{"}:
        return _closing(text, at + 1, depth + 1)
    return at + 1


def _closing(text: str, at: int, depth: int = 0) -> int:
    """Return where the bracket that opens here is closed."""
    if depth > MOST_DEPTH:
        raise ValueError(f"brackets are more than {MOST_DEPTH} deep inside each other")
    close = {"(": ")", "{": "}"}[text[at]]
    opened, at = text[at], at + 1
    while at < len(text):
        if text[at] == close:
            return at + 1
        if text[at] == "#" and text[at - 1] in " \t\n(" and opened == "(":
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
        elif text[at] == opened:
            at = _closing(text, at, depth + 1)
        else:
            at = _piece_end(text, at, depth)
    raise ValueError(f"a {opened} is not closed")


# ---- what they do --------------------------------------------------------------


class _Reader:
    """Variables and open branches, command by command."""

    def __init__(self, variables: dict[str, list[str]]) -> None:
        self.variables = variables
        self.commands: list[list[str]] = []
        self.skipped: list[str] = []
        self._branches: list[_Branch] = []
        self._in_condition = False
        self._status: bool | None = True
        self._is_negated = False
        self._cause = ""  # what the last thing that is not known depends on
        self._joined_by = "\n"
        self._left = _MOST_EXPANDED

    @property
    def _follows(self) -> bool:
        return self._branches[-1].follows if self._branches else True

    def take(self, command: _Command) -> None:
        """Follow one command."""
        words = command.words
        branch = self._branches[-1] if self._branches else None
        if branch is not None and branch.kind == "case" and branch.wants_pattern:
            if words[:1] == ["esac"]:
                self._branches.pop()
                words = words[1:]
                if not words:
                    return
            else:
                branch.pattern += [word for word in words if word != "("]
                if command.ends_with == ")":
                    self._choose(branch)
                return
        self._is_negated = False
        while words and words[0] in _KEYWORDS | {"fi", "done", "esac", "}", "!"}:
            self._is_negated = words[0] == "!"
            words = self._keyword(words, command.line)
        if words[:1] == ["case"]:
            self._open_case(words, command)
        elif words[:1] in (["for"], ["select"]):
            self._open("loop", command.line)
        elif words[1:2] == ["()"] or words[:1] == ["function"]:
            self._branches.append(_Branch("function", command.line, self._follows, False))
        elif words:
            self._simple(words, command.ends_with)
        if command.ends_with == ";;" and any(one.kind == "case" for one in self._branches):
            while self._branches[-1].kind != "case":  # an if that is not closed
                self._branches.pop()
            case = self._branches[-1]
            case.follows, case.wants_pattern, case.pattern = False, True, []

    def _open(self, kind: str, line: int) -> None:
        if self._follows:
            self.skipped.append(f"line {line}: a {kind} is not followed")
            self._cause = ""
        self._branches.append(_Branch(kind, line, self._follows, False))

    def _keyword(self, words: list[str], line: int) -> list[str]:
        """Open, change or close a branch; return the words after the keyword."""
        word, branch = words[0], self._branches[-1] if self._branches else None
        if word == "if":
            self._branches.append(_Branch("if", line, self._follows, self._follows))
            self._in_condition = True
        elif word in {"while", "until"}:
            self._open("loop", line)
        elif word == "{" and branch is None:
            self._branches.append(_Branch("group", line, True, True))
        elif branch is not None and branch.kind == "if":
            self._part_of_if(word, branch, line)
        elif word in {"done", "}"} and branch is not None and branch.kind != "case":
            self._branches.pop()
        return words[1:]

    def _part_of_if(self, word: str, branch: _Branch, line: int) -> None:
        if word == "then":
            is_so, self._in_condition = self._status, False
            if branch.outside and branch.chosen is False:
                branch.follows, branch.chosen = is_so is True, is_so
                if is_so is None:
                    self.skipped.append(f"line {line}: an if whose condition is not known")
            else:
                branch.follows = False
        elif word == "elif":
            branch.follows = branch.outside and branch.chosen is False
            self._in_condition = True
        elif word == "else":
            branch.follows = branch.outside and branch.chosen is False
        elif word == "fi":
            self._branches.pop()

    def _open_case(self, words: list[str], command: _Command) -> None:
        subject = "".join(self._expanded(words[1])) if len(words) > 1 and self._follows else ""
        branch = _Branch("case", command.line, self._follows, False, subject=subject)
        branch.wants_pattern = True
        if unknown_names(subject):
            branch.chosen = None
            name = self._cause = unknown_names(subject)[0]
            self.skipped.append(f"line {command.line}: a case of {name}, which is not known")
        self._branches.append(branch)
        branch.pattern = words[3:]
        if command.ends_with == ")":
            self._choose(branch)

    def _choose(self, branch: _Branch) -> None:
        patterns = ["".join(self._expanded(word)) for word in branch.pattern]
        fits = any(fnmatch.fnmatchcase(branch.subject, pattern) for pattern in patterns)
        branch.follows = branch.outside and branch.chosen is False and fits
        branch.chosen = branch.chosen or (None if branch.chosen is None else fits)
        branch.wants_pattern = False

    def _simple(self, words: list[str], ends_with: str) -> None:
        """Follow a command that is no keyword, if what stands before it lets it run."""
        joined, self._joined_by = self._joined_by, ends_with
        runs = self._follows
        if joined == "&&":
            runs = runs and self._status is True
        elif joined == "||":
            runs = runs and self._status is False
        if not runs:
            if self._may_run():
                self._forget(words)
            return
        status = self._run(words)
        self._status = (not status) if self._is_negated and status is not None else status

    def _may_run(self) -> bool:
        """Return whether a command that is not followed may run for all that is known."""
        if self._follows:
            return self._status is None
        return any(
            branch.outside and (branch.chosen is None or branch.kind == "loop")
            for branch in self._branches
        )

    def _forget(self, words: list[str]) -> None:
        """Note that a variable may have been assigned."""
        for word in words:
            if match := _ASSIGNMENT.match(word):
                self.variables[match[1]] = [_mark(self._cause or match[1])]

    def _run(self, words: list[str]) -> bool | None:
        if words[0].startswith("(("):
            number = self._number(words[0][2:-2])
            return None if number is None else number != 0
        if words[0] in {"[", "[["}:
            tested = [word for raw in words[1:] for word in self._expanded(raw, splits=False)]
            self._cause = next((n for word in tested for n in unknown_names(word)), self._cause)
            return _tested([word for word in tested if word not in {"]", "]]"}])
        given = words[1:] if words[0] in _DECLARING else words
        if all(_ASSIGNMENT.match(word) for word in given) and given:
            for word in given:
                self._assign(word)
            return True
        expanded = [word for raw in words for word in self._expanded(raw)]
        self.commands.append(expanded)
        if words[0] in {"true", ":", "false"}:
            return words[0] != "false"
        return None if self._in_condition else True  # a command that fails would end the script

    def _assign(self, word: str) -> None:
        match = _ASSIGNMENT.match(word)
        if match is None or match[2]:
            return
        name, adds, value = match[1], match[3] == "+", word[match.end() :]
        if value.startswith("("):
            values: list[str] = []
            for command in _split(value[1:-1]):
                values += [one for raw in command.words for one in self._expanded(raw)]
            self.variables[name] = (self.variables.get(name, []) if adds else []) + values
        else:
            text = " ".join(self._expanded(value, splits=False))
            before = " ".join(self.variables.get(name, [])) if adds else ""
            self.variables[name] = [before + text]

    # ---- expansion -------------------------------------------------------------

    def _expanded(self, word: str, *, splits: bool = True, depth: int = 0) -> list[str]:
        """Return the words that one written word becomes."""
        if depth > MOST_DEPTH:
            raise ValueError(f"expansions are more than {MOST_DEPTH} deep inside each other")
        words: list[str] = [""]
        is_empty, at = True, 0
        while at < len(word):
            end = _piece_end(word, at)
            piece = word[at:end]
            at = end
            if piece[0] == "\\":
                words[-1] += piece[1:]
            elif piece[0] == "'":
                words[-1] += piece[1:-1]
                is_empty = False
            elif piece[0] == '"':
                parts = self._quoted(piece[1:-1], depth)
                if parts is not None:
                    words[-1] += parts[0] if parts else ""
                    words += parts[1:]
                    is_empty = is_empty and not parts
            elif piece[0] in "$`":
                name_end = _NAME.match(word, end) if piece == "$" else None
                if name_end:
                    piece, at = word[end - 1 : name_end.end()], name_end.end()
                elif piece == "$" and word[at : at + 1] in set("@*#?0123456789"):
                    piece, at = word[end - 1 : at + 1], at + 1
                values = self._value(piece, depth)
                pieces = [part for one in values for part in _split_words(one, splits=splits)]
                words[-1] += pieces[0] if pieces else ""
                words += pieces[1:]
            else:
                words[-1] += piece
                is_empty = False
        if words[0].startswith("~/") and word.startswith("~/") and "HOME" in self.variables:
            words[0] = " ".join(self._variable("HOME")) + words[0][1:]
        return [] if words == [""] and is_empty and splits else words

    def _quoted(self, text: str, depth: int) -> list[str] | None:
        """Return the words inside double quotes: one, or those of an array; None is no word."""
        words, at, only_array = [""], 0, False
        while at < len(text):
            if text[at] == "\\":
                following = text[at + 1 : at + 2]
                words[-1] += following if following in '$`"\\' else text[at : at + 2]
                at += 2
                continue
            if text[at] not in "$`":
                words[-1] += text[at]
                at += 1
                continue
            end = _piece_end(text, at)
            piece = text[at:end]
            if piece == "$" and (match := _NAME.match(text, end)):
                piece, end = text[at : match.end()], match.end()
            elif piece == "$" and text[end : end + 1] in set("@*#?0123456789"):
                piece, end = text[at : end + 1], end + 1
            values = self._value(piece, depth)
            is_array = piece == "$@" or "@" in piece[:4] or piece.endswith("[@]}")
            only_array = only_array or (is_array and not values)
            if is_array:
                words[-1] += values[0] if values else ""
                words += values[1:]
            else:
                words[-1] += " ".join(values)
            at = end
        return None if only_array and words == [""] else words

    def _value(self, piece: str, depth: int) -> list[str]:
        """Return what one expansion stands for."""
        if piece.startswith("$(("):
            number = self._number(piece[3:-2])
            return [_mark("$((...))") if number is None else str(number)]
        if piece.startswith(("$(", "`")):
            return [_mark(piece if len(piece) < 40 else piece[:36] + "...)")]
        if not piece.startswith("${"):
            return self._variable(piece[1:]) if len(piece) > 1 else [piece]
        inner = piece[2:-1]
        if inner.startswith(("!", "#")):
            return [_mark(inner)]
        match = re.match(r"([A-Za-z_]\w*|[@*0-9])(\[[@*]\])?", inner)
        if match is None:
            return [_mark(inner)]
        name, rest = match[1], inner[match.end() :]
        return self._with_default(name, rest, depth)

    def _variable(self, name: str) -> list[str]:
        if name in {"@", "*"}:
            return []
        values = self.variables.get(name, [_mark(f"${name}" if name.isdigit() else name)])
        self._spend(sum(map(len, values)) + len(values))
        return values

    def _spend(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise ValueError(f"its variables expand to more than {_MOST_EXPANDED} characters")

    def _with_default(self, name: str, rest: str, depth: int) -> list[str]:
        is_set = name in self.variables and self.variables[name] != [""]
        if name in {"@", "*"}:
            return []
        sign = next(
            (one for one in (":-", ":=", ":+", ":?", "-", "=", "+") if rest.startswith(one)), ""
        )
        default = rest[len(sign) :]
        if sign in {":+", "+"}:
            return self._expanded(default, splits=False, depth=depth + 1) if is_set else [""]
        if sign in {":-", "-", ":=", "="} and not is_set:
            value = self._expanded(default, splits=False, depth=depth + 1)
            if "=" in sign:
                self.variables[name] = value
            return value
        values = self._variable(name)
        if rest.startswith("//") and rest.count("/") >= 3:
            old, _, new = rest[2:].partition("/")
            self._spend(sum(map(len, values)) * len(new))
            values = [value.replace(old, new) for value in values]
        return values

    def _number(self, text: str) -> int | None:
        """Return the value of an arithmetic expression; None is not known."""

        def named(match: re.Match[str]) -> str:
            return " ".join(self._variable(match[0]))

        plain = re.sub(r"\$\{?([A-Za-z_]\w*)\}?", r"\1", text)
        for _ in range(2):  # a variable may hold an expression
            plain = _NAME.sub(named, plain) if _BEGIN not in plain else plain
        try:
            return _computed(ast.parse(plain.strip(), mode="eval").body)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return None


def _split_words(text: str, *, splits: bool) -> list[str]:
    return text.split() if splits and _BEGIN not in text else [text]


def _mark(name: str) -> str:
    return f"{_BEGIN}{name}{_END}"


_OPERATIONS: dict[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: int(a / b) if abs(a) < 2**50 else a // b,
    ast.Mod: operator.mod,
    ast.Gt: operator.gt,
    ast.Lt: operator.lt,
    ast.GtE: operator.ge,
    ast.LtE: operator.le,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


def _computed(node: ast.expr) -> int:
    """Return the value of an expression of integers.

    Raises:
        ValueError: it is of something else.
    """
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_computed(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_computed(left), _computed(right))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _OPERATIONS:
            return int(_OPERATIONS[type(op)](_computed(left), _computed(right)))
    raise ValueError(ast.dump(node))


def _tested(words: list[str]) -> bool | None:
    """Return whether a test in brackets holds; None is not known."""
    if words.count("!") > MOST_DEPTH:
        return None
    for sign, combine in (("||", any), ("&&", all)):
        if sign in words:
            at = words.index(sign)
            both = [_tested(words[:at]), _tested(words[at + 1 :])]
            return None if None in both else combine(both)
    if words[:1] == ["!"]:
        result = _tested(words[1:])
        return None if result is None else not result
    if any(unknown_names(word) for word in words):
        return None
    match words:
        case ["-n", text] | [text]:
            return bool(text)
        case ["-z", text]:
            return not text
        case [left, "=" | "==", right]:
            return fnmatch.fnmatchcase(left, right)
        case [left, "!=", right]:
            return not fnmatch.fnmatchcase(left, right)
        case [left, "-eq" | "-ne" | "-gt" | "-ge" | "-lt" | "-le" as sign, right]:
            try:
                a, b = int(left), int(right)
            except ValueError:
                return None
            return {
                "-eq": a == b,
                "-ne": a != b,
                "-gt": a > b,
                "-ge": a >= b,
                "-lt": a < b,
                "-le": a <= b,
            }[sign]
    return None
