"""Curves as SVG: the mean of the seeds, and a band from the lowest to the highest."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

COLORS = ("#0b62c4", "#b3003c", "#0a7d34", "#b35c00", "#6a3fb5", "#1a1a1a")
_SIZE = (400, 280)  # pixels of a panel's axes
_LEFT, _TOP, _BOTTOM, _RIGHT, _ROW = 62, 40, 46, 22, 20
_GRID = 60  # points of a curve
_TICKS = 6  # at most
Track = Sequence[tuple[float, float]]  # (x, y) of one seed, x rising


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Curves on the same axes, each of several seeds."""

    title: str
    x: str
    y: str
    curves: Mapping[str, Sequence[Track]]  # name -> tracks of its seeds


def value_at(track: Track, x: float) -> float:
    """Return y at x, by interpolation; the last one after the end."""
    for (start, before), (end, after) in pairwise(track):
        if start <= x <= end:
            part = (x - start) / (end - start) if end > start else 1.0
            return before + part * (after - before)
    return track[-1][1]


def ticks(highest: float) -> list[float]:
    """Return round numbers from 0 to the first one that is at least ``highest``."""
    highest = highest or 1.0
    power = 10.0 ** math.floor(math.log10(highest / (_TICKS - 1)))
    step = next(
        size * power
        for size in (1, 2, 2.5, 5, 10)
        if size * power * (_TICKS - 1) >= highest * 0.999
    )
    return [step * number for number in range(math.ceil(highest / step - 1e-3) + 1)]


def svg(panels: Sequence[Panel]) -> str:
    """Return panels in a row; a name has one color in all of them."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.curves))
    colors = {name: COLORS[number % len(COLORS)] for number, name in enumerate(names)}
    panel_width = _LEFT + _SIZE[0] + _RIGHT
    columns = 2 * len(panels)
    rows = -(-len(names) // columns)
    width, height = panel_width * len(panels), _TOP + _SIZE[1] + _BOTTOM + _ROW * rows + 8
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="12" '
        'fill="#1a1a1a">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for number, panel in enumerate(panels):
        lines.append(f'<g transform="translate({number * panel_width + _LEFT} {_TOP})">')
        lines += _panel(panel, colors)
        lines.append("</g>")
    for number, name in enumerate(names):
        x = _LEFT + number % columns * (panel_width // 2)
        y = height - 8 - _ROW * (rows - 1 - number // columns)
        lines += [
            f'<path d="M{x} {y - 4}h18" stroke="{colors[name]}" stroke-width="3"/>',
            f'<text x="{x + 24}" y="{y}">{name}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])


def _panel(panel: Panel, colors: Mapping[str, str]) -> Iterator[str]:
    width, height = _SIZE
    last = max(min(track[-1][0] for track in seeds) for seeds in panel.curves.values())
    ys = ticks(max(y for seeds in panel.curves.values() for track in seeds for _, y in track))
    yield f'<text y="-14" font-size="14" font-weight="bold">{panel.title}</text>'
    for x in (x for x in ticks(last) if x <= last * 1.001):
        at = width * x / last
        yield f'<path d="M{at:.1f} 0V{height}" stroke="#e2e2e2"/>'
        yield f'<text x="{at:.1f}" y="{height + 17}" text-anchor="middle">{x:g}</text>'
    for y in ys:
        at = height * (1 - y / ys[-1])
        yield f'<path d="M0 {at:.1f}H{width}" stroke="#e2e2e2"/>'
        yield f'<text x="-7" y="{at + 4:.1f}" text-anchor="end">{y:g}</text>'
    yield f'<rect width="{width}" height="{height}" fill="none" stroke="#1a1a1a"/>'
    yield f'<text x="{width // 2}" y="{height + 36}" text-anchor="middle">{panel.x}</text>'
    yield (
        f'<text transform="translate(-44 {height // 2}) rotate(-90)" text-anchor="middle">'
        f"{panel.y}</text>"
    )
    for name, seeds in panel.curves.items():
        yield from _curve(seeds, colors[name], (width / last, height / ys[-1]))


def _curve(seeds: Sequence[Track], color: str, scale: tuple[float, float]) -> list[str]:
    """Draw where all seeds are; ``scale`` is pixels per unit of x and y."""
    first = max(track[0][0] for track in seeds)
    last = min(track[-1][0] for track in seeds)
    drawn: dict[str, list[str]] = {"low": [], "mean": [], "high": []}
    for number in range(_GRID + 1):
        x = first + (last - first) * number / _GRID
        values = [value_at(track, x) for track in seeds]
        extremes = {"low": min(values), "mean": statistics.fmean(values), "high": max(values)}
        for name, value in extremes.items():
            drawn[name].append(f"{x * scale[0]:.1f} {_SIZE[1] - value * scale[1]:.1f}")
    band = drawn["low"] + drawn["high"][::-1]
    return [
        f'<path d="M{"L".join(band)}Z" fill="{color}" fill-opacity="0.15"/>',
        f'<path d="M{"L".join(drawn["mean"])}" fill="none" stroke="{color}" stroke-width="2"/>',
    ]
