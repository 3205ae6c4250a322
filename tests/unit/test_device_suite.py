"""The suite for a borrowed GPU keeps what its stages found, however they end."""

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from benchmarks.device.report import Report, Skipped
from benchmarks.device.suite import ROOT, Suite, commit
from benchmarks.device.wheels import LIST, pack

# A program of its own: the suite ends every process that is left below it.
DRIVER = """
import json, sys, time
from pathlib import Path
from benchmarks.device.suite import Stage, Suite, has_ended
out, program, total_s = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])

def over(process, deadline_s):
    if "hangs" not in process.args:
        return has_ended(process, deadline_s)
    while not (out / "left.pid").exists():
        time.sleep(0.01)
    return False  # its deadline

stages = [Stage(n, [sys.executable, "-S", str(program), n], 600) for n in sys.argv[4:]]
sys.exit(Suite(out, total_s, has_ended=over).run(stages))
"""
STAGE = """
import json, os, subprocess, sys, time
from pathlib import Path
name, out = sys.argv[1], Path(sys.argv[3])
(out / f"{name}.json").write_text(json.dumps({"status": "running", "facts": {"of": name}}))
if name == "fails":
    print("fact a: 1")
    print("what went wrong")
    sys.exit(3)
if name == "hangs":
    left = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    (out / "left.part").write_text(str(left.pid))
    os.replace(out / "left.part", out / "left.pid")
    time.sleep(1000)
(out / "seen.json").write_bytes((out / "suite.json").read_bytes())
"""


def run(folder: Path, *names: str, total_s: float = 6000):
    program = folder / "stage.py"
    program.write_text(STAGE)
    out = folder / "out"
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, out, program, str(total_s), *names],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},  # noqa: TID251 handed on
        capture_output=True,
        text=True,
        check=False,
    )
    return done, out, json.loads((out / "suite.json").read_text())["stages"]


def test_a_stage_that_fails_or_hangs_leaves_what_it_found_and_the_next_one_runs(tmp_path: Path):
    done, out, stages = run(tmp_path, "fails", "hangs", "passes")
    assert done.returncode == 1, done.stderr
    assert {name: one["result"] for name, one in stages.items()} == {
        "fails": "failed",
        "hangs": "hung",
        "passes": "passed",
    }
    assert stages["fails"]["exit"] == 3
    for name, one in stages.items():
        assert one["report"] == {"status": "running", "facts": {"of": name}}
    assert "  fact a: 1" in done.stdout
    assert "  | what went wrong" in done.stdout

    assert stages["hangs"]["processes_left"] == 1
    assert not Path(f"/proc/{(out / 'left.pid').read_text()}").exists()

    seen = json.loads((out / "seen.json").read_text())["stages"]
    assert seen == {**stages, "passes": {"result": "not started"}}, "of what a kill would leave"


def test_when_the_time_is_over_stages_are_not_started_and_that_is_no_success(tmp_path: Path):
    done, _, stages = run(tmp_path, "passes", total_s=0)
    assert done.returncode == 1, done.stderr
    assert stages == {"passes": {"result": "not started"}}


def test_figures_are_of_a_date_a_commit_and_a_device(tmp_path: Path):
    about = {"date": "2026-11-24", "commit": commit(), "device": "CPU"}
    assert Suite(tmp_path, 60, about=about).run([]) == 0
    assert json.loads((tmp_path / "suite.json").read_text()) == {**about, "stages": {}}


def test_a_report_is_whole_after_every_part(tmp_path: Path):
    file = tmp_path / "some.json"
    report = Report("some", file, deadline_s=60)
    assert json.loads(file.read_text())["status"] == "running"
    with report.part("good"):
        report.at_most("difference", 0.5, "nats", needs=1)
    with report.part("other"):
        raise Skipped("no GPU")
    with report.part("bad"):
        raise RuntimeError("broken")
    found = json.loads(file.read_text())
    assert found["skipped"] == {"other": "no GPU"}
    assert found["failed"]["bad"].endswith("RuntimeError: broken")
    assert found["bars"] == [
        {"name": "difference", "value": 0.5, "unit": "nats", "needs": "<= 1", "ok": True}
    ]
    assert report.end() == 1
    assert json.loads(file.read_text())["status"] == "failed"


def a_wheel(file: Path, *names: str) -> Path:
    with zipfile.ZipFile(file, "w") as written:
        for name in names:
            info = zipfile.ZipInfo(name)
            info.external_attr = (0o755 if name.endswith("server") else 0o644) << 16
            written.writestr(info, name)
    return file


def test_wheels_are_packed_as_they_are_installed(tmp_path: Path):
    wheels = [
        a_wheel(tmp_path / "a.whl", "a/__init__.py", "a/server", "a-1.data/scripts/a"),
        a_wheel(tmp_path / "b.whl", "b-1.data/platlib/b/__init__.py", "b-1.dist-info/METADATA"),
    ]
    pack(wheels, tmp_path / "site.tar.xz")
    with tarfile.open(tmp_path / "site.tar.xz") as packed:
        packed.extractall(tmp_path / "site", filter="data")
    found = {
        str(path.relative_to(tmp_path / "site")): path
        for path in (tmp_path / "site").rglob("*")
        if path.is_file()
    }
    assert set(found) == {"a/__init__.py", "a/server", "b/__init__.py", "b-1.dist-info/METADATA"}
    assert found["b/__init__.py"].read_text() == "b-1.data/platlib/b/__init__.py"
    assert os.access(found["a/server"], os.X_OK)
    assert not os.access(found["a/__init__.py"], os.X_OK)


def test_wheels_are_pinned_as_they_are_rehearsed():
    rehearsed = (ROOT / "deploy" / "constraints-rehearsal.txt").read_text().splitlines()
    pins = [line for line in LIST.read_text().splitlines() if line and not line.startswith("#")]
    assert all("==" in line for line in pins)
    known = {line.partition("==")[0] for line in rehearsed}
    for line in pins:
        assert line in rehearsed or line.partition("==")[0] not in known, line
