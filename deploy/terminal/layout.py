"""Shares a screen among blocks of lines, cutting those that do not fit. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.text import Text

TITLE = 12  # columns of the names at the left
_SPARKS = "▁▂▃▄▅▆▇█"
_PLAIN_SPARKS = "_.-:=+*#"


@dataclass(frozen=True, slots=True)
class Block:
    """Lines that belong together."""

    title: str
    lines: list[Text]
    rank: int  # 0 is given room first
    least: int  # lines without which it is not worth showing
    good: int  # lines that it gets before any other gets more than that


@dataclass(frozen=True, slots=True)
class Screen:
    """Size of the screen that lines have to fit."""

    width: int
    height: int
    plain: bool = False  # no characters beyond ASCII

    def bar(self, share: float, width: int, style: str = "") -> Text:
        """Return a bar of a share from 0 to 1."""
        full, empty = ("#", ".") if self.plain else ("█", "░")
        filled = round(min(1.0, max(0.0, share)) * width)
        return Text.assemble((full * filled, style), (empty * (width - filled), "dim"))

    def spark(self, values: Sequence[float], width: int) -> str:
        """Return a curve of one line: means of equal parts, from the lowest to the highest."""
        marks = _PLAIN_SPARKS if self.plain else _SPARKS
        columns = min(width, len(values))
        edges = [len(values) * i // columns for i in range(columns + 1)] if columns else []
        means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
        low, high = min(means, default=0.0), max(means, default=0.0)
        scale = (len(marks) - 1) / (high - low) if high > low else 0.0
        return "".join(marks[round((mean - low) * scale)] for mean in means)


def fit(blocks: Sequence[Block], height: int) -> list[Text]:
    """Return the lines of the blocks that fit, in their order; cut lines are counted.

    By rank, every block gets its least lines, then its good ones, then the others; the rest
    goes between them. The number of cut lines is at the left of the last one.
    """
    shown: dict[int, int] = {}
    by_rank = sorted(range(len(blocks)), key=lambda i: blocks[i].rank)
    for i in by_rank:
        least = min(blocks[i].least, len(blocks[i].lines))
        if least <= height - sum(shown.values()):
            shown[i] = least
    wishes = [(i, blocks[i].good) for i in by_rank] + [(i, height) for i in by_rank]
    for i, wanted in wishes:
        if i in shown:
            more = min(wanted, len(blocks[i].lines)) - shown[i]
            shown[i] += max(0, min(more, height - sum(shown.values())))
    spaced = sum(shown.values()) + len(shown) - 1 <= height
    lines: list[Text] = []
    for i in sorted(shown):
        if spaced and lines:
            lines.append(Text())
        titles = [blocks[i].title, *("" for _ in range(shown[i] - 1))]
        if cut := len(blocks[i].lines) - shown[i]:
            titles[-1] = f"{titles[-1]}+{cut}" if shown[i] == 1 else f"+{cut} more"
        shown_lines = zip(titles, blocks[i].lines[: shown[i]], strict=True)
        lines += [Text.assemble((title.ljust(TITLE), "dim"), line) for title, line in shown_lines]
    return lines


def flow(entries: Iterable[Text], width: int) -> list[Text]:
    """Return entries one after another, on as many lines as they take."""
    lines = [Text()]
    for entry in entries:
        if lines[-1] and len(lines[-1]) + len(entry) > width:
            lines.append(Text())
        lines[-1].append_text(entry)
    return lines
