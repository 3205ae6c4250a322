"""Runs a script with recorders first on its path, and prints what they were called with.

Runs in the sandbox: the standard library only; ``script_run.py`` hands it over as ``main.py``. Its
input has the script with its name, the programs to record, and the script's variables.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

_SET_SUBREAPER = 36
# Three folders in memory of this run: scripts empty /tmp and the folder that they are in.
_SCRIPT, _PROGRAMS, _CALLS = (Path.cwd() / name for name in ("script", "programs", "calls"))
_RECORDER = f"""#!/bin/bash
printf '%s\\0' "${{0##*/}}" "$@" > {_CALLS}/$$
"""


def main() -> None:
    """Run the script; wait for all that it started."""
    request = json.load(sys.stdin)
    for folder in (_SCRIPT, _PROGRAMS, _CALLS):
        folder.mkdir()
    (_SCRIPT / request["name"]).write_bytes(request["text"].encode())
    for name in request["programs"]:
        (_PROGRAMS / name).write_text(_RECORDER)
        (_PROGRAMS / name).chmod(0o755)
    variables = {"PATH": os.environ["PATH"], **request["variables"]}  # noqa: TID251 the sandbox's
    variables["PATH"] = f"{_PROGRAMS}:{variables['PATH']}"
    ctypes.CDLL(None).prctl(_SET_SUBREAPER, 1, 0, 0, 0)  # daemons become our children
    command = ["/bin/bash", "--", request["name"]]
    with subprocess.Popen(  # noqa: S603
        command, cwd=_SCRIPT, env=variables, stdin=subprocess.DEVNULL, stdout=2
    ) as script:
        code = script.wait()
    while True:
        try:
            os.wait()
        except ChildProcessError:
            break
    # Without the folder, which a script can remove, there are no calls.
    calls = sorted(_CALLS.glob("*"), key=lambda path: (path.stat().st_mtime_ns, int(path.name)))
    texts = [path.read_text("utf-8", errors="replace") for path in calls]
    sys.stdout.write(
        json.dumps({"commands": [text.split("\0")[:-1] for text in texts], "code": code})
    )


if __name__ == "__main__":
    main()
