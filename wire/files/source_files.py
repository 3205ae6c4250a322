"""Python that a user names in a setting: a file, or a module that Python or this folder has."""

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def module_named(where: str) -> ModuleType:
    """Return the module ``FILE.py`` or ``MODULE``; modules of the current folder are found, too.

    The folder of a file is on ``sys.path``, so that it can import its neighbors; installed packages
    go first, and a file that is named like a library is imported under another name. Errors of
    the module's import pass through.

    Raises:
        FileNotFoundError: the file does not exist.
        ImportError: the module does not exist, or the file is no Python file.
    """
    if where.endswith(".py"):
        return _of_file(Path(where))
    here = str(Path.cwd())
    if here in sys.path or "" in sys.path:
        return importlib.import_module(where)
    sys.path.append(here)  # last: installed packages go first
    return importlib.import_module(where)


def _of_file(path: Path) -> ModuleType:
    real = path.resolve()
    # The target of a link may have no such name, as in the folders of the Hugging Face Hub.
    path = real if real.suffix == ".py" else path.parent.resolve() / path.name
    if not path.is_file():
        raise FileNotFoundError(f"No such file: {path}")
    name = path.stem
    if _is_of_another(name, path):
        name = f"{name}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # last: a neighbor named as a library hides none
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look it up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _is_of_another(name: str, path: Path) -> bool:
    """True if another module than this file has the name, imported or not."""
    if name in sys.modules:
        return getattr(sys.modules[name], "__file__", None) != str(path)
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # a name with a dot, of no package
        return False
    return spec is not None and (spec.origin is None or Path(spec.origin).resolve() != path)
