"""The model class of the policy, so that SGLang imports only one of its 250 model modules.

SGLang imports the others once it needs a class that is not here.
"""

import importlib
import os
import re
from pathlib import Path

from slipstream.generators.sglang.patches import ARCHITECTURE_VARIABLE

_MODELS = "sglang.srt.models"


def classes_named(architecture: str, package: str = _MODELS) -> list[type]:
    """Return the class with this name in the modules of a package, or an empty list.

    Args:
        architecture: Name of a model class; empty for no class.
        package: Package with modules that offer classes as ``EntryClass``; only the module that
            defines the class is imported.
    """
    if not architecture:
        return []
    folder = Path(importlib.import_module(package).__path__[0])
    definition = re.compile(rf"^class {re.escape(architecture)}\b", re.MULTILINE)
    found = [path for path in folder.glob("*.py") if definition.search(path.read_text("utf-8"))]
    classes: list[type] = []
    for path in found:  # Qwen3.5's body has the name of the model around it
        offered = getattr(importlib.import_module(f"{package}.{path.stem}"), "EntryClass", [])
        classes += offered if isinstance(offered, list) else [offered]
    named = [model for model in classes if model.__name__ == architecture]
    return named if len(named) == 1 else []


EntryClass = classes_named(os.environ.get(ARCHITECTURE_VARIABLE, ""))  # noqa: TID251 spawned
