"""docs/weight-bus.md, followed word for word: a generator on another host (network namespaces)."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.broker.report.summary import PUBLISHES
from slipstream.wire.files.run_folder import ACCOUNT, SUMMARY
from tests.e2e.hosts import Host, end, toml_of, two_hosts
from tests.support.guide import fences
from tests.support.tiny_run import ROOT, tiny_inputs, tiny_settings
from tests.support.waiting import HANG_S

pytestmark = [pytest.mark.e2e]
DOCUMENT = ROOT / "docs" / "weight-bus.md"
FAR = "gpu-7/generator-7"


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    with two_hosts(tmp_path) as both:
        yield both


def held_by_both(head: Host) -> list[dict[str, str]]:
    """Return digests of what engines held, by engine, for versions that both have adopted."""
    if "adopted" not in (head.folder.parent / "far" / "generator.log").read_text():
        return []
    view = json.loads(head.run("slipstream versions runs/tiny --json"))
    digests = [one["engine_digests"] for one in view["publishes"]]
    return [one for one in digests if one.keys() >= {FAR, "generator-0"}]


@pytest.mark.parametrize(
    "bulk",
    # without encryption the sockets are those of tests/integration/test_plain_bulk.py
    ["encrypted", pytest.param("plain", marks=pytest.mark.slow)],
)
def test_generator_on_another_host_joins_by_the_documented_commands(
    hosts: tuple[Host, Host], bulk: str
):
    head, far = hosts
    kinds, texts = zip(
        *fences(DOCUMENT, "Five minutes to a generator on another host"), strict=True
    )
    assert kinds == ("toml", "bash", "bash", "bash")
    section, on_head, fetch, start = texts
    make_key, run = on_head.strip().splitlines()
    tiny_inputs(head.folder)
    settings = tiny_settings(head.folder) | {
        "run.dir": "runs",
        "run.steps": 40,
        "generators.count": 1,
        "checkpoint.export_at_end": False,
    }
    section = section.replace("[weightbus]", '[weightbus]\ntransport = "collective"')
    section = section.replace("[weightbus]", f'[weightbus]\nbulk = "{bulk}"')
    text = toml_of(settings) + section.replace("10.0.0.1", "10.77.0.1")
    (head.folder / "run.toml").write_text(text)

    head.run(make_key)
    running = head.start(run.strip(), head.folder / "run.log")
    generator = None
    try:
        far.run(fetch)
        generator = far.start(start.strip(), far.folder / "generator.log")
        deadline = time.monotonic() + HANG_S
        held: list[dict[str, str]] = []
        while running.poll() is None and time.monotonic() < deadline:
            assert generator.poll() in {None, 0}, (far.folder / "generator.log").read_text()
            held = held or held_by_both(head)
            time.sleep(1.0)  # each check is a command
        logs = (head.folder / "run.log").read_text() + (far.folder / "generator.log").read_text()
        assert running.poll() == 0, logs
        assert generator.wait(HANG_S) == 0, logs
    finally:
        for process in (running, generator):
            if process is not None and process.poll() is None:
                end(process)
    (folder,) = (head.folder / "runs").glob("tiny*")
    account = json.loads((folder / ACCOUNT).read_text())
    assert (account["finished"], account["unaccounted"]) == (True, 0)
    summary = json.loads((folder / SUMMARY).read_text())
    publishes = [one for one in summary[PUBLISHES] if FAR in one["adopted_by"]]
    assert {one["transports"][FAR] for one in publishes} == {"tcp", "collective"}
    assert held
    written = "".join(path.read_text() for path in folder.glob("logs/*.log"))
    assert ("buckets go unencrypted" in written) is (bulk == "plain")
    for digests in held:  # the same bytes came over both networks
        assert digests[FAR] == digests["generator-0"]
    tokens = {role["name"]: role["tokens_per_second"] for role in summary["roles"]}
    assert tokens[FAR] > 0
