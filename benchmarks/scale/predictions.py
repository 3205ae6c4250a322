"""Published runs beside what the simulator says of them: table, errors, picture."""

import math
from collections.abc import Iterable, Sequence
from statistics import median

from benchmarks.scale.calibration import Predicted, System, predict, systems


def predictions(system: System) -> list[Predicted]:
    """Return what is said of each row of a system."""
    return [predict(system, row, system.parameters) for row in system.rows]


def all_predictions() -> list[Predicted]:
    """Return those of all systems; about half a minute."""
    return [one for system in systems().values() for one in predictions(system)]


def errors(told: Iterable[Predicted]) -> list[float]:
    """Return how far predicted rows are from what is published, per cent."""
    return [100 * abs(one.error) for one in told if one.row.role == "predict"]


def median_and_worst(told: Sequence[Predicted]) -> tuple[float, float]:
    """Return both of the predicted rows, per cent."""
    found = errors(told)
    return median(found), max(found)


def losing(told: Sequence[Predicted]) -> list[tuple[Predicted, bool]]:
    """Return the runs that are published as slower asynchronously; and whether it is said so."""
    by_name = {one.row.name: one for one in told}
    return [
        (one, one.step_s > (0.0 if one.row.less else by_name[one.row.loses_to].step_s))
        for one in told
        if one.row.loses_to
    ]


_HEADING = ("Run", "", "Published, s", "Model, s", "Error", "Model: waits, s", "Model: trains, s")


def cells(one: Predicted) -> tuple[str, ...]:
    """Return a row as text."""
    row = one.row
    return (
        row.name,
        {"fit": "fitted", "predict": "predicted"}[row.role],
        f"{row.step_s:.1f}" if row.step_s else "-",
        f"{one.step_s:.1f}",
        f"{100 * one.error:+.1f}%" if row.step_s else "-",
        f"{one.generate_s:.1f}",
        f"{one.train_s:.1f}",
    )


def plain(told: Sequence[Predicted]) -> str:
    """Return rows for a terminal."""
    rows = [_HEADING, *map(cells, told)]
    return "\n".join(
        f"{first:44} {role:10}" + "".join(f"{cell:>18}" for cell in rest)
        for first, role, *rest in rows
    )


def markdown(told: Sequence[Predicted]) -> str:
    """Return all systems as docs/scale.md has them."""
    by_row = {one.row.name: one for one in told}
    lines = []
    for system in systems().values():
        found = ", ".join(f"`{name}` {value:.3g}" for name, value in system.fitted.items())
        lines += [f"**{system.name}**", "", f"Fitted: {found}.", ""]
        lines += [_line(_HEADING), "|---|---|" + "---:|" * (len(_HEADING) - 2)]
        lines += [*(_line(cells(by_row[row.name])) for row in system.rows), ""]
    return "\n".join(lines)


def _line(row: Sequence[str]) -> str:
    return "| " + " | ".join(row) + " |"


# ---- picture -----------------------------------------------------------------

_SIZE = 520  # of the axes, pixels
_LEFT, _TOP = 70, 56
_RANGE = (30.0, 2000.0)  # seconds
_TICKS = (30, 60, 120, 250, 500, 1000, 2000)
_FIT, _PREDICTED, _LOSING = "#8a8a8a", "#0b62c4", "#b3003c"


def svg(told: Sequence[Predicted]) -> str:
    """Return predicted against published seconds of a step, on logarithmic scales."""
    width, height = _LEFT + _SIZE + 230, _TOP + _SIZE + 60
    bottom, right = _TOP + _SIZE, _LEFT + _SIZE
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="12" '
        'fill="#1a1a1a">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="32" font-size="17" font-weight="bold">Seconds of a step: the '
        "simulator's against published ones</text>",
    ]
    for tick in _TICKS:
        x, y = _x(tick), _y(tick)
        lines += [
            f'<path d="M{x} {_TOP}V{bottom}M{_LEFT} {y}H{right}" stroke="#e2e2e2"/>',
            f'<text x="{x}" y="{bottom + 17}" text-anchor="middle">{tick}</text>',
            f'<text x="{_LEFT - 7}" y="{y + 4}" text-anchor="end">{tick}</text>',
        ]
    low, high = _RANGE
    for factor, dashes in (
        (1.0, ""),
        (1.2, ' stroke-dasharray="4 4"'),
        (1 / 1.2, ' stroke-dasharray="4 4"'),
    ):
        begin, end = max(low, low / factor), min(high, high / factor)
        lines.append(
            f'<path d="M{_x(begin)} {_y(begin * factor)}L{_x(end)} {_y(end * factor)}" '
            f'stroke="#1a1a1a" stroke-opacity="0.5"{dashes}/>'
        )
    lines += [
        f'<rect x="{_LEFT}" y="{_TOP}" width="{_SIZE}" height="{_SIZE}" fill="none" '
        'stroke="#1a1a1a"/>',
        f'<text x="{_LEFT + _SIZE // 2}" y="{bottom + 40}" text-anchor="middle">published</text>',
        f'<text transform="translate(22 {_TOP + _SIZE // 2}) rotate(-90)" text-anchor="middle">'
        "simulated</text>",
    ]
    keys = (
        (_FIT, "fitted"),
        (_PREDICTED, "predicted"),
        (_LOSING, "predicted, published as slower"),
    )
    for number, (color, label) in enumerate(keys):
        y = _TOP + 16 + 20 * number
        lines += [
            f'<circle cx="{right + 18}" cy="{y}" r="5" fill="{color}"/>',
            f'<text x="{right + 28}" y="{y + 4}">{label}</text>',
        ]
    lines.append(f'<text x="{right + 13}" y="{_TOP + 80}">dashed: 20% off</text>')
    for one in sorted(told, key=lambda one: one.row.role):
        if one.row.less or not one.row.step_s:
            continue  # a difference of two runs
        color = _FIT if one.row.role == "fit" else _PREDICTED
        if one.row.loses_to:
            color = _LOSING
        lines.append(
            f'<circle cx="{_x(one.row.step_s)}" cy="{_y(one.step_s)}" r="5" fill="{color}" '
            f'stroke="#ffffff"><title>{one.row.name}</title></circle>'
        )
    return "\n".join([*lines, "</svg>", ""])


def _share(seconds: float) -> float:
    low, high = map(math.log, _RANGE)
    return (math.log(min(max(seconds, _RANGE[0]), _RANGE[1])) - low) / (high - low)


def _x(seconds: float) -> int:
    return _LEFT + round(_SIZE * _share(seconds))


def _y(seconds: float) -> int:
    return _TOP + round(_SIZE * (1 - _share(seconds)))
