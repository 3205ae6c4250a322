"""Parts of a script's text whose values are the sandbox's and not the user's. Pure.

Found by what the text looks like, not by what bash does: a name that is set in one place counts as
set everywhere.
"""

import re
from collections.abc import Collection

_OUTSIDE = re.compile(
    r"\\.|\$'(?:\\.|[^'\\])*'|'[^']*'|(?<![^\s;&|()])#[^\n]*|\$?\(\(?|[)\"`]", re.DOTALL
)
_IN_QUOTES = re.compile(r"\\.|\$\(\(?|[\"`]", re.DOTALL)
_DOCUMENT = re.compile(
    r"(?<!<)<<-?[ \t]*(?P<quote>['\"]?)(?P<end>\w+)(?P=quote)(?P<rest>[^\n]*)\n"
    r"(?P<body>.*?)^\t*(?P=end)$",
    re.DOTALL | re.MULTILINE,
)
_PLAIN = re.compile(r"\$([A-Za-z_]\w*)")
# ${NAME} but no ${NAME:-value}, := or :+, which say what holds without a value.
_BRACED = re.compile(r"\$\{[!#]?([A-Za-z_]\w*+)(?:\[[^\]]*\])?+(?!:?[-=+])")
_ARITHMETIC = re.compile(r"\$\(\((.*?)\)\)", re.DOTALL)
_SUBSTITUTION = re.compile(r"\$\([^()]*\)|\$\{[^}]*\}")
_NAME = re.compile(r"(?<![\w$.-])[A-Za-z_]\w*")
_SET = re.compile(
    r"(?<![\w.$/-])([A-Za-z_]\w*)(?:\[[^\]]*\])?\+?=(?!=)"
    r"|\$\{([A-Za-z_]\w*):?="
    r"|\b(?:for|select|printf[ ]+-v)\s+([A-Za-z_]\w*)"
)
_TAKES_NAMES = re.compile(
    r"\b(?:read|local|declare|typeset|mapfile|readarray|getopts)\b([^\n;|&<]*)"
)
_BASHS_OWN = re.compile(
    r"PATH|HOME|(OLD)?PWD|IFS|OPT(ARG|IND)|S?RANDOM|(EPOCH)?SECONDS|EPOCHREALTIME|LINENO|SHLVL"
    r"|FUNCNAME|PIPESTATUS|REPLY|MAPFILE|BASH\w*"
)


def unset_names(text: str, variables: Collection[str]) -> list[str]:
    """Return the names that a script expands although nothing sets them, in their order.

    Args:
        text: The script.
        variables: Names of its environment.
    """
    text, _ = _scanned(text)
    found = {match.start(): match[1] for form in (_PLAIN, _BRACED) for match in form.finditer(text)}
    for match in _ARITHMETIC.finditer(text):
        for name in _NAME.finditer(_SUBSTITUTION.sub(lambda part: " " * len(part[0]), match[1])):
            found[match.start(1) + name.start()] = name[0]
    is_set = {name for match in _SET.finditer(text) for name in match.groups() if name}
    for match in _TAKES_NAMES.finditer(text):
        is_set.update(_NAME.findall(match[1]))
    names = dict.fromkeys(name for _, name in sorted(found.items()))
    known = {*is_set, *variables}
    return [name for name in names if name not in known and not _BASHS_OWN.fullmatch(name)]


def substitutions(text: str) -> list[str]:
    """Return the commands of a script whose output becomes a part of a word, in their order."""
    return list(dict.fromkeys(_scanned(text)[1]))


def _scanned(text: str) -> tuple[str, list[str]]:
    """Return a script without comments and quoted texts, and its outermost substitutions."""
    text = _DOCUMENT.sub(_document, text)
    kept: list[str] = []
    found: list[str] = []
    ends: list[str] = []  # closing marks still to come
    place, start, depth = 0, 0, -1  # start and depth of an open substitution, if any
    while match := (_IN_QUOTES if ends[-1:] == ['"'] else _OUTSIDE).search(text, place):
        kept.append(text[place : match.start()])
        token, place = match[0], match.end()
        if ends and token == ends[-1]:
            ends.pop()
            kept.append(token)
            if len(ends) == depth:
                found.append(text[start:place])
                depth = -1
        elif token in {'"', "`", "(", "((", "$(", "$(("}:
            if token in {"`", "$("} and depth < 0:
                start, depth = match.start(), len(ends)
            ends += [")"] * token.count("(") or [token]
            kept.append(token)
        else:
            kept.append(" ")
    return "".join([*kept, text[place:]]), found


def _document(match: re.Match[str]) -> str:
    """Return a here-document's body as far as it is expanded, without quotes, which are text."""
    body = "" if match["quote"] else re.sub("['\"#]", " ", match["body"])
    return f"{match['rest']}\n{body}"
