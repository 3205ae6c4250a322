"""Records outputs of an engine's layers by hooks that SGLang calls (``forward_hooks``).

Each call writes one file, FOLDER/NUMBER.CALL.npy; NUMBER is the number of the point.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np


def recorder_of(config: Mapping[str, Any]) -> Callable[[object, object, object], None]:
    """Return a hook that writes a module's output.

    Args:
        config: Entries ``folder`` and ``number`` of the file's name, and ``experts``: True if the
            output is a choice of experts.
    """
    folder, number, is_choice = Path(config["folder"]), int(config["number"]), config["experts"]
    calls = 0

    def record(_module: object, _inputs: object, output: Any) -> None:  # noqa: ANN401
        nonlocal calls
        tensor = output.topk_ids if is_choice else output
        tensor = tensor[0] if isinstance(tensor, tuple) else tensor
        unfinished = folder / f"{number}.{calls}.tmp.npy"
        np.save(unfinished, tensor.detach().float().cpu().numpy(), allow_pickle=False)
        unfinished.rename(folder / f"{number}.{calls}.npy")
        calls += 1

    return record
