"""Lines of a role's log, as tests read them."""

import re

_HEAD = re.compile(r"\d{4}-\d\d-\d\dT\S+ ([DIWE]) ")


def level_of(line: str) -> str:
    """Return the letter of a line's level; empty if it is no line of a log."""
    found = _HEAD.match(line)
    return found[1] if found else ""
