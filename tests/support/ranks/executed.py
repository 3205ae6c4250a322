"""A command of `slipstream` in a fork, and what it becomes in the same process.

A process that is replaced has its imports to do again.
"""

import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from slipstream.deploy import main as deploy_main


def become(_program: str, command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Run `python -m MODULE ...` as ``os.execve`` would."""
    _, dash_m, module, *words = command
    assert dash_m == "-m", command
    os.environ.clear()  # noqa: TID251 as there
    os.environ.update(environment)  # noqa: TID251
    sys.argv = [module, *words]
    sys.modules.pop(module, None)  # it becomes __main__
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    raise SystemExit(0)


if __name__ == "__main__":
    os.execve = become
    os.execv = lambda program, command: become(program, command, dict(os.environ))  # noqa: TID251
    raise SystemExit(deploy_main.main())
