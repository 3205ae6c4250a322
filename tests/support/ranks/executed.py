"""A command of `slipstream` in a fork, and what it becomes in the same process.

A process that is replaced has its imports to do again.
"""

import os
import runpy
import sys
from typing import Any, NoReturn

from slipstream.deploy import main as deploy_main


def become(path: object, argv: Any, env: Any) -> NoReturn:  # noqa: ANN401 as there
    """Run `python -m MODULE ...` as ``os.execve`` would."""
    _, dash_m, module, *words = argv
    assert dash_m == "-m", (path, argv)
    os.environ.clear()  # noqa: TID251 as there
    os.environ.update(env)  # noqa: TID251
    sys.argv = [module, *words]
    sys.modules.pop(module, None)  # it becomes __main__
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    raise SystemExit(0)


if __name__ == "__main__":
    os.execve = become
    os.execv = lambda path, argv: become(path, argv, dict(os.environ))  # noqa: TID251
    raise SystemExit(deploy_main.main())
