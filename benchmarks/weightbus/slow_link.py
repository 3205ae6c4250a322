"""The quickstart with its generators on the learner's host, or at the other end of a slow link."""

import json
import shutil
import subprocess
import time
import tomllib
from pathlib import Path
from typing import Any

import tomli_w

from slipstream.broker.report.summary import PUBLISHES
from slipstream.deploy.examples.addition import prepare
from slipstream.wire.files.run_folder import SUMMARY
from tests.e2e.hosts import Host, Link, end, two_hosts
from tests.support.tiny_run import ROOT
from tests.support.waiting import HANG_S

LINK = Link(round_trip_s=0.08, mbit=50)
GENERATORS = 2


class LinkRun:
    """One run. ``way`` is local, or the encoding of generators at the other end of the link."""

    def __init__(self, folder: Path, way: str, *, steps: int = 80) -> None:
        self._folder = folder
        self._way = way
        self._steps = steps

    def result(self) -> tuple[str, list[float]]:
        """Return the learner's log, and bytes that a generator fetched in each later publish."""
        with two_hosts(self._folder, LINK) as (head, far):
            self._run(head, far)
        runs = self._folder / "head" / "runs" / "quickstart"
        summary = json.loads((runs / SUMMARY).read_text())
        sizes = [float(size) for one in summary[PUBLISHES][1:] for size in fetched(one)]
        return (runs / "logs" / "learner.log").read_text(), sizes

    def _run(self, head: Host, far: Host) -> None:
        is_local = self._way == "local"
        prepare(head.folder / ".cache" / "addition")
        shutil.copytree(head.folder / ".cache", far.folder / ".cache")
        table = tomllib.loads((ROOT / "configs" / "quickstart.toml").read_text())
        table["run"] |= {"dir": "runs", "steps": self._steps}
        table["eval"]["every_steps"] = 0
        table["learner"]["dtype"] = "bfloat16"
        table["generators"] |= {"dtype": "bfloat16", "count": GENERATORS if is_local else 0}
        table["weightbus"] = {
            "listen": "tcp://10.77.0.1:5600",
            "transport": "tcp",
            "encoding": "auto" if is_local else self._way,
        }
        (head.folder / "run.toml").write_text(tomli_w.dumps(table))
        started: list[subprocess.Popen[bytes]] = []
        try:
            for number in range(GENERATORS):
                make = f"slipstream keys make far-{number} --role generator"
                head.run(f"{make} --config run.toml")
            command = "slipstream run --config run.toml broker.listen=tcp://0.0.0.0:5555"
            started.append(head.start(command, head.folder / "run.log"))
            for number in range(0 if is_local else GENERATORS):
                shutil.copy(head.folder / f"runs/keys/clients/far-{number}.key", far.folder)
                shutil.copy(head.folder / "run.toml", far.folder)
                reach = f"run.broker=tcp://head:5555 run.key_file=far-{number}.key"
                command = f"start-generator --config run.toml --name g-{number} {reach}"
                started.append(far.start(command, far.folder / f"g-{number}.log"))
            began_s = time.monotonic()
            while started[0].poll() is None and time.monotonic() - began_s < HANG_S:
                time.sleep(0.2)
            if started[0].poll() != 0:
                raise RuntimeError((head.folder / "run.log").read_text()[-3000:])
        finally:
            for process in started:
                if process.poll() is None:
                    end(process)


def fetched(publish: dict[str, Any]) -> list[int]:
    """Return the bytes that each member of a publish fetched over a socket."""
    return [size for size in publish["fetched_bytes"].values() if size]
