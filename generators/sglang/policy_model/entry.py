"""The model class of the policy, so that SGLang imports one of its 250 model modules.

SGLang imports the others as soon as it needs a class that is not here.
"""

import importlib
import os
import re
from pathlib import Path

from slipstream.generators.sglang.patches import ARCHITECTURE_VARIABLE

_MODELS = "sglang.srt.models"


def classes_named(architecture: str, package: str = _MODELS) -> list[type]:
    """Return the class that the modules of a package offer under this name; none, or one.

    Args:
        architecture: name of a model class; empty is none.
        package: whose modules offer classes as ``EntryClass``; only the one that defines the
            class is imported.
    """
    if not architecture:
        return []
    folder = Path(importlib.import_module(package).__path__[0])
    definition = re.compile(rf"^class {re.escape(architecture)}\b", re.MULTILINE)
    found = [path for path in folder.glob("*.py") if definition.search(path.read_text("utf-8"))]
    if len(found) != 1:
        return []
    offered = getattr(importlib.import_module(f"{package}.{found[0].stem}"), "EntryClass", [])
    classes = offered if isinstance(offered, list) else [offered]
    return [one for one in classes if one.__name__ == architecture]


EntryClass = classes_named(os.environ.get(ARCHITECTURE_VARIABLE, ""))  # noqa: TID251 spawned
