"""What a stage finds: printed as it is found, and kept in a file that a kill leaves whole."""

import argparse
import faulthandler
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.bars import Bars, NotRun

ON_A_CPU = "there is no CUDA here"
_DUMP_BEFORE_S = 3.0  # the end of a stage that hangs: where it hangs
_LAST_LINES = 12  # of a failure


class Skipped(Exception):  # noqa: N818 it is no error
    """Raised by a part that cannot run here; gives the reason."""


class Report:
    """Facts, bars, and the parts that were skipped or failed."""

    def __init__(self, stage: str, file: Path, *, deadline_s: float) -> None:
        self._file = file
        self._began_s = time.monotonic()
        self._deadline_s = deadline_s
        self._bars = Bars()
        self._content: dict[str, object] = {"stage": stage, "status": "running"}
        self._facts: dict[str, object] = {}
        self._kept_bars: list[dict[str, object]] = []
        self._seconds: dict[str, float] = {}
        self._skipped: dict[str, str] = {}
        self._failed: dict[str, str] = {}
        self._write()

    @property
    def left_s(self) -> float:
        """Seconds until the deadline of the stage."""
        return max(0.0, self._began_s + self._deadline_s - time.monotonic())

    def fact(self, name: str, value: object) -> None:
        """Keep something that no bar is for."""
        self._facts[name] = value
        print(f"fact {name}: {value}", flush=True)
        self._write()

    def skip(self, name: str, reason: str) -> None:
        """Keep that a part was left out, and why."""
        self._skipped[name] = reason
        print(f"skipped {name}: {reason}", flush=True)
        self._write()

    def at_most(self, name: str, value: float, unit: str, *, needs: float) -> None:
        """Print and keep a bar that a value must stay below."""
        self._bars.at_most(name, value, unit, needs=needs)
        self._keep(name, value, unit, f"<= {needs:g}", ok=value <= needs)

    def at_least(self, name: str, value: float | NotRun, unit: str, *, needs: float) -> None:
        """Print and keep a bar that a value must reach."""
        self._bars.at_least(name, value, unit, needs=needs)
        if isinstance(value, NotRun):
            self._keep(name, value.reason, unit, f">= {needs:g}", ok=False)
        else:
            self._keep(name, value, unit, f">= {needs:g}", ok=value >= needs)

    def holds(self, name: str, is_so: object) -> None:
        """Print and keep a bar of something that is so or not."""
        self.at_least(name, float(bool(is_so)), "of 1", needs=1)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time a part; one that fails is kept, and the stage continues."""
        began_s = time.monotonic()
        try:
            yield
        except Skipped as reason:
            self.skip(name, str(reason))
        except Exception as error:  # noqa: BLE001 the next part may show more
            lines = traceback.format_exc().splitlines()
            self._failed[name] = "\n".join(lines[-_LAST_LINES:])
            print(f"failed {name}: {type(error).__name__}: {error}", flush=True)
            traceback.print_exc()
        self._seconds[name] = round(time.monotonic() - began_s, 2)
        self._write()

    def end(self) -> int:
        """Write the result and return the exit status."""
        failed = bool(self._failed) or bool(self._bars.exit_code)
        did = self._kept_bars or self._facts
        self._content["status"] = "failed" if failed else "passed" if did else "skipped"
        self._write()
        return int(failed)

    def _keep(self, name: str, value: object, unit: str, needs: str, *, ok: bool) -> None:
        self._kept_bars.append(
            {"name": name, "value": value, "unit": unit, "needs": needs, "ok": ok}
        )
        self._write()

    def _write(self) -> None:
        self._content |= {
            "seconds": round(time.monotonic() - self._began_s, 2),
            "facts": self._facts,
            "bars": self._kept_bars,
            "parts_s": self._seconds,
            "skipped": self._skipped,
            "failed": self._failed,
        }
        partial = self._file.with_suffix(".part")
        partial.write_text(json.dumps(self._content, indent=1, default=str))
        os.replace(partial, self._file)  # noqa: PTH105


def run_stage(stage: str, work: Callable[[Report, Path], None]) -> None:
    """Run one stage as a program of its own, and exit with its status."""
    parser = argparse.ArgumentParser(
        prog=f"stage_{stage}.py", description=(sys.modules["__main__"].__doc__ or "").strip()
    )
    parser.add_argument("--out", type=Path, default=Path("build/device"), help="for STAGE.json")
    parser.add_argument("--deadline", type=float, default=600.0, metavar="S", help="to plan by")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    faulthandler.enable()
    if arguments.deadline > _DUMP_BEFORE_S:
        faulthandler.dump_traceback_later(arguments.deadline - _DUMP_BEFORE_S)
    report = Report(stage, arguments.out / f"{stage}.json", deadline_s=arguments.deadline)
    with report.part(stage):
        work(report, arguments.out)
    status = report.end()
    sys.stdout.flush()
    sys.stderr.flush()
    faulthandler.cancel_dump_traceback_later()
    sys.exit(status)
