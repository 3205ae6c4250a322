"""Lets `import torchvision` succeed where its operators were built for another build of torch.

The wheel of a package index is linked to a CUDA torch. With a CPU torch its operators do not
load, and the import fails, because it gives a meta kernel to operators that were never declared.
Text models call none of them, but transformers imports torchvision. So they are declared, without
a kernel, in the environment that `make setup` made.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path

_PATCH = """

# Added by slipstream's setup: the operators of this build are linked to another build of torch.
if not hasattr(torch.ops.torchvision, "nms"):
    _declared = torch.library.Library("torchvision", "FRAGMENT")
    for _name in ("nms", "qnms"):
        _declared.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def main() -> int:
    """Declare them if they are missing."""
    if _imports():
        return 0
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return 1
    extension = Path(spec.origin).with_name("extension.py")
    text = extension.read_text("utf-8")
    extension.unlink()  # a link to the cache of an installer, perhaps
    extension.write_text(text + _PATCH, "utf-8")
    return 0 if _imports() else 1


def _imports() -> bool:
    return subprocess.run([sys.executable, "-c", "import torchvision"], check=False).returncode == 0


if __name__ == "__main__":
    raise SystemExit(main())
