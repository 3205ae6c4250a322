"""The comparison over HTTP: behind its token, bounded, and what it answers."""

import csv
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from yarl import URL

from slipstream.broker.dashboard.comparison import MAX_OVERLAID, ComparisonPage
from tests.support.run_folders import write_run

Get = Callable[[str], Awaitable[tuple[int, str]]]


@asynccontextmanager
async def served(
    folders: Sequence[Path], parent: Path | None = None
) -> AsyncIterator[tuple[Get, URL]]:
    """Serve runs; yield what asks with the token, and the address."""
    page = ComparisonPage(folders, parent=parent, host="127.0.0.1", port=0)
    address = URL(await page.start())
    try:
        async with aiohttp.ClientSession() as session:

            async def get(path: str) -> tuple[int, str]:
                url = address.join(URL(path)).update_query(token=address.query["token"])
                async with session.get(url) as answer:
                    return answer.status, await answer.text()

            yield get, address
    finally:
        await page.stop()


@pytest.fixture
def pair(tmp_path: Path) -> list[Path]:
    a = write_run(tmp_path / "a", scores=[0.0, 1.0, 0.0, 0.0] * 10)
    b = write_run(tmp_path / "b", lr=0.0, scores=[1.0, 1.0, 0.0, 1.0] * 10)
    return [a, b]


async def test_nothing_is_answered_without_the_token_or_by_another_host_name(pair: list[Path]):
    async with served(pair) as (_, address), aiohttp.ClientSession() as session:
        for path in ("/", "/runs.json", "/chart.csv", "/static/compare.js"):
            async with session.get(address.join(URL(path))) as answer:
                assert answer.status == 401
        async with session.get(address, headers={"Host": "evil.example"}) as answer:
            assert answer.status == 403
        async with session.get(address) as answer:
            assert answer.status == 200
            assert "default-src 'none'" in answer.headers["Content-Security-Policy"]


async def test_list_names_chart_and_difference(pair: list[Path]):
    async with served(pair) as (get, _):
        runs = json.loads((await get("/runs.json"))[1])
        assert [run["name"] for run in runs["runs"]] == ["a", "b"]
        assert runs["differences"] == [{"setting": "learner.lr", "values": ["0.0001", "0.0"]}]
        names = json.loads((await get("/names.json?run=a&run=b"))[1])
        assert names["names"] == ["eval/mean@1", "policy/loss", "reward/mean"]
        chart = json.loads((await get("/chart.json?metric=eval/mean@1&run=a&run=b&x=wall_s"))[1])
        assert chart["x"] == [0, 120]
        assert [run["columns"] for run in chart["runs"]] == [[[0, 0.25]], [[0, 0.75]]]
        smooth = json.loads((await get("/chart.json?metric=reward/mean&run=a&smooth=0.9"))[1])
        assert len(smooth["runs"][0]["columns"]) == 2
        found = json.loads((await get("/difference.json?a=a&b=b"))[1])
        assert found["interval"]["difference"] == 0.5
        assert found["interval"]["paired"]


async def test_the_csv_has_every_point_of_every_run(pair: list[Path]):
    async with served(pair) as (get, _):
        _, text = await get("/chart.csv?metric=reward/mean&run=a&run=b&smooth=0.5")
        rows = list(csv.reader(io.StringIO(text)))
        assert rows[0] == ["run", "step", "wall_s", "trained_tokens", "reward/mean", "smoothed"]
        assert rows[1] == ["a", "1", "3", "1000", "0.01", "0.01"]
        assert len(rows) == 81


async def test_a_figure_that_one_run_lacks_names_that_run(tmp_path: Path):
    a = write_run(tmp_path / "a", extra={"mine": 1.0})
    b = write_run(tmp_path / "b")

    async with served([a, b]) as (get, _):
        assert '"missing":["b"]' in (await get("/chart.json?metric=mine&run=a&run=b"))[1]
        reason = (await get("/difference.json?a=a&b=b"))[1]
        assert reason == '{"reason":"a has no evaluation (eval.file)"}'


async def test_what_was_not_offered_is_refused(pair: list[Path]):
    many = "&".join(f"run=r{i}" for i in range(MAX_OVERLAID + 1))

    async with served(pair) as (get, _):
        for path in (
            "/chart.json?metric=m&run=../../etc",
            "/chart.json?metric=m&run=a&x=day",
            "/chart.json?metric=m&run=a&smooth=1",
            "/chart.json?metric=m&run=a&smooth=nan",
            f"/chart.json?metric=m&{many}",
            "/difference.json?a=a&b=nobody",
        ):
            assert (await get(path))[0] == 400, path
        assert (await get("/static/../web.py"))[0] == 404


async def test_a_run_that_begins_in_the_folder_comes_into_the_list(tmp_path: Path):
    write_run(tmp_path / "first")

    async with served([], tmp_path) as (get, _):
        assert '"name":"second"' not in (await get("/runs.json"))[1]
        write_run(tmp_path / "second", outcome="running")
        assert '"name":"second"' in (await get("/runs.json"))[1]
