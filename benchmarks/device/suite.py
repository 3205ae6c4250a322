"""Everything that a borrowed GPU is to show, stage by stage, with what there is of time.

A stage is a process with a deadline of its own. What it found is in OUT/suite.json as soon as it
has ended, however it ended; the next one runs all the same. Needs the standard library alone.
"""

import argparse
import ctypes
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEADLINES_S = {
    "mfu": 120.0,  # first, and alone: it measures speed
    "env": 30.0,
    "attention": 45.0,
    "learner": 105.0,
    "engine": 150.0,
    "bus": 120.0,
    "loop": 150.0,
    "shape": 150.0,
    "adapters": 120.0,
    "families": 90.0,
    "algorithms": 90.0,
    "kept": 120.0,
    "agents": 180.0,
}
_EXAMPLE = """examples:
  python3 -u benchmarks/device/suite.py --out OUT
  python3 -u benchmarks/device/suite.py --out OUT --stages loop,mfu
  make device-rehearsal          on a CPU, tiny sizes
"""
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_END_S = 10.0  # for killed processes to be gone
_POLL_S = 0.05
_LAST_LINES = 15
Over = Callable[["subprocess.Popen[bytes]", float], bool]


@dataclass(frozen=True, slots=True)
class Stage:
    """One program; it writes OUT/NAME.json."""

    name: str
    command: Sequence[str]
    deadline_s: float


def has_ended(process: "subprocess.Popen[bytes]", deadline_s: float) -> bool:
    """Wait for a process; False if it still runs after the deadline."""
    try:
        process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        return False
    return True


@dataclass
class Suite:
    """Runs stages and keeps what they found."""

    out: Path
    deadline_s: float
    environment: dict[str, str] = field(default_factory=dict)
    about: dict[str, str] = field(default_factory=dict)
    """What all figures are of: date, commit, device."""
    has_ended: Over = has_ended
    clock: Callable[[], float] = time.monotonic

    def run(self, stages: Sequence[Stage]) -> int:
        """Return the exit status: 1 if a stage failed, hung or was not started."""
        self.out.mkdir(parents=True, exist_ok=True)
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)  # what a stage leaves is ours to end
        began_s = self.clock()
        results: dict[str, dict[str, object]] = {
            stage.name: {"result": "not started"} for stage in stages
        }
        self._write(results)
        for stage in stages:
            left_s = self.deadline_s - (self.clock() - began_s)
            if left_s <= 0:
                print(f"stage {stage.name}: not started, the time is over", flush=True)
                continue
            results[stage.name] = self._run(stage, min(stage.deadline_s, left_s))
            self._write(results)
        bad = [name for name, one in results.items() if one["result"] not in ("passed", "skipped")]
        print(f"suite: {len(stages) - len(bad)} of {len(stages)} stages ok, {self.out}/suite.json")
        return int(bool(bad))

    def _run(self, stage: Stage, deadline_s: float) -> dict[str, object]:
        print(f"stage {stage.name}: at most {deadline_s:.0f} s", flush=True)
        log, found = self.out / f"{stage.name}.log", self.out / f"{stage.name}.json"
        found.unlink(missing_ok=True)
        began_s = self.clock()
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*stage.command, "--out", str(self.out), "--deadline", f"{deadline_s:.0f}"],
                cwd=ROOT,
                env={**os.environ, **self.environment},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            ended = self.has_ended(process, deadline_s)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        left = end_descendants()
        report = _read(found)
        result = "hung" if not ended else "passed" if process.returncode == 0 else "failed"
        if result == "passed" and report.get("status") == "skipped":
            result = "skipped"
        seconds = round(self.clock() - began_s, 1)
        lines = log.read_text(errors="replace").splitlines()
        for line in lines:
            if line.startswith(("bar ", "fact ", "skipped ", "failed ")):
                print(f"  {line}")
        if result in ("failed", "hung"):
            print("\n".join(f"  | {line}" for line in lines[-_LAST_LINES:]))
        print(f"stage {stage.name}: {result} in {seconds} s", flush=True)
        return {
            "result": result,
            "exit": process.returncode,
            "seconds": seconds,
            "deadline_s": deadline_s,
            "processes_left": left,
            "report": report,
        }

    def _write(self, results: dict[str, dict[str, object]]) -> None:
        partial = self.out / "suite.part"
        partial.write_text(json.dumps({**self.about, "stages": results}, indent=1))
        partial.replace(self.out / "suite.json")


def end_descendants() -> int:
    """Kill what a stage has left behind, sessions of their own included; return how many."""
    ended: set[int] = set()
    until_s = time.monotonic() + _END_S
    while children := _children():
        for pid in children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        ended.update(children)
        if time.monotonic() > until_s:
            break
        time.sleep(_POLL_S)
    return len(ended)


def _children() -> set[int]:
    """Return the children of this process; those of a child that has ended have become ours."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            found.update(map(int, (task / "children").read_text().split()))
    return found


def _read(path: Path) -> dict[str, object]:
    try:
        content: dict[str, object] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content


def stages_of(names: Sequence[str], *, stretch: float = 1.0) -> list[Stage]:
    """Return stages by name, their deadlines ``stretch`` times as long."""
    return [
        Stage(
            name,
            [sys.executable, "-u", "-m", f"benchmarks.device.stage_{name}"],
            stretch * DEADLINES_S[name],
        )
        for name in names
    ]


def environment_of(out: Path, *, on_gpu: bool) -> dict[str, str]:
    """Return what stages find beside this process's environment: our packages, and stand-ins."""
    paths = [ROOT / ".site", ROOT / "src", ROOT]
    device = ROOT / "benchmarks" / "device"
    if find_spec("IPython") is None:  # sglang imports its display module, and never calls it
        paths.append(device / "standin" / "display")
    variables = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    if on_gpu:
        variables["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "4")
        if find_spec("sgl_kernel") is None:
            paths.append(device / "standin" / "kernels")
            variables |= {
                "SGLANG_FORCE_FUSED_OP_BACKEND": "torch",
                "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
            }
    if not _is_installed():
        paths.append(_metadata(out))
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    known = [str(path) for path in paths]
    variables["PYTHONPATH"] = os.pathsep.join([*known, *(p for p in given if p and p not in known)])
    return variables


def _is_installed() -> bool:
    try:
        version("slipstream")
    except PackageNotFoundError:
        return False
    return True


def _metadata(out: Path) -> Path:
    """Write a version of slipstream where importlib.metadata reads it; nothing is installed."""
    folder = out.resolve() / "metadata"
    info = folder / "slipstream-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: slipstream\nVersion: 0\n")
    return folder


def gpus() -> list[str]:
    """Return the GPUs that the driver lists, by name."""
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],  # noqa: S607
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return listed.stdout.strip().splitlines() if listed.returncode == 0 else []


def commit() -> str:
    """Return the commit of this checkout; empty where git does not know it."""
    try:
        found = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"],  # noqa: S607 wherever it is
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return ""
    return found.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="suite.py",
        description=(__doc__ or "").partition("\n")[0],
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for suite.json and logs")
    parser.add_argument(
        "--stages", default=",".join(DEADLINES_S), metavar="A,B", help="default: %(default)s"
    )
    parser.add_argument(
        "--deadline", type=float, default=540.0, metavar="S", help="of all, default %(default)s"
    )
    parser.add_argument(
        "--stretch", type=float, default=1.0, metavar="X", help="deadlines of stages times this"
    )
    parser.add_argument(
        "--commit", default=commit(), metavar="NAME", help="default: that of this checkout"
    )
    arguments = parser.parse_args()
    names = arguments.stages.split(",")
    if unknown := [name for name in names if name not in DEADLINES_S]:
        parser.error(f"unknown stages {', '.join(unknown)}; known: {', '.join(DEADLINES_S)}")
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    found = gpus()
    about = {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": arguments.commit or "unknown",
        "device": "; ".join(found) or f"CPU, {os.cpu_count()} cores",
        "python": platform.python_version(),
    }
    environment = environment_of(out, on_gpu=bool(found))
    stages = stages_of(names, stretch=arguments.stretch)
    return Suite(out, arguments.deadline, environment, about).run(stages)


if __name__ == "__main__":
    sys.exit(main())
