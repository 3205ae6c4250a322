"""The comparison page over HTTP: read-only, with a token as the page of one run."""

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path

from aiohttp import web

from slipstream.broker.dashboard.site import FolderReader, PageServer, json_answer
from slipstream.broker.history.compare.bootstrap import LEVEL, RESAMPLES, difference_of_means
from slipstream.broker.history.compare.curves import AXES, Axis, Curve, overlaid, smoothed
from slipstream.broker.history.compare.runs import ComparedRun, Missing, named, runs_in
from slipstream.broker.history.compare.settings_diff import differences
from slipstream.broker.history.table import shown

MAX_OVERLAID = 16  # runs in one chart
_READ_S = 30.0  # limit for reading run folders
_MAX_NAME = 200  # characters
_MOST_SMOOTHING = 0.999


class ComparisonPage(PageServer):
    """Serves the page of several runs, or of a folder of runs, read when a browser asks."""

    def __init__(
        self, folders: Sequence[Path], *, parent: Path | None = None, host: str, port: int
    ) -> None:
        """Prepare to serve.

        ``parent`` is a folder of runs, which is looked through again whenever the list is read.

        Raises:
            ConfigError: one of them is no run folder.
        """
        super().__init__("compare.html", host=host, port=port)
        self._parent = parent
        found = named(runs_in(parent) if parent is not None else folders)
        self._runs = {run.name: run for run in found}
        self._reader = FolderReader(_READ_S)
        for path, handler in {
            "/runs.json": self._list,
            "/names.json": self._names,
            "/chart.json": self._chart,
            "/chart.csv": self._csv,
            "/difference.json": self._difference,
        }.items():
            self.get(path, handler)

    @property
    def num_runs(self) -> int:
        """Runs on the page."""
        return len(self._runs)

    # ---- answers -------------------------------------------------------------

    async def _list(self, _request: web.Request) -> web.StreamResponse:
        def read() -> dict[str, object]:
            self._look_again()
            runs = list(self._runs.values())
            return {
                "parent": str(self._parent) if self._parent is not None else "",
                "all_chosen": self._parent is None,
                "runs": [run.row() for run in runs],
                "differences": differences([run.settings for run in runs]),
            }

        return json_answer(await self._reader.read(read))

    async def _names(self, request: web.Request) -> web.StreamResponse:
        runs = self._chosen(request)

        def read() -> dict[str, object]:
            for run in runs:
                run.table.refresh()
            return {
                "names": sorted({name for run in runs for name in run.table.names}),
                "differences": differences([run.settings for run in runs]),
            }

        return json_answer(await self._reader.read(read))

    async def _chart(self, request: web.Request) -> web.StreamResponse:
        runs, name = self._chosen(request), request.query.get("metric", "")[:_MAX_NAME]
        axis, weight = _axis(request), _smoothing(request)

        def read() -> dict[str, object]:
            overlay = overlaid(name, _curves(runs, name), axis, weight=weight)
            return {
                "metric": name,
                "x": shown(overlay.x),
                "runs": [
                    {"name": run, "columns": [shown(column) for column in columns]}
                    for run, columns in overlay.columns.items()
                ],
                "missing": [run.name for run in runs if run.name not in overlay.columns],
            }

        return json_answer(await self._reader.read(read))

    async def _csv(self, request: web.Request) -> web.StreamResponse:
        runs, name = self._chosen(request), request.query.get("metric", "")[:_MAX_NAME]
        weight = _smoothing(request)
        text = await self._reader.read(lambda: csv_of(name, _curves(runs, name), weight))
        file = "".join(c if c.isascii() and c.isalnum() else "-" for c in name) or "chart"
        return web.Response(
            body=text.encode(),
            content_type="text/csv",
            charset="utf-8",
            headers={"Content-Disposition": f'attachment; filename="{file}.csv"'},
        )

    async def _difference(self, request: web.Request) -> web.StreamResponse:
        a, b = self._run(request.query.get("a", "")), self._run(request.query.get("b", ""))
        return json_answer(await self._reader.read(lambda: difference_of(a, b)))

    # ---- reading -------------------------------------------------------------

    def _look_again(self) -> None:
        """Take in runs that began in the folder, and forget those that are gone."""
        if self._parent is None:
            return
        known = {run.folder: run for run in self._runs.values()}
        found = named(runs_in(self._parent))
        self._runs = {run.name: known.get(run.folder, run) for run in found}

    def _run(self, name: str) -> ComparedRun:
        if name not in self._runs:
            raise web.HTTPBadRequest(text="no run of that name is on this page\n")
        return self._runs[name]

    def _chosen(self, request: web.Request) -> list[ComparedRun]:
        names = dict.fromkeys(request.query.getall("run", []))
        if len(names) > MAX_OVERLAID:
            raise web.HTTPBadRequest(text=f"a chart holds {MAX_OVERLAID} runs at most\n")
        return [self._run(name) for name in names]


def difference_of(a: ComparedRun, b: ComparedRun) -> dict[str, object]:
    """Return the difference of two final evaluations, B less A, or why it is not known."""
    left, right = a.final_scores(), b.final_scores()
    if isinstance(left, Missing):
        return {"reason": left.reason}
    if isinstance(right, Missing):
        return {"reason": right.reason}
    return {
        "steps": [left.step, right.step],
        "num_problems": [len(left.by_problem), len(right.by_problem)],
        "interval": difference_of_means(left.by_problem, right.by_problem),
        "level": LEVEL,
        "resamples": RESAMPLES,
    }


def csv_of(name: str, curves: dict[str, Curve], weight: float) -> str:
    """Return every point of a figure, one line each, in order of runs and steps."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["run", *AXES, name, *(["smoothed"] if weight > 0.0 else [])])
    for run, curve in curves.items():
        columns = [curve.step, curve.wall_s, curve.trained_tokens, curve.value]
        if weight > 0.0:
            columns.append(smoothed(curve.value, weight))
        for row in zip(*(column.tolist() for column in columns), strict=True):
            writer.writerow([run, *(cell(value) for value in row)])
    return text.getvalue()


def cell(value: float) -> str:
    """Return a figure as a cell of CSV, empty if unknown."""
    if not math.isfinite(value):
        return ""
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)


def _curves(runs: Sequence[ComparedRun], name: str) -> dict[str, Curve]:
    curves: dict[str, Curve] = {}
    for run in runs:
        run.table.refresh()
        if (curve := run.table.curve(name)) is not None:
            curves[run.name] = curve
    return curves


def _axis(request: web.Request) -> Axis:
    wanted = request.query.get("x", AXES[0])
    for axis in AXES:
        if axis == wanted:
            return axis
    raise web.HTTPBadRequest(text=f"x must be one of {', '.join(AXES)}\n")


def _smoothing(request: web.Request) -> float:
    try:
        weight = float(request.query.get("smooth", "0"))
    except ValueError:
        weight = math.nan
    if not 0.0 <= weight <= _MOST_SMOOTHING:
        raise web.HTTPBadRequest(text=f"smooth must be from 0 to {_MOST_SMOOTHING}\n")
    return weight
