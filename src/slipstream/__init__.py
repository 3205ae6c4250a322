"""Slipstream: disaggregated asynchronous reinforcement learning for language models.

The packages lie at the top of the repository; the links here give them one import name.
"""

from pathlib import Path as _Path

_PACKAGES = ("algos", "broker", "deploy", "generators", "learner", "weightbus", "wire")
_lost = [name for name in _PACKAGES if not _Path(__file__).with_name(name).is_dir()]
if _lost:
    raise ImportError(
        f"{_Path(__file__).with_name(_lost[0])} is no folder: a zip, or a clone on Windows, has "
        "lost the repository's symbolic links. Clone with `git clone -c core.symlinks=true`; in a "
        "clone run `git config core.symlinks true` and `git checkout -- src`; or install a wheel"
    )
