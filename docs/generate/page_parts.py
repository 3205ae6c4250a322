"""Pages that are written by hand but for some parts, each between two lines that say so."""

from collections.abc import Callable, Mapping

END = "<!-- end -->\n"


def begin(part: str) -> str:
    """Return the line in front of a part."""
    return f"<!-- generated ({part}): make docs -->\n"


def generated(page: str, parts: Mapping[str, Callable[[], str]]) -> str:
    """Return a page with the generated parts in their places.

    Raises:
        ValueError: the page has no place for a part.
    """
    for part, text in parts.items():
        before, mark, rest = page.partition(begin(part))
        if not mark:
            raise ValueError(f"there is no place for {part}: {begin(part)}")
        page = before + mark + text() + END + rest.partition(END)[2]
    return page
